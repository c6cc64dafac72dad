"""Statuses of the ranks, streamed by WorkerService.Watch: progress and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from benchmarks.simulated import WORKER
from client.rank import RankClient
from client.stream import REOPEN_S
from controller.role_groups.group import RoleGroup
from rlhf.errors import RlhfError
from rlhf.v1 import worker_pb2

INTERVAL_S = 0.5
"""Time between two statuses of a rank."""


class StatusWatch:
    """The newest status of each rank, for as long as it answers. Used from the event loop, read from any thread."""

    def __init__(self) -> None:
        self._statuses: dict[str, dict[int, worker_pb2.WatchResponse]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, clients: Iterable[RankClient]) -> None:
        """Starts to watch ranks."""
        self._tasks.extend(asyncio.ensure_future(self._watch(client)) for client in clients)

    def end(self) -> None:
        """Stops watching."""
        for task in self._tasks:
            task.cancel()

    def memory(self) -> dict[str, int]:
        """Resident and device memory by service, in bytes, summed over ranks."""
        return {
            name: sum(status.memory_bytes + status.device_memory_bytes for status in list(ranks.values()))
            for name, ranks in list(self._statuses.items())
        }

    def running(self, groups: Mapping[str, RoleGroup]) -> dict[str, str]:
        """Running calls of groups, "group.Method", with rank 0's progress, such as "12/64"; empty where unknown."""
        shown = {}
        for name, group in list(groups.items()):
            status = self._statuses.get(group.ranks.service, {}).get(0)
            for method in list(group.running.values()):
                is_known = status is not None and status.done_of and status.method == method
                shown[f"{name}.{method}"] = f"{status.done}/{status.done_of}" if status and is_known else ""
        return shown

    async def _watch(self, client: RankClient) -> None:
        """Keeps the status of a rank up to date and opens a broken stream again. A lost rank is no error here: the next
        call on it fails."""
        while True:
            try:
                request = worker_pb2.WatchRequest(interval_s=INTERVAL_S)
                async for status in client.stream(WORKER["Watch"], request):
                    self._statuses.setdefault(client.service, {})[client.rank] = status
            except RlhfError:
                self._statuses.get(client.service, {}).pop(client.rank, None)
            await asyncio.sleep(REOPEN_S)
