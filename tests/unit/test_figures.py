"""Figures of pages are those of the results' files: the table by maker of the CPU in benchmarks/README.md, with its
commits, and figures of other pages that name a file."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "GRPO over TRL": "end_to_end",
    "PPO over TRL": "end_to_end",
    "share of the matmul rate": "end_to_end",
    "no-op of 8 ranks": "dispatch",
    "no-op to 1,024": "scale",
    "iteration of the quickstart": "overhead",
    "hf and vllm over plain": "generate",
    "`rlhf-loadtest`": "loadtest",
    "programs a second": "sandbox",
    "weights over memcpy": "weights",
    "weight update of a step": "weight_update",
    "bytes of a transition": "transition",
    "simulated over measured": "simulation",
    "predicted stages": "probe",
    "the plan found": "plan",
    "a step that begins a checkpoint": "checkpoint",
    "wait for a slow reward": "overlap",
    "tensor to another process": "transfer",
    "stream over a raw socket": "transfer",
    "batch dealt": "transfer",
}
"""Name of the results' file of each row of the table, by the row's beginning; false alarms are of several commits."""
TABLE = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "benchmarks" / "README.md")
    .read_text()
    .partition("## Results by maker")[2]
    .splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]
ROWS = [row for row in TABLE if not row[0].startswith("false alarms")]


def results(maker: str, name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / maker / f"{name}.json").read_text())


def over_memcpy(maker: str, dtype: str, *, checksums: bool) -> list[float]:
    """The rate of each transfer in buckets of 16 MiB over that of the memcpy in the same turn."""
    (each,) = (
        each
        for each in results(maker, "weights")["weights"]
        if (each["dtype"], each["checksums"], each["bucket_bytes"]) == (dtype, checksums, 16 << 20)
    )
    return [copy / moved for copy, moved in zip(each["memcpy_s"], each["transfer_s"], strict=True)]


def test_every_row_of_the_table_has_a_file() -> None:
    assert all(any(row[0].startswith(start) for start in FILES) for row in ROWS)
    assert all(any(row[0].startswith(start) for row in ROWS) for start in FILES)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
@pytest.mark.parametrize(("maker", "column"), [("amd", 2), ("intel", 4)])
def test_the_commit_behind_a_figure_is_that_of_its_file(row: list[str], maker: str, column: int) -> None:
    if row[column - 1] == "-":
        return
    (name,) = (name for start, name in FILES.items() if row[0].startswith(start))
    commit, _, dirty = results(maker, name)["before"]["commit"].partition("-")
    after_is_dirty = results(maker, name)["after"]["commit"].endswith("-dirty")
    assert row[column] == commit[:7] + (", changed" if dirty or after_is_dirty else "")


@pytest.mark.parametrize(("maker", "column"), [("amd", 1), ("intel", 3)])
def test_calls_take_as_long_as_pages_say(maker: str, column: int) -> None:
    raw, ray = (
        results(maker, "dispatch")["role_group_over"]["8"][each][0] for each in ("raw gRPC", "Ray actors")
    )
    (row,) = (row for row in ROWS if row[0].startswith("no-op of 8 ranks"))
    assert row[column].startswith(f"{raw:.2f}, {ray:.2f}")
    said = (ROOT / "docs" / "design.md").read_text()
    (sentence,) = re.findall(r"whole call to eight ranks takes (.*?)\. The typed", said, re.S)
    assert f"{raw:.2f}" in sentence
    assert f"results/{maker}/dispatch.json" in sentence


@pytest.mark.parametrize(("maker", "column"), [("amd", 1), ("intel", 3)])
def test_weights_move_as_fast_as_pages_say(maker: str, column: int) -> None:
    page = (ROOT / "docs" / "weights.md").read_text()
    (row,) = (row for row in ROWS if row[0].startswith("weights over memcpy"))
    for dtype in ("float32", "bfloat16"):
        for checksums in (False, True):
            ratios = over_memcpy(maker, dtype, checksums=checksums)
            median = f"{statistics.median(ratios):.2f}"
            shown = rf"{re.escape(median)}(\*\*)? \[{min(ratios):.2f}-{max(ratios):.2f}\]"
            assert re.search(shown, page), (dtype, checksums)
            assert (dtype, checksums) != ("float32", False) or row[column] == median
