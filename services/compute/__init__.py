"""Computation on micro-batches: splitting, packing, attention, output heads, linear layers and norms."""
