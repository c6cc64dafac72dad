"""The interface of scorers."""
