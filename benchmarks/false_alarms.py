"""False alarms, slow processes that are taken for lost: runs of the quickstart, one after the other, while every core
is oversubscribed twice.

Two processes a core do nothing but count. Beside them the quickstart's services stay up and runs of a few steps are
made on them until the time is over. An alarm is a run that failed, a connection that the controller made anew, or a
line of a rank about a failure: a machine with enough cores has none. All runs have the same seed, so their weights
have to be the same too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import tomli_w

from benchmarks.ports import free_port
from benchmarks.report import circumstances, json_option, write_json
from client import rank as client
from client import stream
from client.outage import Outage
from client.rank import RankClient
from controller import job
from controller.config.config import Config
from controller.launch import LaunchedServices
from deploy.quickstart import Recipe
from deploy.quickstart.build import build
from rlhf.errors import RlhfError

BUSY_PER_CORE = 2
STEPS = 3
ALARM = re.compile(
    r"fatal|failed|Traceback|DeadlineExceeded|ServiceLost|PeerFailed|Refused|CallCancelled|ended"
)
"""Words in a rank's log about a failed call or an abandoned session."""


def spin() -> None:
    """Keeps a core busy for as long as its parent lives."""
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


@contextlib.contextmanager
def oversubscribed() -> Iterator[int]:
    """Keeps every core busy with counting processes; yields their number."""
    busy = [
        multiprocessing.Process(target=spin, daemon=True)
        for _ in range(BUSY_PER_CORE * (os.cpu_count() or 1))
    ]
    for process in busy:
        process.start()
    try:
        yield len(busy)
    finally:
        for process in busy:
            process.kill()


class Alarms:
    """Records connections that the controller takes for lost."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        told = self.told

        class CountedOutage(Outage):
            def __init__(self, first: Any, now: float) -> None:
                told.append(f"connection lost: {first.details() if first is not None else 'ended'}")
                super().__init__(first, now)

        async def counted_stream(self: RankClient, *arguments: Any) -> Any:
            try:
                async for response in plain_stream(self, *arguments):
                    yield response
            except RlhfError as error:
                told.append(f"status stream lost: {error}")
                raise

        plain_stream = RankClient.stream
        for module in (stream, client):
            module.Outage = CountedOutage  # type: ignore[misc]
        RankClient.stream = counted_stream  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in (stream, client):
                module.Outage = Outage  # type: ignore[misc]
            RankClient.stream = plain_stream  # type: ignore[method-assign]


def tables(directory: Path) -> dict[str, Any]:
    """The quickstart with fewer steps, on ports of its own."""
    learner = {"model": str(directory / "task" / "model"), "optimizer": {"learning_rate": 5e-4}}
    services: dict[str, dict[str, Any]] = {
        "actor": {"ranks": 2, **learner},
        "critic": learner,
        "reference": {"model": learner["model"]},
        "reward": {"function": "exact_match"},
    }
    return {
        "run": {"name": "alarms", "directory": str(directory / "runs"), "steps": STEPS, "evaluate_every": 0},
        "data": {
            "train": str(directory / "task" / "train.jsonl"),
            "heldout": str(directory / "task" / "heldout.jsonl"),
            "prompts_per_step": 512,
        },
        "rollout": {"max_response_tokens": 4},
        "algorithm": {"mini_batch_size": 128},
        "services": {
            role: {"role": role, "address": f"127.0.0.1:{free_port()}", **table}
            for role, table in services.items()
        },
    }


def log_lines(logs: Path) -> list[str]:
    """Lines about failures in the logs of ranks."""
    return [
        f"{path.name}: {line}"
        for path in sorted(logs.glob("*.log"))
        for line in path.read_text().splitlines()
        if ALARM.search(line)
    ]


@click.command(help=__doc__)
@click.option("--minutes", default=10.0, show_default=True, help="Time in which runs begin.")
@json_option
def main(minutes: float, json_path: Path | None) -> None:
    before, alarms, weights, seconds = circumstances(), Alarms(), set[str](), list[float]()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory, path = Path(name), Path(name, "config.toml")
        build(directory / "task", Recipe(max_steps=20))
        given = tables(directory)
        path.write_text(tomli_w.dumps(given))
        config = Config.model_validate(given)
        with LaunchedServices(config, path, directory / "logs"), oversubscribed() as busy, alarms.counted():
            began = time.monotonic()
            while time.monotonic() - began < 60 * minutes:
                started = time.monotonic()
                try:
                    weights.add(job.run(config, "ppo").summary["actor_sha256"])
                except RlhfError as error:
                    failed.append(str(error))
                seconds.append(round(time.monotonic() - started, 1))
            lasted = time.monotonic() - began
        said = log_lines(directory / "logs")
    figures = {
        "before": before,
        "after": circumstances(),
        "minutes": round(lasted / 60, 2),
        "busy_processes": busy,
        "runs": len(seconds),
        "steps": STEPS * len(seconds),
        "run_s": seconds,
        "failed_runs": failed,
        "lost_connections": alarms.told,
        "lines_of_ranks": said,
        "distinct_weights": len(weights),
        "alarms": len(failed) + len(alarms.told) + len(said),
    }
    click.echo(
        f"{figures['alarms']} alarms in {figures['minutes']} minutes: {len(seconds)} runs, "
        f"{len(weights)} different weights"
    )
    write_json(json_path, figures)


if __name__ == "__main__":
    main()
