"""The calls of one step of an algorithm (D of HybridFlow, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["generation", "inference", "training", "sync"]
STAGES = ("generation", "preparation", "training", "weights")
"""Stages of a step (HybridFlow, section 2). The kind of a call determines its stage; inference belongs to preparation.
In the last stage, weights are sent to the services that compute with the weights of another service."""
SYNC = "sync_weights"
"""Method of the calls of a transfer of weights: one of the source, and one of each receiver."""


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        service, method: Name of the service, and Python name of the method.
        rows: Number of rows.
        reads: Columns that other services or the controller made and the call reads, by name.
        after: Numbers of the calls of the step that it waits for, ascending: those that made the columns it reads.
    """

    service: str
    method: str
    rows: int
    reads: tuple[str, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """Kind of the computation, by the name of the method."""
        if self.method == "generate_sequences":
            return "generation"
        if self.method == SYNC:
            return "sync"
        return "training" if self.method.startswith("update_") else "inference"

    @property
    def stage(self) -> int:
        """Index of the call's stage in `STAGES`."""
        return {"generation": 0, "inference": 1, "training": 2, "sync": 3}[self.kind]
