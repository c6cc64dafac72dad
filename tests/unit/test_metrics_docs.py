"""docs/metrics.md has every metric that the code names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {"NAME": "[^ ]+", "SERVICE": "[^/ ]+", "METHOD": "[a-z_]+"}
NO_METRICS = (
    "service/name",
    "services/reward/sandbox",
    "km/h",
    "mile/hour",
    "data/",
    "time/transfer/",
    "transfer/x_bytes",
)
"""Texts of the code that look like the name of a metric."""
PER_SERVICE = ("sandbox/", "gave_up/")
"""Metrics of calls, which get the name of the service in front."""


def documented() -> re.Pattern[str]:
    """Matches the names that the tables of the page have in their first column."""
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    named = [
        name
        for line in lines
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    ]
    patterns = [re.sub("NAME|SERVICE|METHOD", lambda found: PLACES[found[0]], name) for name in named]
    return re.compile("|".join(f"(?:{each})" for each in patterns if each != "[^/ ]+/[^ ]+"))


def named_in_code() -> Iterator[str]:
    """Texts of the form PART/PART that the controller and the services compute with, with x for what is put in."""
    rooms = ("controller/advantage", "controller/algorithms", "controller/training", "controller/tracking")
    for room in (*rooms, "controller/role_groups", "services/actor", "services/critic", "services/reward"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
                    )


METRICS = sorted(
    {
        f"actor/{name}" if name.startswith(PER_SERVICE) else "rank/actor/x" if name == "rank/x" else name
        for name in named_in_code()
        if re.fullmatch("(score|reward|kl|advantage|returns|value|cost|cost_value|group|groups|overlong|baseline|dpo|"
        "rollout|staleness|response|data|evaluation|time|transfer|mem|rank|sandbox|gave_up)/[a-z_./]+", name)
        and name not in NO_METRICS
    }
)  # fmt: skip


def test_the_code_names_metrics() -> None:
    assert {"reward/mean", "time/step_s", "transfer/x/bytes", "dpo/margin", "rank/actor/x"} <= {*METRICS}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_the_code_names_is_in_the_page(name: str) -> None:
    assert documented().fullmatch(name), f"docs/metrics.md lacks {name}"


def test_the_page_matches_no_other_name() -> None:
    assert not any(
        documented().fullmatch(name) for name in ("reward/men", "time/steps", "actor/los", "transfer/x")
    )
