"""Time of a step with a slow reward: one step after another, with overlapping steps (`run.ahead`), and with rows in
chunks (`rollout.chunks`).

GRPO on the quickstart's task with a reward that sleeps at each row, in all about as long as the update of the policy
takes, and one mini-batch. The KV cache holds the rows of one chunk, so that generation takes as many decoding steps in
chunks as without. With chunks, gradients of all but the last are computed before the update, while rows are scored.
Four runs on the same services: a reward that answers at once, and the slow reward with neither, with `ahead = 1`, and
with chunks; again in each round. The share of the wait that is hidden is (slow - it) / (slow - fast), by the lower
quartiles of all steps, since other work on the machine only makes steps longer. Beside it, from the timelines, stands
the share of the reward's time in which the actor computes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller.api import run
from controller.config.config import Config
from controller.launch import LaunchedServices
from controller.tracking.timeline import TIMELINE_FILE, read_events
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

WARM_UP = 2
"""Number of first steps that are left out."""
PROMPT_TOKENS = 8
"""Longest prompt of the task, in tokens, or more."""
TRAIN = "rows.jsonl"
TIMES = {
    "step_s": "step",
    "early_s": "prepare_update",
    "update_s": "update_actor",
    "reward_s": "compute_reward",
    "generate_s": "generate_sequences",
    "log_prob_s": "compute_log_prob",
}
"""Metrics that are measured, by the name of the figure; 0 in runs without such calls."""


def slow(prompt: str, response: str, ground_truth: str, metadata: Any) -> float:
    """A reward that takes as long as the row says."""
    time.sleep(float(metadata.get("wait_s", 0)))
    return float(response.strip() == ground_truth)


@dataclass(frozen=True)
class Timing:
    """Settings by which the steps of a run overlap: `run.ahead` and `rollout.chunks`."""

    ahead: int = 0
    chunks: int = 1


@dataclass(frozen=True)
class Place:
    """Where the runs are: task and run directory, and addresses of the services; and their sizes."""

    task: Path
    directory: Path
    addresses: Mapping[str, str]
    steps: int
    rows: int
    tokens: int
    rollout_tokens: int

    def write_rows(self, wait_s: float) -> None:
        """Makes the reward of a batch take `wait_s` seconds longer."""
        rows = map(json.loads, (self.task / "train.jsonl").read_text().splitlines())
        waiting = ({**row, "wait_s": wait_s / self.rows} for row in rows)
        (self.directory / TRAIN).write_text("".join(json.dumps(row) + "\n" for row in waiting))

    def tables(self, timing: Timing) -> dict[str, Any]:
        """Configuration of a run of GRPO."""
        learner = {
            "model": str(self.task / "model"),
            "optimizer": {"learning_rate": 1e-5},
            "output_roots": [str(self.directory)],
        }
        services: dict[str, dict[str, Any]] = {
            "actor": {"role": "actor", "rollout_tokens": self.rollout_tokens, **learner},
            "reward": {"role": "reward", "kind": "function", "function": "benchmarks.overlap:slow"},
        }
        return {
            "run": {
                "name": f"ahead-{timing.ahead}-chunks-{timing.chunks}",
                "directory": str(self.directory),
                "steps": self.steps,
                "evaluate_every": 0,
                "ahead": timing.ahead,
            },
            "data": {
                "train": str(self.directory / TRAIN),
                "heldout": str(self.task / "heldout.jsonl"),
                "prompts_per_step": self.rows // 4,
            },
            "rollout": {
                "max_response_tokens": self.tokens,
                "samples_per_prompt": 4,
                "chunks": timing.chunks,
            },
            "algorithm": {"mini_batch_size": self.rows, "kl_loss_coefficient": 0.0},
            "services": {
                name: {**table, "address": self.addresses[name]} for name, table in services.items()
            },
        }


@dataclass(frozen=True)
class Span:
    """A call in the timeline of a run; times in seconds since its start."""

    step: int
    service: str
    method: str
    start_s: float
    end_s: float


def timeline(run_dir: Path) -> list[Span]:
    """Returns the calls of the steps after the warm-up, by their begin."""
    events = read_events(run_dir / TIMELINE_FILE)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"].split(" (")[0]
        for event in events
        if event["name"] == "thread_name"
    }
    spans = [
        Span(
            event["args"]["step"],
            threads[event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in events
        if event["ph"] == "X" and event["cat"] == "controller" and event["args"]["step"] > WARM_UP
    ]
    return sorted(spans, key=lambda span: span.start_s)


def beside(spans: list[Span]) -> float:
    """Returns the share of the reward's time in which the actor executed calls."""
    rewards, actors = ([span for span in spans if span.service == name] for name in ("reward", "actor"))
    both = sum(
        max(0.0, min(one.end_s, end) - max(one.start_s, start))
        for one in rewards
        for start, end in united(actors)
    )
    return both / sum(span.end_s - span.start_s for span in rewards)


