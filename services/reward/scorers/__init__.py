"""The interface of scorers, and scoring of rows side by side."""
