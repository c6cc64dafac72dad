"""Choice of the checkpoints that a run keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.checkpoints.store import Commit
from controller.config.checkpoint import CheckpointTable


def best_of(commits: Sequence[Commit], metric: str, *, highest: bool) -> Commit | None:
    """Returns the checkpoint with the best finite value of a metric, the newest of equal ones; None where none has
    one.

    Args:
        commits: The checkpoints.
        metric: Name of the metric; values of other metrics do not count.
        highest: Whether a higher value is better; False: a lower one.
    """
    sign = 1 if highest else -1
    found = [
        (sign * value, each.step, each)
        for each in commits
        if each.metric == metric and (value := each.value) is not None and math.isfinite(value)
    ]
    return max(found, key=lambda item: item[:2])[2] if metric and found else None


def to_remove(commits: Sequence[Commit], table: CheckpointTable) -> list[int]:
    """Returns the steps of the checkpoints to remove, ascending: all but the `table.keep` newest and the best one (see
    `best_of`)."""
    in_order = sorted(commits, key=lambda commit: commit.step)
    kept = {commit.step for commit in in_order[-table.keep :]}
    best = best_of(in_order, table.best, highest=table.best_is == "highest")
    if best is not None:
        kept.add(best.step)
    return [commit.step for commit in in_order if commit.step not in kept]
