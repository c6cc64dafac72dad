"""Chooses the worker that serves a table of the critic role."""

from __future__ import annotations

from services.runtime.worker import Worker
from settings.critic import CriticTable


def worker_class(table: CriticTable) -> type[Worker]:
    """Returns the worker class of a critic, `CriticWorker`."""
    # Imports torch, which takes seconds, so the configuration is checked first.
    from services.critic.worker import CriticWorker

    return CriticWorker
