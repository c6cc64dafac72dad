"""Bytes that torch's CPU allocator has given out during a block: at most, and those still in use at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import profile

_MEMORY = "[memory]"


@dataclass
class Allocations:
    """Bytes of all tensors and temporaries, beside those that were there before the block.

    Attributes:
        kept: Bytes that are still allocated at the end.
        peak: Most bytes that were allocated at any moment.
    """

    kept: int = 0
    peak: int = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Context manager that yields the allocations of its block, which are complete when it ends.

    The profiler records every call of the allocator on this thread and on those of autograd, temporaries inside
    operators included: nothing is sampled. What other threads free, as gloo's do after a collective, it does not see,
    so that a peak with collectives may come out too high, never too low: measure several times and take the lowest.
    """
    found = Allocations()
    profiler: Any
    with profile(profile_memory=True, use_cpu=True) as profiler:
        yield found
    events = [each for each in profiler.kineto_results.events() if each.name() == _MEMORY]
    for event in sorted(events, key=lambda each: each.start_ns()):
        found.kept += event.nbytes()
        found.peak = max(found.peak, found.kept)
