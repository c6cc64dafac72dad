"""Services that cannot run on this host are refused before any of them is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from controller.config import load
from deploy import preflight
from rlhf.errors import ConfigError

QUICKSTART = Path(__file__).parent.parent.parent / "deploy" / "quickstart" / "quickstart.toml"


@pytest.mark.parametrize(
    ("package", "setting", "expected"),
    [
        ("torch", "run.seed=1", "torch is not installed"),
        (
            "deepspeed",
            "services.critic.engine=zero",
            r"services\.critic\.engine: zero needs DeepSpeed; .*pip",
        ),
        (
            "vllm",
            "services.actor.rollout_engine=vllm",
            r"services\.actor\.rollout_engine: vllm is not installed; docs/rollout",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_key_that_asks_for_it(
    package: str, setting: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str) -> object:
        return None if name == package else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match=expected):
        preflight.check(load(QUICKSTART, (setting,)), ["actor", "critic"])


def test_a_service_that_asks_for_no_package_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, table in load(QUICKSTART).services.items():
        preflight.check_engines(name, table)
