"""The arithmetic of the soak: growth of each process an iteration, between the settled part of a run and its end."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from benchmarks.soak import Sample, growth, last_iteration


def a_sample(iteration: int) -> Sample:
    """Of a process that fills its caches, of one that grows by 2,000 bytes an iteration and by a thread, and of
    checkpoints that stay as they are beside files that grow."""
    memory = {
        "controller": 1_000_000 + min(iteration, 150) * 10_000,
        "actor/0": 5_000_000 + 2_000 * iteration,
    }
    threads = {"controller": 9, "actor/0": 20 + (iteration > 1_000)}
    return Sample(iteration, memory, threads, {"controller": 30, "actor/0": 40}, 700, 12, 100 * iteration)


def test_growth_is_counted_after_caches_are_filled() -> None:
    found = growth([a_sample(iteration) for iteration in range(5, 2_000, 10)], 2_000)
    by_name = found["processes"]
    assert by_name["controller"]["bytes_per_iteration"] == 0
    assert by_name["actor/0"]["bytes_per_iteration"] == 2_000
    assert by_name["actor/0"]["threads"] == [20, 21]
    assert by_name["controller"]["descriptors"] == [30, 30]
    assert found["disk"]["checkpoint_bytes"] == [700, 700]
    begin, end = found["disk"]["other_bytes"]
    assert (end - begin) / found["iterations_between"] == 100


def test_a_run_without_samples_at_its_end_is_an_error() -> None:
    with pytest.raises(click.ClickException, match="too few"):
        growth([a_sample(iteration) for iteration in range(5, 1_000, 10)], 2_000)


def test_the_last_iteration_is_that_of_the_last_complete_line(tmp_path: Path) -> None:
    assert last_iteration(tmp_path) == -1
    lines = "".join(json.dumps({"step": step, "x": "y" * 100}) + "\n" for step in range(2_000))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 2000, "x"')
    assert last_iteration(tmp_path) == 1_999
