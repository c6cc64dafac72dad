"""Weights of a model between services: packing them into buckets on one side, and reading these on the other."""
