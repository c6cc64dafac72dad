"""A run: its steps, rewards and evaluation, and the interface of algorithms."""
