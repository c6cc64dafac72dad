"""The rollout engines of this project pass the contract that plug-ins pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from services.testing.rollouts import RolloutContract

pytestmark = pytest.mark.timeout(300)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)


class TestHF(RolloutContract):
    keys = {"rollout_engine": "hf", "rollout_tokens": 1000}


class TestGreedy(RolloutContract):
    """The contract of an engine that says what it cannot do."""

    keys = {"rollout_engine": "contract.greedy_rollout:greedy"}
    samples = False


@needs_vllm
@pytest.mark.slow
class TestVLLM(RolloutContract):
    keys = {"rollout_engine": "vllm", "vllm": {"kv_cache_gb": 0.25}}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def ended(cls, process_group: None) -> Iterator[None]:
        from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

        yield
        cleanup_dist_env_and_memory()


def test_ranks_that_generate_together_refuse_a_prompt_too_long_for_the_cache_alike() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=128, **sizes))
    rollout = HFRollout(model, token_budget=10)
    rollout.ranks_together = 2
    with pytest.raises(
        ValueError, match=r"row 1 has 7 prompt tokens, with 4 new ones more than the 10 tokens"
    ):
        rollout.generate([[1], [1] * 7], SamplingOptions(max_new_tokens=4), np.zeros(2, np.int64))


@needs_vllm
@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_vllm_refuses_temperatures_that_it_would_change(temperature: float) -> None:
    from services.rollout.vllm_requests import check_temperature

    with pytest.raises(ValueError, match=r"temperatures from 0\.01 to 2\.0"):
        check_temperature(SamplingOptions(max_new_tokens=1, temperature=temperature))
