"""Checkpoints and layouts of sharded weights."""
