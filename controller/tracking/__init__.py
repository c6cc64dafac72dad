"""Outputs of a run: its directory, metrics, samples, timeline, progress and report."""
