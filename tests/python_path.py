"""The variable PYTHONPATH of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*first: Path | str) -> str:
    """Returns the value of PYTHONPATH with directories before those that it has here, so that a process imports the
    same code as this one: in a checkout that is not the installed one, PYTHONPATH names it."""
    return os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH")]))
