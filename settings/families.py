"""Types of models, the values of `model_type` in a config.json, by how engines compute them."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose transformer consists of an embedding, equal layers and a norm, and nothing else, so that pipeline stages
and tensor ranks can share it. Models of other types may, for example, scale the embedding's output, which every
pipeline stage would repeat."""
LLAMA_LIKE = (
    *FAMILIES,
    *("arcee", "ernie4_5", "gemma", "glm", "helium", "hunyuan_v1_dense", "ministral", "ministral3"),
    *("nanochat", "olmo", "seed_oss", "smollm3", "starcoder2"),
    *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "mixtral", "olmoe"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Types whose layers add to their input x first attention(norm(x)), whose last part is a linear layer `o_proj`, and to
that sum y then mlp(norm(y)), with the names that Llama has for these modules."""
PACKED = (
    *LLAMA_LIKE,
    *("apertus", "cohere", "cohere2", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite"),
    *("granite_swa", "minicpm3", "olmo2", "olmo3", "phi", "phi3", "vaultgemma"),
    *("gpt_oss", "granitemoe", "minimax_m2"),
)
"""Types whose rows engine fsdp packs. Their tokens meet in attention alone, which goes through the interface of
transformers, windows included, and depend on their positions by `position_ids` alone. Their logits are products of
hidden states and weight, scaled and capped as `logit_scale`, `logits_scaling` and `final_logit_softcapping` of the
configuration say. tests/unit/test_model_types.py compares each with rows alone."""
