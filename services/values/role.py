"""Chooses the worker that serves a table of the values role."""

from __future__ import annotations

from services.runtime.worker import Worker
from settings.values import ValuesTable


def worker_class(table: ValuesTable) -> type[Worker]:
    """Returns the worker class of a values service, `ValuesWorker`."""
    # Imports torch, which takes seconds, so the configuration is checked first.
    from services.values.worker import ValuesWorker

    return ValuesWorker
