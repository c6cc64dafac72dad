"""The tensor store of a rank: shards in an arena of shared memory, and their conversion to and from tensors."""
