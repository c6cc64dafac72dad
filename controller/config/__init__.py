"""The configuration of a run, a file for each table."""
