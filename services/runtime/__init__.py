"""The runtime of a rank: its server, calls in order, sessions, and its peers. Without models."""
