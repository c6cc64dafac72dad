"""The suite of the engines on a real GPU, with a model of 100 million parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.test_engines import (  # noqa: F401 - run here
    process_group,
    task,
    test_a_rollout_engine_generates_the_same_after_its_sleep,
    test_a_step_from_the_same_state_gives_the_same_bits,
    test_an_offloaded_engine_leaves_the_device_and_comes_back_bit_for_bit,
    test_log_probs_are_near_those_in_float32,
    test_loss_and_every_gradient_are_near_those_in_float32,
    test_rollouts_have_the_log_probs_that_training_finds,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def sizes() -> dict[str, Any]:
    return {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "initializer_range": 0.035,
    }
