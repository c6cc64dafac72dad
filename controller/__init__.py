"""The single controller: algorithms as straight-line code over role groups. Imports no torch."""

import rlhf as rlhf  # before gRPC, which it sets up
