"""Soak: a long run of tiny PPO iterations with checkpoints, in which no process may grow.

Memory (unique set size), threads and descriptors of the controller and of each rank are read during the run, halfway
between two checkpoints. Growth is the difference of the medians of two windows, the first after iterations in which
caches fill and the second at the end, over the iterations between them. Metrics and timeline grow by lines of each
iteration by design, so the disk of checkpoints is shown apart from the rest.

The run has few prompts, so that each is drawn before the first window: `tokenizers` keeps the tokens of up to 10,000
words in each process that tokenizes, and the whole prompt is one word of the quickstart's tokenizer. All prompts have
the same length and responses at most RESPONSE_TOKENS tokens, so that the largest batch comes before the first window:
the memory for a larger one stays with the process. (With lengths of all kinds a batch of 153 tokens in iteration 769,
where none had more than 151 before, took 2 MiB of the critic and of the reference.)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
import tomli_w
from rich.table import Table

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

CHECKPOINT_EVERY = 10
SETTLED_AFTER = 200
"""Iterations in which caches fill, such as that of responses for retries; at most a fifth of all."""
TRAINING_ROWS = 512
"""Prompts of the run, all of which are drawn in 32 iterations."""
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 2
WINDOW = 0.1
"""Part of the iterations in each window."""
MOST_GROWTH = 1024
"""Bytes of memory an iteration."""
STEP_TIMEOUT_S = 120.0
"""Longest time without a new iteration, start of the services included."""
GRACE_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class Sample:
    """Usage at one moment.

    Attributes:
        iteration: Number of the last iteration with metrics.
        memory, threads, descriptors: By name of the process; memory in bytes.
        checkpoint_bytes, checkpoint_files: Of the checkpoints on the disk.
        other_bytes: Bytes of the other files of the run directory.
    """

    iteration: int
    memory: Mapping[str, int]
    threads: Mapping[str, int]
    descriptors: Mapping[str, int]
    checkpoint_bytes: int
    checkpoint_files: int
    other_bytes: int


def tables(directory: Path, iterations: int) -> dict[str, Any]:
    """Returns the config: the quickstart's model, few rows, and a checkpoint every CHECKPOINT_EVERY iterations."""
    learner = {"model": str(directory / "task" / "model"), "optimizer": {"learning_rate": 1e-5}}
    services: dict[str, dict[str, Any]] = {
        "actor": {"ranks": 2, **learner},
        "critic": learner,
        "reference": {"model": learner["model"]},
        "reward": {"function": "exact_match"},
    }
    return {
        "run": {
            "name": "soak",
            "directory": str(directory / "runs"),
            "steps": iterations,
            "evaluate_every": 0,
        },
        "checkpoint": {"every": CHECKPOINT_EVERY, "keep": 2},
        "data": {
            "train": str(directory / "task" / "train.jsonl"),
            "heldout": str(directory / "task" / "heldout.jsonl"),
            "prompts_per_step": 16,
        },
        "rollout": {"max_response_tokens": RESPONSE_TOKENS},
        "algorithm": {"mini_batch_size": 16},
        "services": {
            role: {"role": role, "address": f"127.0.0.1:{free_port()}", **table}
            for role, table in services.items()
        },
    }


