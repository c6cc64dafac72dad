"""What a run leaves behind and shows: its directory, metrics, samples, timeline, progress and report."""
