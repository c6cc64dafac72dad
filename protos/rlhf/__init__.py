"""The contract between services and their clients: protos with their generated stubs, errors, channels and
addresses."""
