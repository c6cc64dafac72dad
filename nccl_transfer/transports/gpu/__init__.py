"""Transports between GPUs: CUDA IPC on one device, NCCL between two."""
