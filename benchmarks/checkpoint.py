"""Cost of a checkpoint: how much longer the step takes that begins one, and the one in which it is written.

One run of real services, at the size of the quickstart or with 100 million parameters, writes a checkpoint every third
step: after it services copy their state, and while the next step runs they write the copy. The third step is the
anchor, so that drift of the machine hits all three alike. The bytes that a checkpoint has are written and hashed once
more by a single process, as what the disk and sha256 take alone.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from controller.algorithms.grpo import grpo
from controller.algorithms.ppo import ppo
from controller.api import run
from controller.training.run import Run
from controller.training.step import Step
from deploy.quickstart import Recipe
from deploy.quickstart.build import build

EVERY = 3
MOST = {"quickstart": 0.03, "100m": 0.10}
ROLES = {"quickstart": ("actor", "critic", "reference", "reward"), "100m": ("actor", "reference", "reward")}
KINDS = ("begins a checkpoint", "while it is written", "neither")
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12}


class Clock:
    """An algorithm whose steps are timed, from the beginning of one to that of the next."""

    def __init__(self) -> None:
        self.began_s: list[float] = []

    def watch(self, run: Run) -> None:
        plain = run.steps

        def steps() -> Iterator[Step]:
            for step in plain():
                self.began_s.append(time.monotonic())
                yield step

        run.steps = steps  # type: ignore[method-assign]

    def by_kind(self) -> dict[str, list[float]]:
        """Seconds of the steps of each of KINDS. The first steps, until a checkpoint was written, are left out, and so
        is the last, which has no successor."""
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number, (began, ended) in enumerate(itertools.pairwise(self.began_s), 1):
            if number > EVERY + 1:
                seconds[KINDS[number % EVERY]].append(ended - began)
        return seconds


def tables(size: str, directory: Path, steps: int) -> dict[str, Any]:
    """The quickstart with checkpoints, or GRPO with a wide model on few rows."""
    task = directory / "task"
    build(task, Recipe(max_steps=20))
    model = task / "model"
    if size == "100m":
        model = directory / "wide"
        config = AutoConfig.from_pretrained(task / "model")
        config.update({**WIDE, "num_key_value_heads": WIDE["num_attention_heads"], "head_dim": 64})
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        AutoTokenizer.from_pretrained(task / "model").save_pretrained(model)
    learner = {"model": str(model), "optimizer": {"learning_rate": 1e-5}, "output_roots": [str(directory)]}
    services: dict[str, dict[str, Any]] = {
        "actor": {"ranks": 2, **learner},
        "critic": learner,
        "reference": {"model": str(model)},
        "reward": {"kind": "function", "function": "exact_match"},
    }
    wide = size == "100m"
    return {
        "run": {"name": size, "directory": str(directory / "runs"), "steps": steps, "evaluate_every": 0},
        "data": {
            "train": str(task / "train.jsonl"),
            "heldout": str(task / "heldout.jsonl"),
            "prompts_per_step": 16 if wide else 512,
        },
        "rollout": {"max_response_tokens": 24 if wide else 4, "samples_per_prompt": 4 if wide else 1},
        "algorithm": {"mini_batch_size": 32 if wide else 128},
        "checkpoint": {"every": EVERY, "keep": 1},
        "services": {
            name: {"role": name, "address": f"127.0.0.1:{free_port()}", **services[name]}
            for name in ROLES[size]
        },
    }


def alone(nbytes: int, directory: Path) -> tuple[float, float]:
    """Seconds that writing and syncing as many bytes takes, and hashing them."""
    block = os.urandom(16 << 20)
    began, digest = time.monotonic(), hashlib.sha256()
    with (directory / "bytes").open("wb") as file:
        for _ in range(0, nbytes, len(block)):
            file.write(block[: nbytes - file.tell()])
        file.flush()
        os.fsync(file.fileno())
    written = time.monotonic()
    for begin in range(0, nbytes, len(block)):
        digest.update(block[: nbytes - begin])
    return written - began, time.monotonic() - written


def measure(size: str, steps: int) -> dict[str, Any]:
    """Runs and times one size."""
    clock = Clock()

    algorithm = grpo if size == "100m" else ppo

    def timed(run: Run, *options: Any) -> None:
        clock.watch(run)
        algorithm.function(run, *options)

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        finished = run(tables(size, directory, steps), replace(algorithm, function=timed), launch=True)
        (newest,) = (finished.directory / "checkpoints").glob("step-*")
        nbytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        write_s, hash_s = alone(nbytes, directory)
    return {"size": size, "nbytes": nbytes, "write_s": write_s, "hash_s": hash_s, "seconds": clock.by_kind()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", multiple=True, type=click.Choice(tuple(MOST)), default=tuple(MOST))
@click.option("--quickstart-steps", default=120, show_default=True, type=click.IntRange(8))
@click.option("--wide-steps", default=17, show_default=True, type=click.IntRange(8), help="With 100m.")
@json_option
def main(sizes: tuple[str, ...], quickstart_steps: int, wide_steps: int, json_path: Path | None) -> None:
    """Time the steps of a run that writes checkpoints."""
    before = circumstances()
    taken = [measure(size, wide_steps if size == "100m" else quickstart_steps) for size in sizes]
    table = Table("size", "step", "median s", "over neither", title="Steps of a run with checkpoints")
    for figures in taken:
        medians = {kind: statistics.median(seconds) for kind, seconds in figures["seconds"].items()}
        for kind, median in medians.items():
            more = median / medians[KINDS[2]] - 1
            aim = (
                f"{more:+.1%} (at most {MOST[figures['size']]:+.0%})" if kind == KINDS[0] else f"{more:+.1%}"
            )
            table.add_row(figures["size"], kind, f"{median:.3f}", "" if kind == KINDS[2] else aim)
        mib = figures["nbytes"] / (1 << 20)
        table.add_row(
            "",
            f"{mib:.0f} MiB alone: written, hashed",
            f"{figures['write_s']:.3f}, {figures['hash_s']:.3f}",
            "",
        )
    console().print(table)
    write_json(json_path, {"before": before, "after": circumstances(), "sizes": taken})


if __name__ == "__main__":
    main()
