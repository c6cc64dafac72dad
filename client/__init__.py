"""gRPC client of one rank: its channel, its stream of calls, and the session of a run. Imports no torch."""
