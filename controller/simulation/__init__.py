"""Runs of the real controller on simulated ranks, in virtual time."""