@contextlib.contextmanager
def running(config: Path, log: Path) -> Iterator[psutil.Process]:
    """Starts a controller that launches the services; ends it and them with the block.

    Args:
        config: Config file of the run.
        log: File for what the controller says.
    """
    command = [
        str(Path(sys.executable).with_name("rlhf-controller")),
        "--algo",
        "ppo",
        "--config",
        str(config),
    ]
    with log.open("wb") as file:
        started = subprocess.Popen([*command, "--launch"], stdout=file, stderr=file, start_new_session=True)
    try:
        yield psutil.Process(started.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def processes(controller: psutil.Process) -> dict[str, psutil.Process]:
    """Returns the controller and the ranks by name, such as "actor/0"."""
    found = {"controller": controller}
    for child in controller.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words, environment = child.cmdline(), child.environ()
            if "services" in words and "--name" in words and "RANK" in environment:
                found[f"{words[words.index('--name') + 1]}/{environment['RANK']}"] = child
    return dict(sorted(found.items()))


def last_iteration(run_dir: Path) -> int:
    """Returns the number of the last iteration with metrics; -1 before the first."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
        lines = file.read().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith(b"\n") and line.startswith(b"{")]
    return int(json.loads(complete[-1])["step"]) if complete else -1


def sample(iteration: int, watched: Mapping[str, psutil.Process], run_dir: Path) -> Sample:
    """Reads the usage of all processes and of the disk."""
    sizes: dict[Path, int] = {}
    for path in run_dir.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that is being removed or renamed
            if not path.is_dir():
                sizes[path] = path.stat().st_size
    kept = {path: size for path, size in sizes.items() if "checkpoints" in path.relative_to(run_dir).parts}
    return Sample(
        iteration,
        {name: process.memory_full_info().uss for name, process in watched.items()},
        {name: process.num_threads() for name, process in watched.items()},
        {name: process.num_fds() for name, process in watched.items()},
        sum(kept.values()),
        len(kept),
        sum(sizes.values()) - sum(kept.values()),
    )


def iterations_of(controller: psutil.Process, directory: Path, iterations: int) -> Iterator[tuple[int, Path]]:
    """Yields the number of each new iteration that is seen, and the run directory, until the last one.

    Raises:
        click.ClickException: The run has ended early, or there was no new iteration for STEP_TIMEOUT_S.
    """
    seen, seen_at = -1, time.monotonic()
    while seen < iterations - 1:
        time.sleep(POLL_S)
        has_ended = controller.status() == psutil.STATUS_ZOMBIE
        for run_dir in (directory / "runs").glob("soak-*"):
            if (last := last_iteration(run_dir)) > seen:
                seen, seen_at = last, time.monotonic()
                yield seen, run_dir
        if seen < iterations - 1 and (has_ended or time.monotonic() - seen_at > STEP_TIMEOUT_S):
            raise click.ClickException(
                f"no iteration after {seen}: {(directory / 'controller.log').read_text()[-2000:]}"
            )


def soak(directory: Path, iterations: int) -> list[Sample]:
    """Makes the run; returns the samples, one for each checkpoint. Raises click.ClickException as `iterations_of`."""
    build(directory / "task", Recipe(max_steps=20))
    train = directory / "task" / "train.jsonl"
    rows = (
        line
        for line in train.read_text().splitlines(keepends=True)
        if len(json.loads(line)["prompt"]) == PROMPT_TOKENS
    )
    train.write_text("".join(islice(rows, TRAINING_ROWS)))
    config = directory / "soak.toml"
    config.write_text(tomli_w.dumps(tables(directory, iterations)))
    samples: list[Sample] = []
    watched: dict[str, psutil.Process] = {}
    next_sample = CHECKPOINT_EVERY // 2
    with running(config, directory / "controller.log") as controller:
        for iteration, run_dir in iterations_of(controller, directory, iterations):
            if iteration >= next_sample:
                watched = watched or processes(controller)
                with contextlib.suppress(psutil.NoSuchProcess):  # at the end of the run
                    samples.append(sample(iteration, watched, run_dir))
                next_sample = iteration - iteration % CHECKPOINT_EVERY + CHECKPOINT_EVERY * 3 // 2
    return samples


def growth(samples: Sequence[Sample], iterations: int) -> dict[str, Any]:
    """Returns for each process the medians of memory [bytes], threads and descriptors in the first and the last window,
    and the growth of its memory [bytes per iteration]; for the disk the same of its bytes."""
    size = max(int(WINDOW * iterations), 1)
    begin = min(SETTLED_AFTER, iterations // 5)
    first = [each for each in samples if begin <= each.iteration < begin + size]
    last = [each for each in samples if each.iteration >= iterations - size]
    if not first or not last:
        raise click.ClickException(f"{len(samples)} samples are too few; make more iterations")
    between = median(each.iteration for each in last) - median(each.iteration for each in first)
    found: dict[str, Any] = {}
    for name in first[0].memory:
        memory = [median(each.memory[name] for each in window) for window in (first, last)]
        found[name] = {
            "memory": memory,
            "bytes_per_iteration": round((memory[1] - memory[0]) / between, 1),
            "threads": [max(each.threads[name] for each in window) for window in (first, last)],
            "descriptors": [max(each.descriptors[name] for each in window) for window in (first, last)],
        }
    disk = {
        key: [median(getattr(each, key) for each in window) for window in (first, last)]
        for key in ("checkpoint_bytes", "checkpoint_files", "other_bytes")
    }
    return {"processes": found, "disk": disk, "iterations_between": between}


def show(found: Mapping[str, Any]) -> None:
    """Prints the table."""
    table = Table(
        "process", "memory, first window", "last window", "growth an iteration", "threads", "descriptors"
    )
    for name, of in found["processes"].items():
        before, after = (f"{value / 2**20:.1f} MiB" for value in of["memory"])
        pairs = [f"{a} -> {b}" for a, b in (of["threads"], of["descriptors"])]
        table.add_row(name, before, after, f"{of['bytes_per_iteration']:.0f} B", *pairs)
    console().print(table)
    disk = found["disk"]
    begin, end = disk["checkpoint_bytes"]
    a_step = (disk["other_bytes"][1] - disk["other_bytes"][0]) / found["iterations_between"]
    click.echo(f"checkpoints on the disk: {begin:.0f} -> {end:.0f} bytes; other files grow by {a_step:.0f} bytes an "
               "iteration")  # fmt: skip
    worst = max(of["bytes_per_iteration"] for of in found["processes"].values())
    click.echo(f"largest growth: {worst:.0f} bytes an iteration; aim: below {MOST_GROWTH}")


@click.command(help=__doc__)
@click.option("--iterations", default=2000, show_default=True, type=click.IntRange(min=100))
@json_option
def main(iterations: int, json_path: Path | None) -> None:
    before = circumstances()
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        samples = soak(Path(name), iterations)
        seconds = time.monotonic() - started
    found = growth(samples, iterations)
    show(found)
    figures = {
        "before": before,
        "after": circumstances(),
        "iterations": iterations,
        "seconds": round(seconds, 1),
    }
    write_json(json_path, {**figures, **found, "samples": [asdict(each) for each in samples]})


if __name__ == "__main__":
    main()
