"""The rollout engines of this project pass the contract that plug-ins pass."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.rollout.base import RolloutEngine, SamplingOptions
from services.rollout.hf import HFRollout
from services.testing.rollouts import POSITIONS, RolloutContract

pytestmark = pytest.mark.timeout(300)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)

KV_CACHE_GB = 0.25


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestHF(RolloutContract):
    keys = {"rollout_engine": "hf", "rollout_tokens": 1000}

    def test_weights_that_are_loaded_again_take_no_memory_in_between(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        assert engine.sleep(keep_weights=False) == sum(x.nbytes for x in model.parameters())
        assert {each.tensor.untyped_storage().nbytes() for each in engine.held()} == {0}
        engine.wake()


class TestGreedy(RolloutContract):
    """The contract of an engine that says what it cannot do."""

    keys = {"rollout_engine": "contract.greedy_rollout:greedy"}
    samples = False


@needs_vllm
@pytest.mark.slow
class TestVLLM(RolloutContract):
    # A forward pass has room for fewer tokens than the prompts of some calls have together.
    keys = {
        "rollout_engine": "vllm",
        "vllm": {
            "kv_cache_gb": KV_CACHE_GB,
            "max_num_seqs": POSITIONS,
            "engine_args": {"max_num_batched_tokens": POSITIONS},
        },
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def ended(cls, process_group: None) -> Iterator[None]:
        from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

        yield
        cleanup_dist_env_and_memory()

    @pytest.mark.parametrize("keep_weights", [True, False])
    def test_its_kv_cache_takes_no_memory_while_it_sleeps(
        self, keep_weights: bool, engine: RolloutEngine
    ) -> None:
        """Of this process, as the kernel counts it: on a CPU, where vLLM itself does not sleep."""
        size = int(KV_CACHE_GB * (1 << 30))
        engine.sleep()
        engine.wake()  # and so all pages are there
        awake = resident_bytes()
        freed = engine.sleep(keep_weights=keep_weights)
        asleep = resident_bytes()
        engine.wake()
        assert 0.9 * size < freed <= size
        assert awake - asleep > 0.9 * size
        assert resident_bytes() - asleep > 0.9 * size


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
