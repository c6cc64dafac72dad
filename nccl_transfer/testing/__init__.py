"""Checks of transports that others can run."""
