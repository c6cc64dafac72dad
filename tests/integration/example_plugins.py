"""Installs the package `examples/plugins` as a user would, but into a directory of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from integration.harness import ROOT

INSTALL_TIMEOUT_S = 100.0


def install(directory: Path) -> Path:
    """Installs the package; returns the directory to put on PYTHONPATH. Nothing is downloaded."""
    source, site = directory / "source", directory / "site"
    shutil.copytree(ROOT / "examples" / "plugins", source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--disable-pip-version-check", "--target", str(site), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr
    return site
