"""The actor role."""
