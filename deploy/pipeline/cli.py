"""The pipeline: builds a small model, then runs the three steps, each on services of its own, and sums them up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from deploy import with_parent
from deploy.pipeline.report import check, render, summarize

HERE = Path(__file__).parent
REPOSITORY, FILE = "Anthropic/hh-rlhf", "harmless-base/test.jsonl.gz"


@dataclass(frozen=True)
class Stage:
    """A step of RLHF.

    Attributes:
        algorithm: Name of the algorithm, of its config beside this file, and of the stage's directory.
        trained: Name of the service whose weights later stages start from.
        models: Stage whose model each service starts from, by service; "" is the model with random weights.
        rows: ROWS in the names of its data files, ROWS_train.jsonl and ROWS_heldout.jsonl.
    """

    algorithm: str
    trained: str
    models: dict[str, str]
    rows: str


STAGES = (
    Stage("sft", "actor", {"actor": ""}, "sft"),
    Stage("reward_model", "reward", {"reward": "sft"}, "pairs"),
    Stage(
        "ppo",
        "actor",
        {"actor": "sft", "reference": "sft", "critic": "reward_model", "reward": "reward_model"},
        "prompts",
    ),
)


@dataclass
class Pipeline:
    """One run of all stages.

    Attributes:
        directory: Directory of all outputs.
        settings: Overrides KEY=VALUE of the config of each stage, by stage.
        runs: Run directory of each finished stage, by stage.
    """

    directory: Path
    settings: dict[str, list[str]]
    runs: dict[str, Path] = field(default_factory=dict)

    def prepare(self, data: Path, seed: int) -> None:
        """Builds tokenizer, model and rows from the dialogues in the file `data`, in a process of its own. Raises
        click.exceptions.Exit where the process failed."""
        out = str(self.directory / "data")
        _run("-m", "deploy.pipeline.prepare", "--data", str(data), "--out", out, "--seed", str(seed))

    def run(self, stage: Stage, seed: int) -> None:
        """Runs one stage in a new process, which starts the stage's services first and stops them at the end. Enters
        the stage's run directory into `runs`. Raises click.exceptions.Exit where the process failed."""
        parent = self.directory / stage.algorithm
        settings = [
            f"run.directory={parent}",
            f"run.seed={seed}",
            f"data.train={self.directory}/data/{stage.rows}_train.jsonl",
            f"data.heldout={self.directory}/data/{stage.rows}_heldout.jsonl",
            *(f"services.{name}.model={self.model(begin)}" for name, begin in stage.models.items()),
            *self.settings.get(stage.algorithm, []),
        ]
        config = HERE / f"{stage.algorithm}.toml"
        given = [part for setting in settings for part in ("--set", setting)]
        _run("-m", "controller.cli", "--algo", stage.algorithm, "--config", str(config), "--launch", *given)
        (self.runs[stage.algorithm],) = parent.iterdir()

    def model(self, stage: str) -> Path:
        """Returns the model directory that a finished stage exported; for "", that of the model with random
        weights."""
        if not stage:
            return self.directory / "data" / "model"
        trained = next(each.trained for each in STAGES if each.algorithm == stage)
        return self.runs[stage] / trained


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL file with pairs in the form of HH-RLHF, gzipped or not. "
    f"Default: {FILE} of {REPOSITORY}, which is downloaded.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIRECTORY",
    help="Directory in which the pipeline makes its own.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the initial weights and of every stage.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="STAGE.KEY=VALUE",
    help="Override a value of the config of a stage, for example sft.run.steps=10; repeatable.",
)
def main(data: Path | None, out: Path, seed: int, settings: tuple[str, ...]) -> None:
    """Supervised fine-tuning, a reward model and PPO from the raw dialogues of HH-RLHF, with a small model."""
    data = data or _download()
    if not data.is_file():
        raise click.ClickException(f"--data {data}: no such file")
    started = time.monotonic()
    directory = out / time.strftime("pipeline-%Y%m%d-%H%M%S")
    directory.mkdir(parents=True)
    pipeline = Pipeline(directory, _by_stage(settings))
    click.echo(f"pipeline: {directory}")
    pipeline.prepare(data, seed)
    for number, stage in enumerate(STAGES, 1):
        click.echo(
            f"stage {number} of {len(STAGES)}: {stage.algorithm} ({time.monotonic() - started:.0f} s so far)"
        )
        pipeline.run(stage, seed)
    summary = summarize(pipeline.runs, time.monotonic() - started)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (directory / "report.html").write_text(render(directory, pipeline.runs, summary), encoding="utf-8")
    for name, (held, text) in check(summary).items():
        click.echo(f"{'met' if held else 'MISSED':<7} {name}: {text}")
    click.echo(f"report: {directory / 'report.html'}")
    if not all(held for held, _ in check(summary).values()):
        sys.exit(1)


def _download() -> Path:
    """Returns the path of the dialogues of HH-RLHF, from the Hugging Face hub or its cache.

    Raises:
        click.ClickException: They are in neither.
    """
    from huggingface_hub import hf_hub_download  # slow to import, and not needed with --data

    try:
        return Path(hf_hub_download(REPOSITORY, FILE, repo_type="dataset"))
    except Exception as error:  # the hub's errors have no common base
        cause = str(error).partition("\n")[0]
        raise click.ClickException(
            f"{FILE} of the data set {REPOSITORY} cannot be downloaded ({cause}): give a file with --data, or "
            "make pipeline DATA=FILE"
        ) from error


def _by_stage(settings: tuple[str, ...]) -> dict[str, list[str]]:
    """Sorts settings STAGE.KEY=VALUE: returns KEY=VALUE of each by stage, with an empty list for others.

    Raises:
        click.ClickException: A setting has another form, or begins with no stage's name.
    """
    found: dict[str, list[str]] = {stage.algorithm: [] for stage in STAGES}
    for setting in settings:
        name, _, rest = setting.partition(".")
        if name not in found or "=" not in rest:
            raise click.ClickException(
                f"--set {setting}: expected STAGE.KEY=VALUE; stages: {', '.join(found)}"
            )
        found[name].append(rest)
    return found


def _run(*arguments: str) -> None:
    """Runs Python with these arguments as a process that writes to this terminal, and waits for its end; it ends with
    this one, even where that is killed. Raises click.exceptions.Exit, with its exit code, where it failed."""
    ended: Any = subprocess.run(with_parent.wrap([sys.executable, *arguments]), check=False)
    if ended.returncode:
        raise click.exceptions.Exit(ended.returncode if ended.returncode > 0 else 128 - ended.returncode)
