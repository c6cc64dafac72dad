"""Engine fsdp over NCCL: ranks on two GPUs that shard the tokens of each row, or have rows of their own."""

from __future__ import annotations

import pytest

from integration.divided_rows import *  # noqa: F403 - the tests
from integration.divided_rows import Reports, save_models
from integration.ranks import launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reports(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    models = save_models(tmp_path_factory.mktemp("models"))
    return launch(
        "integration.divided_rows_main",
        2,
        models,
        True,
        deadline_s=250,
        environment={},
        backend="cpu:gloo,cuda:nccl",
    )
