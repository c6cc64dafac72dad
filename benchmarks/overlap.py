"""Time of a step with a slow reward: one step after another, with overlapping steps (`run.ahead`), and with rows in
chunks (`rollout.chunks`).

GRPO on the quickstart's task with a reward that sleeps at each row, in all about as long as the update of the policy
takes. Four runs: a reward that answers at once, and the slow reward with neither, with `ahead = 1`, and with chunks.
The share of the wait that is hidden is (slow - it) / (slow - fast), by the medians of the steps. On a machine whose
speed changes from run to run, look at the share of the reward's time in which the actor computes, from the timeline of
each run alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller.api import run
from controller.tracking.timeline import TIMELINE_FILE, read_events
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

WAIT = "RLHF_BENCHMARK_ROW_WAIT_S"
"""Name of the environment variable with the time that the reward of a row takes, in seconds."""
WARM_UP = 3
"""Number of first steps that are left out."""


def slow(prompt: str, response: str, ground_truth: str, metadata: Any) -> float:
    """A reward that takes as long as the environment says."""
    time.sleep(float(os.environ.get(WAIT, "0")))
    return float(response.strip() == ground_truth)


@dataclass(frozen=True)
class Timing:
    """What overlaps in a run: `run.ahead` and `rollout.chunks`."""

    ahead: int = 0
    chunks: int = 1


def tables(task: Path, directory: Path, steps: int, rows: int, tokens: int, timing: Timing) -> dict[str, Any]:
    """Configuration of a run of GRPO."""
    learner = {
        "model": str(task / "model"),
        "optimizer": {"learning_rate": 1e-5},
        "output_roots": [str(directory)],
    }
    services: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", **learner},
        "reward": {"role": "reward", "kind": "function", "function": "benchmarks.overlap:slow"},
    }
    return {
        "run": {
            "name": f"ahead-{timing.ahead}-chunks-{timing.chunks}",
            "directory": str(directory),
            "steps": steps,
            "evaluate_every": 0,
            "ahead": timing.ahead,
        },
        "data": {
            "train": str(task / "train.jsonl"),
            "heldout": str(task / "heldout.jsonl"),
            "prompts_per_step": rows // 4,
        },
        "rollout": {"max_response_tokens": tokens, "samples_per_prompt": 4, "chunks": timing.chunks},
        "algorithm": {"mini_batch_size": rows // 4, "kl_loss_coefficient": 0.0},
        "services": {
            name: {**table, "address": f"127.0.0.1:{free_port()}"} for name, table in services.items()
        },
    }


def beside(run_dir: Path) -> float:
    """Returns the share of the reward's time, in steps after the warm-up, in which the actor executed calls."""
    spans: dict[str, list[tuple[int, int]]] = {"actor": [], "reward": []}
    events = read_events(run_dir / TIMELINE_FILE)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"].split(" (")[0]
        for event in events
        if event["name"] == "thread_name"
    }
    for event in events:
        if event["ph"] == "X" and event["cat"] == "controller" and event["args"]["step"] > WARM_UP:
            spans[threads[event["pid"], event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    # Calls of one service never overlap, so that their parts add up.
    both = sum(
        max(0, min(end, actor_end) - max(begin, actor_begin))
        for begin, end in spans["reward"]
        for actor_begin, actor_end in spans["actor"]
    )
    return both / sum(end - begin for begin, end in spans["reward"])


def measured(
    task: Path, directory: Path, steps: int, rows: int, tokens: int, timing: Timing, wait_s: float
) -> dict[str, Any]:
    """Runs and returns the median times of a step and of its calls, in seconds."""
    os.environ[WAIT] = str(wait_s / rows)
    # The held-out rows are scored by the same function, and are not timed.
    done = run(tables(task, directory, steps, rows, tokens, timing), "grpo", launch=True)
    lines = done.metrics[1 + WARM_UP :]
    times = {"step_s": "step", "update_s": "update_actor", "reward_s": "compute_reward"}
    times |= {"generate_s": "generate_sequences", "log_prob_s": "compute_log_prob"}
    return {
        **asdict(timing),
        "wait_s": wait_s,
        **{key: statistics.median(line[f"time/{name}_s"] for line in lines) for key, name in times.items()},
        "beside_actor": beside(done.directory),
        "staleness": lines[-1].get("staleness/mean", 0.0),
        "reward_mean": lines[-1]["reward/mean"],
        "response_tokens": lines[-1]["response/length_mean"],
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=18, show_default=True, type=click.IntRange(WARM_UP + 2))
@click.option("--rows", default=512, show_default=True, type=click.IntRange(16))
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Longest response.")
@click.option("--chunks", default=8, show_default=True, type=click.IntRange(2))
@json_option
def main(steps: int, rows: int, tokens: int, chunks: int, json_path: Path | None) -> None:
    """Time the steps of runs with a slow reward: one after another, overlapping, and with rows in chunks."""
    before = circumstances()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(directory / "task", Recipe(max_steps=20))

        def timed(timing: Timing, wait_s: float) -> dict[str, Any]:
            return measured(directory / "task", directory / "runs", steps, rows, tokens, timing, wait_s)

        fast = timed(Timing(), 0.0)
        wait_s = fast["update_s"]
        slow, overlapping, in_chunks = (
            timed(each, wait_s) for each in (Timing(), Timing(ahead=1), Timing(chunks=chunks))
        )
    hidden = {
        name: (slow["step_s"] - each["step_s"]) / (slow["step_s"] - fast["step_s"])
        for name, each in (("ahead", overlapping), ("chunks", in_chunks))
    }
    runs = [fast, slow, overlapping, in_chunks]
    columns = ("generate_s", "log_prob_s", "reward_s", "update_s", "step_s")
    table = Table("run.ahead", "rollout.chunks", *columns, "reward beside actor", title="Median of a step")
    for each in runs:
        figures = (f"{each[key]:.3f}" for key in columns)
        table.add_row(str(each["ahead"]), str(each["chunks"]), *figures, f"{each['beside_actor']:.0%}")
    console().print(table)
    console().print(
        f"hidden of the wait: {hidden['ahead']:.0%} with ahead (at least 80 %), {hidden['chunks']:.0%} with chunks "
        "(at least 50 %)"
    )
    write_json(json_path, {"before": before, "after": circumstances(), "runs": runs, "hidden": hidden})


if __name__ == "__main__":
    main()
