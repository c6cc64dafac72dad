"""A package outside the repository declares plug-ins by entry points, which are found where it is installed."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

GROUPS = {
    "algorithms",
    "policy_losses",
    "rollout_engines",
    "trackers",
    "training_engines",
    "transports",
    "roles",
}


def test_the_example_declares_a_plug_in_of_each_group(plugins: Path) -> None:
    (installed,) = distributions(path=[str(plugins)])
    assert {point.group for point in installed.entry_points} == {f"rlhf_cluster.{group}" for group in GROUPS}
