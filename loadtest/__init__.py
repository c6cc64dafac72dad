"""Load tests of single services: what a client of theirs would see, at a rate it chooses."""
