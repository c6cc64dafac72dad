"""Measured claims. Each benchmark is a command of its own; see README.md."""

import rlhf as rlhf  # before gRPC, which it sets up
