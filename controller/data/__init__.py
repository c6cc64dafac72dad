"""Data of a run: readers of data sets, chat templates, and the order in which rows are drawn."""
