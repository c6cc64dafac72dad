"""The data plane, which moves batches between ranks: batches by reference, transfer protocols, stores and
transports."""
