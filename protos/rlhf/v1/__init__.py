"""Protos of version 1 of the contract, and the modules that are generated from them."""