def united(spans: list[Span]) -> list[tuple[float, float]]:
    """Returns the times in which one of the calls was under way; a call ends when its response has come, which is after
    the start of the next."""
    times: list[tuple[float, float]] = []
    for span in spans:
        if times and span.start_s <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], span.end_s)
        else:
            times.append((span.start_s, span.end_s))
    return times


def measured(place: Place, timing: Timing, wait_s: float) -> tuple[list[dict[str, float]], list[Span]]:
    """Runs and returns the times of each step after the warm-up and of its calls, in seconds, and the calls."""
    place.write_rows(wait_s)
    done = run(place.tables(timing), "grpo")
    spans = timeline(done.directory)
    share = beside(spans)
    steps = [
        {
            **{key: line.get(f"time/{name}_s", 0.0) for key, name in TIMES.items()},
            "beside_actor": share,
            "staleness": line.get("staleness/mean", 0.0),
            "reward_mean": line["reward/mean"],
            "response_tokens": line["response/length_mean"],
        }
        for line in done.metrics[1 + WARM_UP :]
    ]
    return steps, spans


def summary(timing: Timing, wait_s: float, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the lower quartile of each figure over steps, and the times of all steps."""
    quartiles = {key: statistics.quantiles([step[key] for step in steps])[0] for key in steps[0]}
    return {
        **asdict(timing),
        "wait_s": wait_s,
        **quartiles,
        "all_steps_s": [step["step_s"] for step in steps],
    }


def hidden(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the share of the wait that overlapping steps and that chunks hide."""
    fast, waiting, *others = (each["step_s"] for each in runs)
    shares = ((waiting - other) / (waiting - fast) for other in others)
    return dict(zip(("ahead", "chunks"), shares, strict=True))


def show(runs: list[dict[str, Any]]) -> None:
    """Prints the figures."""
    columns = ("generate_s", "log_prob_s", "reward_s", "early_s", "update_s", "step_s")
    table = Table(
        "run.ahead", "rollout.chunks", *columns, "reward beside actor", title="Lower quartile of steps"
    )
    for each in runs:
        figures = (f"{each[key]:.3f}" for key in columns)
        table.add_row(str(each["ahead"]), str(each["chunks"]), *figures, f"{each['beside_actor']:.0%}")
    console().print(table)
    found = hidden(runs)
    console().print(
        f"hidden of the wait: {found['ahead']:.0%} with ahead (at least 80 %), {found['chunks']:.0%} with chunks (at "
        "least 50 %)"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=8, show_default=True, type=click.IntRange(WARM_UP + 2))
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1))
@click.option("--rows", default=2048, show_default=True, type=click.IntRange(16))
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Longest response.")
@click.option("--chunks", default=4, show_default=True, type=click.IntRange(2))
@json_option
def main(steps: int, rounds: int, rows: int, tokens: int, chunks: int, json_path: Path | None) -> None:
    """Time the steps of runs with a slow reward: one after another, overlapping, and with rows in chunks."""
    before = circumstances()
    slow_timings = (Timing(), Timing(ahead=1), Timing(chunks=chunks))
    steps_of: list[list[dict[str, float]]] = [[], [], [], []]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(directory / "task", Recipe(max_steps=20))
        addresses = {each: f"127.0.0.1:{free_port()}" for each in ("actor", "reward")}
        cached = rows // chunks * (PROMPT_TOKENS + tokens)
        place = Place(directory / "task", directory, addresses, steps, rows, tokens, cached)
        tables = place.tables(Timing())
        place.write_rows(0.0)
        (path := directory / "services.toml").write_text(tomli_w.dumps(tables))
        with LaunchedServices(Config.model_validate(tables), path, directory / "logs"):
            wait_s = statistics.median(step["update_s"] for step in measured(place, Timing(), 0.0)[0])
            for _ in range(rounds):
                cases = [(Timing(), 0.0), *((timing, wait_s) for timing in slow_timings)]
                for found, (timing, wait) in zip(steps_of, cases, strict=True):
                    times, spans = measured(place, timing, wait)
                    found += times
    runs = [summary(timing, wait, found) for (timing, wait), found in zip(cases, steps_of, strict=True)]
    show(runs)
    last = [asdict(span) for span in spans if span.step == steps - 1]
    figures = {"before": before, "after": circumstances(), "rounds": rounds, "runs": runs}
    write_json(json_path, {**figures, "hidden": hidden(runs), "a_step_in_chunks": last})


if __name__ == "__main__":
    main()
