"""The GPU of a rank: the CUDA calls that the data plane makes, and conversion of its memory to and from tensors."""
