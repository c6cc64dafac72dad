"""rlhf-deploy with fake services, whose flags are in the variable FAKE_FLAGS: {"service": ["--flag"]}.

The flag --slow-exit of "supervisor" makes its process end a second after its work."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path

from deploy.cli import main
from deploy.launch import Job, LaunchOptions

FLAGS_VARIABLE = "FAKE_FLAGS"
GRACE_S = 0.5


def fake_service(job: Job) -> list[str]:
    """The command line of the fake of a service."""
    flags = json.loads(os.environ[FLAGS_VARIABLE]).get(job.name, [])
    script = Path(__file__).with_name("fake_service.py")
    return [sys.executable, str(script), "--address", job.table.address, *flags]


if __name__ == "__main__":
    if "up" in sys.argv and "--slow-exit" in json.loads(os.environ[FLAGS_VARIABLE]).get("supervisor", []):
        atexit.register(time.sleep, 1.0)
    main(obj=LaunchOptions(fake_service, GRACE_S))
