"""vLLM over NCCL: ranks on two GPUs that share a model to generate, with CUDA graphs and asynchronous scheduling."""

from __future__ import annotations

import pytest

from integration.ranks import launch
from integration.vllm_pair import *  # noqa: F403 - the tests
from integration.vllm_pair import Reports, save_model
from services.testing.engines import LARGEST_LOG_PROB_ERROR

pytest.importorskip("vllm", reason="vLLM is not installed: pip install '.[cu13,vllm]'")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def largest_error() -> float:
    return LARGEST_LOG_PROB_ERROR


@pytest.fixture(scope="module")
def reports(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    model = save_model(tmp_path_factory.mktemp("model"))
    return launch(
        "integration.vllm_pair_main",
        2,
        *model,
        True,
        deadline_s=350,
        environment={},
        backend="cpu:gloo,cuda:nccl",
    )
