"""Checkpoints and layouts of sharded weights, and directories that are published atomically."""
