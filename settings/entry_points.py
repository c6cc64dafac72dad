"""Entry points of the command lines. Ctrl-C ends a program without a traceback also while it is being imported."""

from __future__ import annotations

import importlib
import signal
import sys


def controller() -> None:
    """Runs rlhf-controller."""
    _run("controller.cli")


def deploy() -> None:
    """Runs rlhf-deploy."""
    _run("deploy.cli")


def mapping() -> None:
    """Runs rlhf-map."""
    _run("controller.mapping.cli")


def loadtest() -> None:
    """Runs rlhf-loadtest."""
    _run("loadtest.cli")


def conformance() -> None:
    """Runs rlhf-conformance."""
    _run("conformance.cli")


def _run(module: str) -> None:
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    main()
