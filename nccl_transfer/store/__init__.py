"""The tensor store of a rank: an arena of shared memory, shards in it, and tensors from and to them."""
