"""The reward role; cost models too."""
