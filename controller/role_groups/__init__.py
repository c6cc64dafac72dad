"""Role groups: all ranks of a service called as one, with futures for results."""
