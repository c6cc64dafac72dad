"""The training engine zero, on DeepSpeed."""
