"""An installed program in a process that is forked from one which has imported most of what the program imports."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path


def run_program(
    program: str,
    arguments: tuple[str, ...],
    directory: Path,
    environment: dict[str, str],
    out: Path,
    err: Path,
) -> None:
    """Becomes an installed program, as `Program` starts it."""
    os.setsid()
    for stream, path in enumerate((Path(os.devnull), out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [program, *arguments]
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=program)
    sys.exit(entry.load()())
