"""Settings of the checkpoints that a run writes and can be resumed from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from settings.strict import LONGEST_S, Positive, Strict


class CheckpointTable(Strict):
    """Settings of the checkpoints of a run; see docs/checkpoints.md."""

    every: int = Field(default=0, ge=0)
    """Number of steps between checkpoints. 0: none while the run goes on."""
    at_end: bool = False
    """Writes a checkpoint after the last step too, if `every` does not."""
    keep: Positive = 2
    """Number of newest checkpoints that are kept; older ones are removed after a new one is complete."""
    best: str = ""
    """Name of a metric, for example `evaluation/accuracy`: the checkpoint with its best value is kept beside the
    newest ones. Checkpoints of steps without the metric do not count. Empty: none."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Direction in which the metric `best` is better."""
    restarts: int = Field(default=0, ge=0)
    """Number of times that the command restarts the run from one checkpoint, after a process of a service has died or
    is stuck. A newer checkpoint allows as many again. 0: the run ends."""
    grace_s: float = Field(default=20.0, ge=0, le=LONGEST_S)
    """Time, in seconds, that the command has after SIGTERM to finish its step and write a checkpoint before it ends.
    After it, or at a second SIGTERM, it ends without. 0: it ends at once. Without `every` and `at_end` it has no
    meaning."""

    @property
    def is_on(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self.every) or self.at_end

    @model_validator(mode="after")
    def _check(self) -> CheckpointTable:
        if self.best and not self.every:
            raise ValueError(f"best: {self.best!r} needs every, the number of steps between checkpoints")
        if self.restarts and not self.every:
            raise ValueError("restarts needs every, the number of steps between checkpoints")
        return self
