"""Outputs of a run: run directory, metrics, samples, timeline, terminal display and report."""
