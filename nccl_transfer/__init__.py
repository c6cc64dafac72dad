"""The data plane: batches by reference, named transfer protocols, tensor stores and transports."""

import rlhf as rlhf  # before gRPC, which it sets up
