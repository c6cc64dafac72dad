"""Time of a step of PPO under each placement, on one deployment of the services of `disaggregated.toml`.

Only the placement differs between runs: the services, their meshes and the numbers are those of one config, so every
run ends with the same weights, which is checked. Runs take turns. On a host of few cores all services compute on the
same ones, whatever their devices are called: the figures say what the order of calls costs or gains there, not which
placement is faster on devices of their own, which `rlhf-map` predicts.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller import job
from controller.config.config import Config, load
from controller.config.placements import Placement
from deploy import with_parent
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

CONFIG = Path(__file__).parent.parent / "deploy" / "quickstart" / "disaggregated.toml"
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
ANCHOR: Placement = "colocate"
WARM_UP = 1
"""Number of first steps of a run that are left out."""
GRACE_S = 30.0


@contextlib.contextmanager
def deployed(settings: Sequence[str], log: Path) -> Iterator[None]:
    """Context manager in which the services of the config are up."""
    given = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "deploy", "up", str(CONFIG), "--log-dir", str(log.parent), *given]
    with log.open("w") as sink:
        up = subprocess.Popen(with_parent.wrap(command), stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        assert up.stdout is not None
        if up.stdout.readline() != "ready\n":
            raise click.ClickException(f"the services did not start: {log.read_text()}")
        yield
    finally:
        up.terminate()
        up.wait(GRACE_S)


def measured(config: Config) -> dict[str, Any]:
    """Runs PPO on the services that are up. Returns the seconds of each step after the warm-up, medians of the time of
    moving weights and of the share in which calls run on disjoint devices, and the sha256 of the final actor."""
    done = job.run(config, "ppo")
    lines = done.metrics[1 + WARM_UP :]
    return {
        "steps_s": [line["time/step_s"] for line in lines],
        "weights_s": statistics.median(line["time/sync_weights_s"] for line in lines),
        "overlap": statistics.median(line["time/overlap_share"] for line in lines),
        "actor_sha256": done.summary["actor_sha256"],
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=5, show_default=True, type=click.IntRange(WARM_UP + 1))
@click.option("--turns", default=3, show_default=True, type=click.IntRange(1))
@click.option("--rows", default=512, show_default=True, type=click.IntRange(128))
@json_option
def main(steps: int, turns: int, rows: int, json_path: Path | None) -> None:
    """Time the steps of PPO under each placement, in turns."""
    before = circumstances()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in PLACEMENTS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build(directory / "task", Recipe(max_steps=20))
        task = {"train": "data.train", "heldout": "data.heldout"}
        services = load(CONFIG).services
        settings = [
            *(f"{key}='{directory / 'task' / part}.jsonl'" for part, key in task.items()),
            f"data.prompts_per_step={rows}",
            f"run={{name='placed',directory='{directory / 'runs'}',steps={steps},evaluate_every=0,samples=0}}",
            *(f"services.{each}.address='127.0.0.1:{free_port()}'" for each in services),
            *(
                f"services.{each}.model='{directory / 'task' / 'model'}'"
                for each, table in services.items()
                if table.model_directory
            ),
        ]
        with deployed(settings, directory / "up.log"):
            for _ in range(turns):
                for placement in PLACEMENTS:
                    config = load(CONFIG, (*settings, f"placement={placement}"))
                    runs[placement].append(measured(config))
    hashes = {each["actor_sha256"] for own in runs.values() for each in own}
    if len(hashes) > 1:
        raise click.ClickException(f"runs ended with {len(hashes)} different actors")
    console().print(table_of(runs, steps, rows))
    write_json(json_path, {"before": before, "after": circumstances(), "rows": rows, "runs": runs})


def table_of(runs: dict[str, list[dict[str, Any]]], steps: int, rows: int) -> Table:
    """Medians over turns; in brackets the smallest and the largest."""
    table = Table(title=f"A step of PPO with {rows} rows, medians of {steps - WARM_UP} steps and over turns")
    for name in ("placement", "step s", f"of {ANCHOR}", "calls on disjoint devices overlap", "weights s"):
        table.add_column(name, justify="left" if name == "placement" else "right")
    medians = {name: [statistics.median(each["steps_s"]) for each in own] for name, own in runs.items()}
    for name, own in runs.items():
        ratios = [one / other for one, other in zip(medians[name], medians[ANCHOR], strict=True)]
        table.add_row(
            name,
            f"{statistics.median(medians[name]):.3f}",
            f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]",
            f"{statistics.median(each['overlap'] for each in own):.0%}",
            f"{statistics.median(each['weights_s'] for each in own):.3f}",
        )
    return table


if __name__ == "__main__":
    main()
