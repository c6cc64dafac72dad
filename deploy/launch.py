"""How the ranks of a service are started: their command line and their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.processes import MARK
from settings.service import ServiceTable


@dataclass(frozen=True)
class Job:
    """One service to be started."""

    name: str
    """Its name in the config."""
    role: str
    """Its role, which is the module below `services` that serves it."""
    table: ServiceTable
    """Its table."""
    config: Path
    """The config file."""
    settings: tuple[str, ...]
    """`key.path=value` settings put into the config."""


def rank_command(job: Job) -> list[str]:
    """The command line of one rank; its environment says which."""
    return [
        *(sys.executable, "-m", f"services.{job.role}", "--config", str(job.config), "--name", job.name),
        *(part for setting in job.settings for part in ("--set", setting)),
    ]


def environment(table: ServiceTable, deployment: str) -> dict[str, str]:
    """The environment that a service's ranks share: this process's with the deployment's mark and the table's threads.
    The user's value of a variable overrides a default.
    """
    threads = str(table.threads)
    return {
        **{"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: deployment,
    }


@dataclass(frozen=True)
class Launcher:
    """How services are started and stopped."""

    command: Callable[[Job], list[str]] = rank_command
    """The command line of a rank."""
    grace_s: float = 15.0
    """Time a rank has between SIGTERM and SIGKILL."""
