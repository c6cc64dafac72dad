"""The quickstart as a benchmark runs it: on free ports, with its files in a directory of the benchmark's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.ports import free_port
from controller.config.config import Config, load

CONFIG = Path(__file__).parent.parent / "deploy" / "quickstart" / "quickstart.toml"


def settings(directory: Path, steps: int) -> tuple[str, ...]:
    """Settings of the config with free ports, runs below `directory` and no evaluations between steps; builds the model
    and the data where they are missing."""
    plain = load(CONFIG)
    build = [sys.executable, "-m", "deploy.quickstart.build", "--out", str(plain.data.train.parent)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return (
        f"run.directory='{directory}'",
        f"run.steps={steps}",
        "run.evaluate_every=0",
        "run.samples=0",
        *(f"services.{name}.address='127.0.0.1:{free_port()}'" for name in plain.services),
    )


def config(directory: Path, steps: int, *more: str) -> Config:
    """The quickstart's config with these settings and more of them."""
    return load(CONFIG, (*settings(directory, steps), *more))
