"""Command line and environment that the ranks of a service are started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.processes import MARK
from settings.hub import hub_model
from settings.security import SECURITY_FILE, TOKEN_FILE
from settings.service import ServiceTable

DEFAULTS = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
"""Variables of ranks, where this process does not have them."""


@dataclass(frozen=True)
class Job:
    """A service that is to be started."""

    name: str
    """Name of the service in the config."""
    role: str
    """Role of the service, as the key `role` of its table names it."""
    table: ServiceTable
    """Table of the service."""
    config: Path
    """Path of the config file."""
    settings: tuple[str, ...]
    """Overrides "key.path=value" of the file's values."""


def rank_command(job: Job) -> list[str]:
    """Returns the command line of a rank. It is the same for all ranks: a rank reads its number from its
    environment."""
    return [
        *(sys.executable, "-m", "services", job.role, "--config", str(job.config), "--name", job.name),
        *(part for setting in job.settings for part in ("--set", setting)),
    ]


def environment(table: ServiceTable, deployment: str) -> dict[str, str]:
    """Returns the environment that all ranks of a service share: that of this process without its own credentials, with
    `deployment`, the id of the deployment, in the variable `MARK`, and the number of threads of the table. Only
    TOKENIZERS_PARALLELISM and HF_HUB_OFFLINE keep a value that this process has; the second is 1 by default for ranks
    that have nothing to download.
    """
    threads, model = str(table.threads), getattr(table, "model", None)
    downloads = isinstance(model, Path) and hub_model(model) is not None
    inherited = {name: value for name, value in os.environ.items() if name not in (TOKEN_FILE, SECURITY_FILE)}
    return {
        **{name: value for name, value in DEFAULTS.items() if name != "HF_HUB_OFFLINE" or not downloads},
        **inherited,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: deployment,
    }


@dataclass(frozen=True)
class LaunchOptions:
    """Options by which a `Supervisor` starts and stops ranks."""

    command: Callable[[Job], list[str]] = rank_command
    """Function that returns the command line of a rank."""
    grace_s: float = 15.0
    """Time, in seconds, between SIGTERM and SIGKILL when services are stopped."""
