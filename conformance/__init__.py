"""Checks of a server against the contract, over the network, so that it may be written in any language."""

import rlhf  # noqa: F401  Sets the verbosity of gRPC, and so comes before it.
