"""Programs per second that the code grader grades, beside starts of a bare sandbox.

A graded program takes two sandboxes, the candidate's and the test runner's. The anchor is one `bwrap` with all
namespaces that runs `python -c pass`, so half of it is the most that this design can reach. Both take short turns, so
that drift of the machine hits both alike.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from benchmarks.report import circumstances, console, json_option, write_json
from services.reward.sandbox.grader import Grader
from services.reward.sandbox.program import Submission, read_row
from settings.reward import SandboxTable

GRADED, BARE = "graded program", "bare bwrap + python"
LEAST_PER_S = 25.0
CALLS = 8
"""Calls that the tests of a program make, about as many as HumanEval's."""
BARE_COMMAND = [
    "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp",
    os.path.realpath(sys._base_executable), "-sSB", "-c", "pass",  # type: ignore[attr-defined]
]  # fmt: skip


@dataclass(frozen=True)
class GradingRate:
    """Rate of one system.

    Attributes:
        per_s: Median over the turns.
        turns_per_s: Rate of each turn, in the order they were taken.
    """

    system: str
    per_s: float
    turns_per_s: list[float]


def make_program(number: int) -> Submission:
    """A new program, so that no cache has it, with assert-style tests that it passes."""
    code = f"from typing import List\n\ndef shifted(xs: List[int], by):\n    return [x + by for x in xs]  # {number}"
    checks = "".join(f"    assert candidate([1, 2], {by}) == [{1 + by}, {2 + by}]\n" for by in range(CALLS))
    test = {"kind": "asserts", "code": f"def check(candidate):\n{checks}", "entry_point": "shifted"}
    return read_row("", code, "", {"tests": [test]}, "all")


def grade(grader: Grader, programs: list[Submission]) -> float:
    """Programs per second; all must pass."""
    started = time.perf_counter()
    verdicts = [future.result() for future in [grader.submit(program) for program in programs]]
    seconds = time.perf_counter() - started
    wrong = [verdict for verdict in verdicts if verdict.fault or verdict.score("all") != 1.0]
    if wrong:
        raise click.ClickException(f"{len(wrong)} right programs did not pass, for example {wrong[0]}")
    return len(programs) / seconds


def start_bare(pool: ThreadPoolExecutor, count: int) -> float:
    """Bare sandboxes per second."""
    started = time.perf_counter()
    ended = list(pool.map(lambda _: subprocess.run(BARE_COMMAND, env={}, check=True), range(count)))
    return len(ended) / (time.perf_counter() - started)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--programs", default=50, show_default=True, type=click.IntRange(1), help="Per turn.")
@click.option("--turns", default=6, show_default=True, type=click.IntRange(1))
@click.option(
    "--workers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="At the same time; 0: a core each.",
)
@json_option
def main(programs: int, turns: int, workers: int, json_path: Path | None) -> None:
    """Grade programs in the sandbox, and start bare sandboxes."""
    workers = workers or os.cpu_count() or 1
    grader = Grader(SandboxTable(workers=workers))
    before, rates = circumstances(), {GRADED: [], BARE: []}
    with ThreadPoolExecutor(workers) as pool:
        for turn in range(turns):
            made = [make_program(turn * programs + number) for number in range(programs)]
            rates[GRADED].append(grade(grader, made))
            rates[BARE].append(start_bare(pool, programs))
    grader.close()
    figures = [
        GradingRate(
            system, round(statistics.median(turns_per_s), 1), [round(rate, 1) for rate in turns_per_s]
        )
        for system, turns_per_s in rates.items()
    ]
    show(figures, workers)
    written = [asdict(figure) for figure in figures]
    write_json(
        json_path, {"before": before, "after": circumstances(), "workers": workers, "figures": written}
    )


def show(figures: list[GradingRate], workers: int) -> None:
    """Prints the table, and whether the aim is met."""
    table = Table(title=f"Programs per second, {workers} at the same time")
    for name in ("system", "per second", "least", "most"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for figure in figures:
        row = (figure.per_s, min(figure.turns_per_s), max(figure.turns_per_s))
        table.add_row(figure.system, *(f"{rate:.1f}" for rate in row))
    screen = console()
    screen.print(table)
    graded, bare = figures
    verdict = "met" if graded.per_s >= LEAST_PER_S else "missed"
    screen.print(f"{graded.per_s:.1f} graded per second, aim at least {LEAST_PER_S:g}: {verdict}")
    screen.print(f"of what two bare sandboxes take: {2 * graded.per_s / bare.per_s:.2f}")


if __name__ == "__main__":
    main()
