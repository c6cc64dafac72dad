"""Chooses the worker that serves a table of the reference role."""

from __future__ import annotations

from services.runtime.worker import Worker
from settings.reference import ReferenceTable


def worker_class(table: ReferenceTable) -> type[Worker]:
    """Returns the worker class of a reference, `ReferenceWorker`."""
    # Imports torch, which takes seconds, so the configuration is checked first.
    from services.reference.worker import ReferenceWorker

    return ReferenceWorker
