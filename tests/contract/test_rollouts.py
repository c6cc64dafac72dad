"""The rollout engines of this project pass the contract that plug-ins pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from services.rollout.base import SamplingOptions
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


@needs_vllm
@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_vllm_refuses_temperatures_that_it_would_change(temperature: float) -> None:
    from services.rollout.vllm_requests import check_temperature

    with pytest.raises(ValueError, match=r"temperatures from 0\.01 to 2\.0"):
        check_temperature(SamplingOptions(max_new_tokens=1, temperature=temperature))
