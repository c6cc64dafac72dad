"""The role services, one process per rank."""
