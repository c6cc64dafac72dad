"""Engine fsdp in bfloat16 on two ranks of a CPU: what tests/gpu/test_two_gpus.py runs on two GPUs."""

from __future__ import annotations

import pytest

from integration.divided_rows import *  # noqa: F403 - the tests
from integration.divided_rows import Reports, save_models
from integration.ranks import launch

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    models = save_models(tmp_path_factory.mktemp("models"))
    return launch("integration.divided_rows_main", 2, models, False, deadline_s=150)
