"""Types of models, the values of `model_type` in a config.json, that ranks can compute together."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose transformer consists of an embedding, equal layers and a norm, and nothing else, so that pipeline stages
and tensor ranks can share it. Models of other types may, for example, scale the embedding's output, which every
pipeline stage would repeat."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Types of mixtures of experts that differ from `FAMILIES` in their feed-forward layers alone."""
PACKED = (*FAMILIES, *MIXTURES)
"""Types whose rows engine fsdp packs."""
