"""Processes that are compared take turns: each in a process of its own, one working at a time.

A line on a process's standard input is a turn; its answer, on standard output, is a line of JSON. What libraries print
goes to standard error, which goes to a log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from deploy import with_parent

GRACE_S = 10.0
LOG_LINES = 30


class Player:
    """A process that takes turns. A context manager: the process does not outlive the context.

    Args:
        name: For messages.
        arguments: Of Python: the module and its options.
        threads: It computes with.
        log: File of its standard error.
        variables: Of its environment, beside those of this process.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        threads: int,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._command = with_parent.wrap([sys.executable, *arguments])
        count = str(threads)
        own = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        self._environment = {**os.environ, **own, **(variables or {})}

    def __enter__(self) -> Player:
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=self._environment,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        self._answer()

    def turn(self) -> Any:
        """Takes a turn; returns what the process says of it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            ending = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise click.ClickException(f"{self.name} ended; its log ends with:\n{ending}")
        return json.loads(line)


class Turns:
    """The same from inside the process: make it before libraries print anything."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def answer(self, what: Any) -> None:
        """Says what the last turn gave; the first answer says that the process is ready."""
        print(json.dumps(what), file=self._answers)

    def wait(self) -> bool:
        """Waits for the next turn; returns False after the last."""
        return bool(sys.stdin.readline())
