"""Predicted memory of one rank against what torch's allocator really gives out: updates, forward passes, generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocations import allocations
from transformers import AutoConfig, AutoModelForCausalLM

from integration.predicted_memory_main import MICRO_BATCHES, Rows, measure
from services.models.families import load_causal_lm
from services.rollout.base import Meter, SamplingOptions
from services.rollout.hf import HFRollout
from settings.memory.generation import cache_bytes, decoding_bytes
from settings.memory.predict import predict_rank
from settings.memory.shape import ModelShape
from settings.memory.use import AdapterSize, ModelUse, RolloutUse, RowSizes

pytestmark = pytest.mark.usefixtures("process_group")

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3, tied": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
        "shared_expert_intermediate_size": 192,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
    },
}
ROWS = Rows(6, 48, 33)
USE = ModelUse(ModelShape.of(MODELS["llama"]), on_gpu=False, arena_bytes=0)
MIXTRAL, QWEN2_MOE, QWEN3_MOE = (
    replace(USE, shape=ModelShape.of(MODELS[name])) for name in ("mixtral", "qwen2_moe", "qwen3_moe")
)
FEW = Rows(1, 4, 3)
"""Rows that have hardly any activations: gathered and cast weights are most of an update."""
CASES = {
    "float32": USE,
    "bfloat16": replace(USE, dtype="bfloat16"),
    "padded": replace(USE, packing=False),
    "recomputed": replace(USE, activation_checkpointing=True),
    "adapters": replace(USE, adapters=AdapterSize(rank=8)),
    "adapters, bfloat16": replace(USE, adapters=AdapterSize(rank=8), dtype="bfloat16"),
    "value head": replace(USE, shape=replace(USE.shape, head="value")),
    "qwen3, tied": replace(USE, shape=ModelShape.of(MODELS["qwen3, tied"])),
    "mixtral, bfloat16": replace(MIXTRAL, dtype="bfloat16"),
    "mixtral, recomputed": replace(MIXTRAL, activation_checkpointing=True),
    "mixtral, value head": replace(MIXTRAL, shape=replace(MIXTRAL.shape, head="value")),
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe, adapters": replace(QWEN2_MOE, adapters=AdapterSize(rank=8)),
    "qwen2_moe, bfloat16, few tokens": replace(QWEN2_MOE, dtype="bfloat16"),
    "qwen3_moe, bfloat16": replace(QWEN3_MOE, dtype="bfloat16"),
    "qwen3_moe, adapters, bfloat16": replace(QWEN3_MOE, adapters=AdapterSize(rank=8), dtype="bfloat16"),
    "qwen3_moe, padded": replace(QWEN3_MOE, packing=False),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(root / name)
    return {name: root / name for name in MODELS}


QUICK = ("bfloat16", "adapters", "mixtral, bfloat16", "qwen2_moe, adapters")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_a_rank_allocates_what_is_predicted(name: str, models: dict[str, Path]) -> None:
    rows = FEW if "few tokens" in name else ROWS
    use = replace(CASES[name], micro_batch_tokens=rows.count * (rows.prompt_tokens + rows.response_tokens))
    found = measure(use, rows, models[name if name in models else use.shape.family], repeats=1)
    every = 2 * MICRO_BATCHES * rows.count
    stages = predict_rank(use, RowSizes(rows.prompt_tokens, rows.response_tokens, every, mini_batches=2), 0)
    idle = stages["idle"].device_bytes
    assert found["resident"] == idle
    snapshot = stages["update"].host["snapshot before the update"]
    assert found["snapshot"] == snapshot
    assert found["gradients"] == snapshot // 3
    ratios = {stage: (stages[stage].device_bytes - idle) / found[stage] for stage in ("forward", "update")}
    print(name, ratios)
    assert ratios == pytest.approx({"forward": 1, "update": 1}, rel=0.1)


@pytest.mark.parametrize(
    ("name", "top_p"),
    [("llama", 1.0), ("llama", 0.9), ("mixtral", 1.0), ("qwen2_moe", 1.0), ("qwen3_moe", 1.0)],
)
def test_generation_allocates_what_is_predicted(name: str, top_p: float, models: dict[str, Path]) -> None:
    rows, prompt_tokens, response_tokens = 16, 24, 40
    rollout = HFRollout(load_causal_lm(models[name]), token_budget=1 << 16)
    sampling = SamplingOptions(max_new_tokens=response_tokens, temperature=1.0, top_p=top_p)
    # Prompts of unequal lengths are padded, so attention needs a mask;
    # the cache of equal ones is copied.
    prompts = [[3 + row] * (prompt_tokens - row % 2) for row in range(rows - 1)]
    prompts.append(prompts[0])

    def generate() -> None:
        rollout._generate(prompts, sampling, np.arange(rows), Meter(lambda: False, lambda *_: None))

    with torch.inference_mode():
        # The first products of a process measure libraries.
        generate()
        with allocations() as found:
            generate()
    use = replace(USE, shape=ModelShape.of(MODELS[name]), rollout=RolloutUse(truncates=top_p < 1))
    sizes = RowSizes(prompt_tokens, response_tokens, rows)
    predicted = cache_bytes(use, sizes) + decoding_bytes(use, sizes)
    print(name, top_p, predicted / found.peak)
    assert predicted == pytest.approx(found.peak, rel=0.15)
