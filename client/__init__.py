"""The client of a rank: its channel, its stream of calls, and sessions. Imports no torch."""
