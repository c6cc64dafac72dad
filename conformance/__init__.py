"""Checks of a server against the contract, over the network, so that it may be written in any language."""
