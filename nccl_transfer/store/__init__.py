"""The tensor store of a rank: shards in an arena of shared memory, and their conversion from and to tensors."""
