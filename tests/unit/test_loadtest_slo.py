"""Objectives: what they say, and who meets them."""

from typing import Any

import pytest

from loadtest.slo import judge, parse
from rlhf.errors import ConfigError

STEP: dict[str, Any] = {
    "throughput_per_s": 98.0, "errors": {"UNAVAILABLE": 2}, "ended": 1000, "latency_s": {"mean": 0.010, "max": 0.120},
}  # fmt: skip


def percentile_s(percent: float) -> float:
    return percent / 1000


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("p99=99ms", True),
        ("p99=98ms", False),
        ("p99.9=0.1s", True),
        ("p50=50000us", True),
        ("mean=10ms", True),
        ("mean=9.9ms", False),
        ("max=119ms", False),
        ("errors=2", True),
        ("errors=0", False),
        ("errors=0.2%", True),
        ("errors=0.1%", False),
        ("throughput=98", True),
        ("throughput=98.5", False),
    ],
)
def test_an_objective_is_a_bound(text: str, met: bool) -> None:
    (verdict,) = judge(parse(text), STEP, percentile_s)
    assert verdict.met is met


def test_a_list_keeps_its_order() -> None:
    assert [objective.text for objective in parse("p99=50ms, errors=0")] == ["p99=50ms", "errors=0"]
    assert parse("") == []


def test_where_no_call_was_answered_no_latency_is_met() -> None:
    (verdict,) = judge(parse("p99=50s"), {**STEP, "latency_s": {}}, percentile_s)
    assert verdict.measured is None
    assert not verdict.met


@pytest.mark.parametrize("text", ["errors=0", "errors=1%", "throughput=0", "p99=50s"])
def test_where_no_call_ended_nothing_is_met(text: str) -> None:
    step = {"throughput_per_s": 0.0, "errors": {}, "ended": 0, "latency_s": {}}
    (verdict,) = judge(parse(text), step, percentile_s)
    assert verdict.measured is None
    assert not verdict.met


@pytest.mark.parametrize(
    "text", ["p99", "p99=50", "p101=5ms", "errors=-1", "q=1", "mean=5%", "throughput=5ms", "p99>1s"]
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="known: pNN"):
        parse(text)
