"""The data plane: batches by reference, named transfer protocols, tensor stores and transports."""
