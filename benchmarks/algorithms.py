"""Every algorithm on the quickstart's task, from the same start: gain in accuracy and wall time.

    python -m benchmarks.algorithms --docs docs/algorithms.md --json algorithms.json

Each run launches the services that its algorithm needs, at free ports, and stops them. The algorithms of the paper's
figures run with three seeds, the others with one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.ports import free_port
from benchmarks.report import circumstances, json_option, write_json
from controller import algorithms, job
from controller.config.config import Config, load
from controller.quickstart import build_quickstart
from controller.training.algorithm import Algorithm

ROOT = Path(__file__).parent.parent
QUICKSTARTS = ROOT / "deploy" / "quickstart"
PAPER = ("ppo", "remax", "safe_rlhf", "grpo")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        before, after: Accuracy on the held-out sums.
        seconds: Wall time, start and stop of the services included.
        cost_limit, cost_before, cost_after: Mean held-out cost and its limit; None without a cost.
        lambdas: The multiplier after each step; empty without one.
    """

    algorithm: str
    seed: int
    steps: int
    before: float
    after: float
    seconds: float
    cost_limit: float | None
    cost_before: float | None
    cost_after: float | None
    lambdas: tuple[float, ...]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--algo", "names", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option("--seeds", type=click.IntRange(min=1), help="Seeds of each algorithm, from 0 on.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of a run. Default: those of its config.")
@click.option(
    "--docs", type=click.Path(path_type=Path, exists=True), help="Also write the tables into this page."
)
@json_option
def main(
    names: tuple[str, ...], seeds: int | None, steps: int | None, docs: Path | None, json_path: Path | None
) -> None:
    """Train the quickstart's model with every algorithm and print tables of the results."""
    before, outcomes = circumstances(), []
    for name in names or of_prompts():
        for seed in range(seeds or (3 if name in PAPER else 1)):
            outcomes.append(train(name, seed, steps))
            click.echo(_line(outcomes[-1]))
    text = tables(outcomes)
    click.echo(f"\n{text}")
    if docs is not None:
        docs.write_text(between_markers(docs.read_text(), text))
    circumstance = {"before": before, "after": circumstances()}
    write_json(json_path, {**circumstance, "runs": [asdict(outcome) for outcome in outcomes]})


def of_prompts() -> list[str]:
    """The algorithms that train on prompts alone, as the quickstart's data are."""
    return [name for name in algorithms.names() if not algorithms.find_algorithm(name).columns]


def train(name: str, seed: int, steps: int | None) -> Outcome:
    """One run of an algorithm on its quickstart."""
    algorithm = algorithms.find_algorithm(name)
    with tempfile.TemporaryDirectory() as directory:
        config = quickstart(algorithm, Path(directory), seed, steps)
        started = time.monotonic()
        done = job.run(config, algorithm, launch=True)
        seconds = time.monotonic() - started
        lines, summary = done.metrics, done.summary
    costs = [line["evaluation/cost"] for line in lines if "evaluation/cost" in line]
    return Outcome(
        name,
        seed,
        summary["steps"],
        summary["accuracy_before"],
        summary["accuracy_after"],
        seconds,
        config.algorithm.options.get("cost_limit"),
        costs[0] if costs else None,
        costs[-1] if costs else None,
        tuple(line["lambda"] for line in lines if "lambda" in line),
    )


def quickstart(algorithm: Algorithm, directory: Path, seed: int, steps: int | None) -> Config:
    """The algorithm's bundled configuration at free ports, its model and data built where they are missing."""
    config = load(QUICKSTARTS / f"{algorithm.quickstart}.toml")
    build_quickstart(config)
    services = {
        name: table.model_copy(update={"address": f"127.0.0.1:{free_port()}"})
        for name, table in config.services.items()
    }
    run: dict[str, Any] = {
        "directory": directory,
        "seed": seed,
        "steps": steps or config.run.steps,
        "samples": 0,
    }
    return config.model_copy(update={"services": services, "run": config.run.model_copy(update=run)})


def tables(outcomes: Sequence[Outcome]) -> str:
    """Tables of the runs' results, as Markdown: means, and in brackets the smallest and the largest."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.algorithm, []).append(outcome)
    rows = [_accuracy_row(name, runs) for name, runs in by_name.items()]
    head = ("algorithm", "seeds", "steps", "held-out before", "after", "gain", "wall time")
    parts = [_table(head, rows)]
    constrained = {name: runs for name, runs in by_name.items() if runs[0].lambdas}
    if constrained:
        head = ("algorithm", "cost limit", "held-out cost before", "after", "lambda first", "highest", "last")
        parts.append(_table(head, [_cost_row(name, runs) for name, runs in constrained.items()]))
    return "\n\n".join(parts)


def between_markers(page: str, text: str) -> str:
    """The page after replacing the text between its markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise click.ClickException(f"the page has no lines {BEGIN} and {END}")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.algorithm}, seed {outcome.seed}: {outcome.before:.1%} to {outcome.after:.1%} "
        f"in {outcome.seconds:.0f} s"
    )


def _accuracy_row(name: str, runs: Sequence[Outcome]) -> list[str]:
    return [
        f"`{name}`",
        str(len(runs)),
        str(runs[0].steps),
        _spread([100 * run.before for run in runs], "{:.1f} %"),
        _spread([100 * run.after for run in runs], "{:.1f} %"),
        _spread([100 * (run.after - run.before) for run in runs], "{:+.1f} points"),
        _spread([run.seconds for run in runs], "{:.0f} s"),
    ]


def _cost_row(name: str, runs: Sequence[Outcome]) -> list[str]:
    return [
        f"`{name}`",
        f"{runs[0].cost_limit:g}",
        _spread([run.cost_before for run in runs if run.cost_before is not None], "{:.3f}"),
        _spread([run.cost_after for run in runs if run.cost_after is not None], "{:.3f}"),
        _spread([run.lambdas[0] for run in runs], "{:.2f}"),
        _spread([max(run.lambdas) for run in runs], "{:.2f}"),
        _spread([run.lambdas[-1] for run in runs], "{:.2f}"),
    ]


def _spread(values: Sequence[float], shape: str) -> str:
    mean = shape.format(statistics.fmean(values))
    if len(set(values)) == 1:
        return mean
    return f"{mean} ({shape.format(min(values))} to {shape.format(max(values))})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
