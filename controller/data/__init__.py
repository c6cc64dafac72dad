"""Prompts: data sets, chat templates, the order in which rows are drawn."""
