"""Batches by reference, meshes, transfer protocols, plans, and their protobuf form. Pure; does not import torch."""
