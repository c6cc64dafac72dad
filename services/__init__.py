"""The role services: what torchrun starts, one process per rank."""
