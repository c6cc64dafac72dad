"""Tiny models of many types of transformers, with whatever makes each type different from Llama: windows, capped
scores and logits, sinks, multipliers, experts, recurrent layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 61
WINDOW = 5
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
POSITIONS: dict[str, Any] = {"max_position_embeddings": 128}
WIDE: dict[str, Any] = {"initializer_range": 0.25}
GROUPED: dict[str, Any] = {
    **TOKENS,
    **POSITIONS,
    **WIDE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}
WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CAPS: dict[str, Any] = {
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
"""Keys and values of more numbers than these two have in Llama, and of different ones."""
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
GPT: dict[str, Any] = {**TOKENS, **WIDE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FALCON: dict[str, Any] = {
    **TOKENS,
    **POSITIONS,
    **WIDE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "arcee": HEADS,
    "bamba": {**GROUPED, **MAMBA, "attn_layer_indices": [1]},
    "bloom": {**TOKENS, **WIDE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": {**GROUPED, "logit_scale": 0.5},
    "cohere2": {**HEADS, **WINDOWS, "logit_scale": 0.5},
    "deepseek_v2": {**GROUPED, **LATENT, **ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**GROUPED, **LATENT, **ROUTED},
    "dots1": {**HEADS, **WINDOWS, **ROUTED},
    "ernie4_5": HEADS,
    "ernie4_5_moe": {
        **HEADS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": {**GROUPED, **WINDOWS, "sliding_window_pattern": 2},
    "falcon": {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": {**HEADS, **MAMBA, "mamba_d_ssm": 64},
    "falcon_mamba": {**TOKENS, **WIDE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "gemma": HEADS,
    "gemma2": {**HEADS, **WINDOWS, **CAPS},
    "gemma3": {
        "text_config": {**HEADS, **WINDOWS, "model_type": "gemma3_text", "query_pre_attn_scalar": 12},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
        "boi_token_index": 58,
        "eoi_token_index": 59,
    },
    "gemma3_text": {**HEADS, **WINDOWS, "query_pre_attn_scalar": 12},
    "gemma4_text": {
        **HEADS,
        **WINDOWS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": {**HEADS, **ROUTED},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {
        **TOKENS,
        **POSITIONS,
        **WIDE,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "window_size": WINDOW,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"},
    "gpt_oss": {**HEADS, **LOCAL_EXPERTS, **WINDOWS},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {**GROUPED, **MULTIPLIERS},
    "granite_swa": {**GROUPED, **MULTIPLIERS, "sliding_window": WINDOW},
    "granitemoe": {**GROUPED, **MULTIPLIERS, **LOCAL_EXPERTS},
    "granitemoehybrid": {
        **GROUPED,
        **MULTIPLIERS,
        **LOCAL_EXPERTS,
        **MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
    },
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "jamba": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "llama": HEADS,
    "llama4_text": {
        **HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0],
    },
    "mamba2": {
        **TOKENS,
        **WIDE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 1,
    },
    "minicpm3": {**GROUPED, **LATENT, "dim_model_base": 48},
    "minimax_m2": {**HEADS, **LOCAL_EXPERTS},
    "ministral": {**HEADS, **WINDOWS},
    "ministral3": {**HEADS, "sliding_window": None},
    "mistral": {**HEADS, "sliding_window": WINDOW},
    "mixtral": {**HEADS, **LOCAL_EXPERTS},
    "mpt": {**WIDE, "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "nanochat": HEADS,
    "nemotron": GROUPED,
    "nemotron_h": {
        **HEADS,
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "olmo": {**GROUPED, "clip_qkv": 1.5},
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, **WINDOWS},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        **TOKENS,
        **POSITIONS,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "init_std": 0.25,
    },
    "phi": {
        **{key: value for key, value in GROUPED.items() if key != "num_key_value_heads"},
        "partial_rotary_factor": 0.5,
    },
    "phi3": {**GROUPED, "sliding_window": WINDOW},
    "phimoe": {**HEADS, **LOCAL_EXPERTS, "sliding_window": WINDOW},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": HEADS,
    "qwen3_5_text": {**HEADS, **DELTA},
    "qwen3_moe": {**HEADS, **EXPERTS},
    "qwen3_next": {**HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {
        **TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_window_size": WINDOW,
        "lru_width": 32,
        "block_types": ["recurrent", "attention"],
    },
    "seed_oss": HEADS,
    "smollm3": {**GROUPED, **WINDOWS, "no_rope_layers": [1, 0], "use_sliding_window": True},
    "stablelm": {**GROUPED, "use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {**GROUPED, "sliding_window": WINDOW},
    "vaultgemma": {**HEADS, **WINDOWS, **CAPS},
}
"""Keyword arguments of each type's configuration, by `model_type`."""


def configuration(model_type: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**CONFIGS[model_type])


def write_directory(model_type: str, directory: Path) -> None:
    """Writes a random model in float32. Norms, biases and sinks differ from their first values, which would hide what
    is left out."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(configuration(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config = GenerationConfig(eos_token_id=2)
    model.save_pretrained(directory)


def in_eager_mode(model: Any) -> Any:
    """Makes a mixture compute each expert by itself, and returns the model: other ways compute in float32 at most."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def plain_model(directory: Path) -> PreTrainedModel:
    """The model in float64, with the attention that its authors wrote down."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    return in_eager_mode(model.eval())
