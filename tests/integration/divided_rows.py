"""Tests of `divided_rows_main`, for a module with a fixture `reports`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contract.mixtures import NUM_EXPERTS, make
from contract.mixtures import SIZES as MIXTURE
from services.testing.engines import (
    GRADIENT_TOLERANCE,
    LARGEST_LOG_PROB_ERROR,
    LOSS_TOLERANCE,
    MEAN_LOG_PROB_ERROR,
    TINY,
)

Reports = list[dict[str, dict]]
"""Of each rank, by model and kind of rows."""


def save_models(directory: Path) -> dict[str, tuple[str, int]]:
    """Saves a random Llama and a random mixture; returns the directory and the number of token ids of each."""
    torch.manual_seed(7)
    llama = LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=128, eos_token_id=None))
    mixture = make(MIXTURE | {"num_experts_per_tok": NUM_EXPERTS})
    found = {}
    for name, model in (("llama", llama), ("mixture", mixture)):
        model.save_pretrained(directory / name)
        found[name] = str(directory / name), model.config.vocab_size
    return found


def beyond(reports: Reports, key: str, limit: float) -> dict[str, float]:
    return {
        f"rank {rank}, {case}": report[key]
        for rank, cases in enumerate(reports)
        for case, report in cases.items()
        if not report[key] < limit
    }


def test_log_probs_are_near_those_in_float32(reports: Reports) -> None:
    errors = [report["log_probs"] for cases in reports for report in cases.values() if "log_probs" in report]
    assert len(errors) == 2 * len(reports)
    assert max(largest for largest, _ in errors) < LARGEST_LOG_PROB_ERROR
    assert max(mean for _, mean in errors) < MEAN_LOG_PROB_ERROR


def test_loss_and_every_gradient_are_near_those_in_float32(reports: Reports) -> None:
    assert beyond(reports, "loss", LOSS_TOLERANCE) == {}
    assert beyond(reports, "gradients", GRADIENT_TOLERANCE) == {}


def test_a_step_from_the_same_state_gives_the_same_bits(reports: Reports) -> None:
    assert all(report["repeats"] for cases in reports for report in cases.values())
