"""The reference role."""
