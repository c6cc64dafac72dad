"""Nothing drifts between generation and training while nothing is learned, over whole iterations on a mesh."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration.ranks import launch

NUM_RANKS, NUM_ITERATIONS = 4, 10
DEADLINE_S = 240
PARITY = 1e-4
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


# p, t, d, pg, tg.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("hf", (1, 2, 2, 1, 1)), id="hf, tg 1"),
        pytest.param(("vllm", (1, 2, 2, 1, 2)), id="vllm, tg 2", marks=[needs_vllm, pytest.mark.full]),
    ],
)
def reports(request: pytest.FixtureRequest, model: Path) -> list[list[dict[str, Any]]]:
    """Reports of each iteration, by rank."""
    return launch("integration.drift_main", NUM_RANKS, model, *request.param, deadline_s=DEADLINE_S)


def test_without_a_learning_rate_nothing_drifts_over_ten_iterations(reports: list[list[dict[str, Any]]]):
    for iterations in reports:
        assert iterations == [iterations[0]] * NUM_ITERATIONS


def test_the_engines_agree_on_what_was_generated_and_there_is_something_to_learn(
    reports: list[list[dict[str, Any]]],
):
    for iterations in reports:
        assert 0 < iterations[0]["parity"][0] < PARITY
        assert iterations[0]["grad_norm"] > 0.1
