"""Checks of a server against the contract, from outside: it may be written in any language."""

import rlhf as rlhf  # before gRPC, which it sets up
