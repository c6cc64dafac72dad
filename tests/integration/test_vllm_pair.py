"""vLLM on two ranks of a CPU: what tests/gpu/test_vllm_on_two_gpus.py runs on two GPUs."""

from __future__ import annotations

import pytest

from integration.ranks import launch
from integration.vllm_pair import *  # noqa: F403 - the tests
from integration.vllm_pair import Reports, save_model

pytest.importorskip("vllm", reason="vLLM is not installed: make setup-vllm")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def largest_error() -> float:
    return 1e-4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    model = save_model(tmp_path_factory.mktemp("model"))
    return launch("integration.vllm_pair_main", 2, *model, False, deadline_s=250, environment={})
