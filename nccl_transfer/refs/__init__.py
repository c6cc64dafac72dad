"""Batches by reference, meshes, transfer protocols, plans and their wire form: pure, without torch."""
