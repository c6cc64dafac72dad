"""Computation on micro-batches: packing, output heads, linear layers and norms."""
