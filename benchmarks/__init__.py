"""Measured claims. Each benchmark is a command of its own; see README.md."""
