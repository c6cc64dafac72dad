"""Chooses the worker that serves a table of the rollout role."""

from __future__ import annotations

from services.runtime.worker import Worker
from settings.rollout import RolloutServiceTable


def worker_class(table: RolloutServiceTable) -> type[Worker]:
    """Returns the worker class of a rollout service, `RolloutWorker`."""
    # Imports torch, which takes seconds, so the configuration is checked first.
    from services.rollout_service.worker import RolloutWorker

    return RolloutWorker
