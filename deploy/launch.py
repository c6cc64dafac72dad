"""How a service is started: its command line and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.processes import MARK
from rlhf.config import ServiceTable

SHUTDOWN_TIMEOUT_S = 10
"""Time torchrun gives its workers between SIGTERM and SIGKILL; shorter than `Launcher.grace_s`, so that
torchrun ends its workers itself."""


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
    scratch: Path
    """Directory for the launcher's own files; removed when the service has ended."""


def torchrun(job: Job) -> list[str]:
    """The command line that starts the service under torchrun.

    The rendezvous store binds a port of the kernel's choice and the workers reuse it, so there is no moment in
    which a port chosen before can be taken by someone else.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={job.table.ranks}", f"--rdzv-id={job.name}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("--max-restarts=0", f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}", f"--log-dir={job.scratch}"),
        *("-m", f"services.{job.role}", "--config", str(job.config), "--name", job.name),
        *(part for setting in job.settings for part in ("--set", setting)),
    ]


def environment(table: ServiceTable, deployment: str) -> dict[str, str]:
    """The environment of a service: this process's with the deployment's mark and the table's threads.

    Where the user has set a variable that is only a default here, the user's value stays.
    """
    defaults = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if table.address.startswith(("127.", "localhost:", "[::1]:")):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    threads = str(table.threads)
    return {
        **defaults,
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        MARK: deployment,
    }


@dataclass(frozen=True)
class Launcher:
    """How services are started and stopped."""

    command: Callable[[Job], list[str]] = torchrun
    """The command line of a service."""
    grace_s: float = 15.0
    """Time a service has between SIGTERM and SIGKILL."""
