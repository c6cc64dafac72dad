"""Runs a program of the command line. Ctrl-C ends it without a traceback also while it is being imported."""

from __future__ import annotations

import importlib
import signal
import sys


def run(module: str) -> None:
    """Imports a module and calls its function `main`. Ctrl-C during the import exits with 130."""
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    main()
