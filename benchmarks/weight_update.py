"""Share of a step that moving the weights to a rollout service takes, at the size of the quickstart.

Runs of `deploy/quickstart/disaggregated.toml`: PPO with generation in a service of its own, which gets the actor's
weights after every update. The figures are the runs' own metrics: `time/sync_weights_s` beside `time/step_s`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller.api import run
from controller.config.config import load
from controller.tracking.timeline import TIMELINE_FILE, read_events
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

CONFIG = Path(__file__).parent.parent / "deploy" / "quickstart" / "disaggregated.toml"
WARM_UP = 2
"""Number of first steps that are left out."""
MOST = 0.05
"""Aim: largest share of a step that a weight update takes."""


def beside_generation(run_dir: Path) -> float:
    """Returns the share of the time in which weights were loaded, in steps after the warm-up, in which the rollout
    service generated too."""
    spans: dict[str, list[tuple[int, int]]] = {"load_weights": [], "generate_sequences": []}
    for event in read_events(run_dir / TIMELINE_FILE):
        is_call = event["ph"] == "X" and event["cat"] == "controller"
        if is_call and event["name"] in spans and event["args"]["step"] > WARM_UP:
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    loads = spans["load_weights"]
    both = sum(
        max(0, min(end, other_end) - max(begin, other))
        for begin, end in loads
        for other, other_end in spans["generate_sequences"]
    )
    return both / sum(end - begin for begin, end in loads)


def measured(directory: Path, steps: int, ahead: int) -> dict[str, Any]:
    """Runs and returns the seconds of each step after the warm-up, and of its weight update."""
    task = directory / "task"
    services = ("actor", "rollout", "critic", "reference", "reward")
    settings = [
        f"run.directory='{directory / 'runs'}'",
        f"run.name='ahead-{ahead}'",
        f"run.steps={steps}",
        f"run.ahead={ahead}",
        "run.evaluate_every=0",
        f"data.train='{task / 'train.jsonl'}'",
        f"data.heldout='{task / 'heldout.jsonl'}'",
        *(f"services.{name}.address='127.0.0.1:{free_port()}'" for name in services),
        *(f"services.{name}.model='{task / 'model'}'" for name in services if name != "reward"),
    ]
    config = load(CONFIG, tuple(settings))
    done = run(config, "ppo", launch=True)
    lines = done.metrics[1 + WARM_UP :]
    step_s = [line["time/step_s"] for line in lines]
    sync_s = [line["time/sync_weights_s"] for line in lines]
    return {
        "ahead": ahead,
        "bytes": lines[-1]["transfer/weights/bytes"],
        "step_s": step_s,
        "sync_weights_s": sync_s,
        "median_share": statistics.median(sync / step for sync, step in zip(sync_s, step_s, strict=True)),
        "mean_share": sum(sync_s) / sum(step_s),
        "beside_generation": beside_generation(done.directory),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=12, show_default=True, type=click.IntRange(WARM_UP + 2))
@json_option
def main(steps: int, json_path: Path | None) -> None:
    """Time weight updates of a rollout service beside the steps of a run, without and with overlapping steps."""
    before = circumstances()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(directory / "task", Recipe(max_steps=20))
        runs = [measured(directory, steps, ahead) for ahead in (0, 1)]
    table = Table(
        "run.ahead",
        "MB",
        "step s",
        "weight update s",
        "share",
        "mean share",
        "beside generation",
        title="Medians",
    )
    for each in runs:
        step_s, sync_s = statistics.median(each["step_s"]), statistics.median(each["sync_weights_s"])
        table.add_row(
            str(each["ahead"]),
            f"{each['bytes'] / 1e6:.1f}",
            f"{step_s:.3f}",
            f"{sync_s:.3f}",
            f"{each['median_share']:.1%}",
            f"{each['mean_share']:.1%}",
            f"{each['beside_generation']:.0%}",
        )
    console().print(table)
    console().print(f"aim: at most {MOST:.0%} of a step, on {before['cpu']}")
    write_json(json_path, {"before": before, "after": circumstances(), "runs": runs, "aim": MOST})


if __name__ == "__main__":
    main()
