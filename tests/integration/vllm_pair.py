"""Tests of `vllm_pair_main`, for a module with the fixtures `reports` and `largest_error`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Reports = list[dict[str, Any]]
"""Of each rank."""

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}


def save_model(directory: Path) -> tuple[str, int]:
    """Saves a random Llama; returns its directory and its number of token ids."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=128, eos_token_id=None))
    model.save_pretrained(directory)
    return str(directory), SIZES["vocab_size"]


def test_training_finds_the_log_probs_of_its_rollouts_after_each_update(
    reports: Reports, largest_error: float
) -> None:
    assert max(largest for report in reports for largest, _ in report["errors"]) < largest_error


def test_ranks_that_generate_together_have_the_same_tokens(reports: Reports) -> None:
    for key in ("responses", "stopped"):
        assert reports[0][key] == reports[1][key]


def test_it_generates_the_same_after_a_sleep(reports: Reports) -> None:
    assert all(report["is same after sleep"] for report in reports)
