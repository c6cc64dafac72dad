"""Transports between GPUs: CUDA IPC between processes on the same GPU, NCCL between two GPUs."""
