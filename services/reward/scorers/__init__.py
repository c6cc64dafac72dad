"""The interface of scorers, and a function that scores rows in parallel."""
