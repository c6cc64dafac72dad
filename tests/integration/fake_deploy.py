"""rlhf-deploy with fake services, whose flags are in the variable FAKE_FLAGS: {"service": ["--flag"]}."""

from __future__ import annotations

import json
import os
import sys
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
    main(obj=LaunchOptions(fake_service, GRACE_S))
