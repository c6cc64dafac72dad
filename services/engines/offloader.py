"""Moves an engine's tensors to host memory and back, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.engines.agreement import all_or_none
from services.engines.base import EngineOffloaded
from services.engines.offload import OffloadedStorage, bring_back, copy_to_host, free, num_bytes


class Offloader:
    """Moves an engine's tensors to host memory and back, and keeps the copies while the engine is offloaded."""

    def __init__(self) -> None:
        self._offloaded: list[OffloadedStorage] = []

    def check_onloaded(self) -> None:
        """Raises EngineOffloaded if the tensors are in host memory."""
        if self._offloaded:
            raise EngineOffloaded("the engine is offloaded; bring it back first")

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Moves tensors to host memory; returns the bytes moved, 0 if they are there already. Collective.

        Raises:
            RuntimeError: Memory ran out (`PeerRankFailed` on other ranks); the tensors are still on the device.
        """
        if self._offloaded:
            return 0
        with all_or_none("copying the engine to host memory"):
            offloaded = copy_to_host(tensors)
        free(offloaded)
        self._offloaded = offloaded
        torch.cuda.empty_cache()
        return num_bytes(offloaded)

    def onload(self) -> int:
        """Moves the tensors back to the device; returns the bytes moved, 0 if they are there already. Collective.

        Raises:
            RuntimeError: Memory ran out (`PeerRankFailed` on other ranks); the tensors are still in host memory.
        """
        if not self._offloaded:
            return 0
        moved_bytes = num_bytes(self._offloaded)
        try:
            with all_or_none("bringing the engine back to the device"):
                bring_back(self._offloaded)
        except BaseException:
            free(self._offloaded)
            torch.cuda.empty_cache()
            raise
        self._offloaded = []
        return moved_bytes
