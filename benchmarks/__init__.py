"""Measured claims. Each benchmark is a command of its own; see README.md."""

import controller as controller  # before gRPC, which it sets up
