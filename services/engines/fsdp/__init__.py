"""The training engine fsdp, and low-rank adapters on it."""
