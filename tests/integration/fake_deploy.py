"""rlhf-deploy with fake services, whose flags are in the variable FAKE_FLAGS: {"service": ["--flag"]}.

The flag --slow-exit of "supervisor" makes its process end a second after its work; with --patient it waits longer for
services that ignore SIGTERM; with --note-waits it makes a file `waits` once it looks who has an address that is in
use."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from deploy.cli import main
from deploy.launch import Job, LaunchOptions

FLAGS_VARIABLE = "FAKE_FLAGS"
GRACE_S = 0.5
PATIENT_GRACE_S = 60.0


def fake_service(job: Job) -> list[str]:
    """The command line of the fake of a service."""
    flags = json.loads(os.environ[FLAGS_VARIABLE]).get(job.name, [])
    script = Path(__file__).with_name("fake_service.py")
    return [sys.executable, str(script), "--address", job.table.address, *flags]


def note_waits() -> None:
    look = psutil.net_connections

    def noted(*arguments: Any) -> Any:
        Path("waits").touch()
        return look(*arguments)

    psutil.net_connections = noted


if __name__ == "__main__":
    flags = json.loads(os.environ[FLAGS_VARIABLE]).get("supervisor", [])
    if "up" in sys.argv and "--slow-exit" in flags:
        atexit.register(time.sleep, 1.0)
    if "--note-waits" in flags:
        note_waits()
    main(obj=LaunchOptions(fake_service, PATIENT_GRACE_S if "--patient" in flags else GRACE_S))
