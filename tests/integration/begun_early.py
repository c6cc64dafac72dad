"""A step whose gradient was begun before it, on all ranks of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.compute.heads import Head, Output
from services.compute.microbatch import MicroBatch
from services.engines.accumulating import AccumulatingEngine
from services.engines.base import LossFn


def is_step_begun_early_the_same(
    engine: AccumulatingEngine, micro_batches: Sequence[MicroBatch], head: Head[Output], loss: LossFn[Output]
) -> bool:
    """Whether a step on micro-batches has the same bits on this rank where the gradient of the first one was computed
    before forward passes of all. Leaves the engine as it was. Collective."""
    before = engine.snapshot()
    whole, learned = engine.step(micro_batches, head, loss), engine.snapshot()
    engine.restore(before)
    engine.accumulate(micro_batches[:1], head, loss)
    engine.infer(micro_batches, head)
    begun, after = engine.step(micro_batches[1:], head, loss), engine.snapshot()
    engine.restore(before)
    return begun == whole and all(torch.equal(x, after.tensors[name]) for name, x in learned.tensors.items())
