"""The role services: what torchrun starts, one process per rank."""

import rlhf as rlhf  # before gRPC, which it sets up
