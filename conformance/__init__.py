"""Checks of a server against the contract, from outside: it may be written in any language."""
