"""The reward of examples/reward_node as a process."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import ROOT, Processes, free_ports, wait_for_line

EXAMPLE = ROOT / "examples" / "reward_node"
INSTALL_TIMEOUT_S = 100.0


def install(directory: Path) -> Path:
    """The example with its packages: as it is where they are there, else a copy in `directory`. Skips the test where
    there is no Node.js."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs Node.js")
    if (EXAMPLE / "node_modules" / ".package-lock.json").is_file():
        return EXAMPLE
    copy = Path(
        shutil.copytree(EXAMPLE, directory / EXAMPLE.name, ignore=shutil.ignore_patterns("node_modules"))
    )
    ran = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund"],
        cwd=copy, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return copy


def start(processes: Processes, directory: Path, port: int, reward: str) -> subprocess.Popen[str]:
    """Starts the server, and waits until it serves."""
    node = shutil.which("node")
    assert node is not None
    arguments = ["--port", str(port), "--reward", reward, "--protos", str(ROOT / "protos")]
    process = processes.start(node, "server.js", *arguments, cwd=directory)
    wait_for_line(process, "ready\n")
    return process


@contextlib.contextmanager
def serving(directory: Path, reward: str) -> Iterator[str]:
    """The address of a running server."""
    (port,) = free_ports(1)
    processes = Processes()
    process = None
    try:
        process = start(processes, directory, port, reward)
        yield f"127.0.0.1:{port}"
    finally:
        processes.kill()
        if process is not None:
            process.communicate()
