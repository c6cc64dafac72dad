"""Checkpoints of a run: the state of the controller beside that of the services, committed as one, and what a resumed
run is compared with."""
