"""Chooses the worker that serves a table of the actor role."""

from __future__ import annotations

from services.runtime.worker import Worker
from settings.actor import ActorTable


def worker_class(table: ActorTable) -> type[Worker]:
    """Returns the worker class of an actor: `LoRAActorWorker` if the table has `lora`, otherwise `ActorWorker`."""
    if table.lora is None:
        # Imported here: torch takes seconds, so the configuration is checked first.
        from services.actor.worker import ActorWorker

        return ActorWorker
    # Imported here: only adapters need peft.
    from services.actor.lora import LoRAActorWorker

    return LoRAActorWorker
