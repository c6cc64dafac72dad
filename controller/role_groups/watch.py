"""Progress, memory and gauges of the ranks, which they stream over WorkerService.Watch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from client.rank import WORKER, RankClient
from client.stream import REOPEN_S
from controller.role_groups.group import RoleGroup
from rlhf.errors import RlhfError
from rlhf.v1 import worker_pb2

INTERVAL_S = 0.5
"""Time between two status messages of a rank, in seconds."""


class StatusWatch:
    """Keeps the newest status message of each rank that responds. `begin` and `end` must be called from the event
    loop; the other methods may be called from any thread."""

    def __init__(self) -> None:
        self._statuses: dict[str, dict[int, worker_pb2.WatchResponse]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def begin(self, clients: Iterable[RankClient]) -> None:
        """Starts one task per rank that reads its status messages."""
        for client in clients:
            self._tasks.setdefault(client.service, []).append(asyncio.ensure_future(self._watch(client)))

    def end(self, services: Iterable[str] = ()) -> None:
        """Cancels the tasks that read status messages of these services. Default: of all."""
        for service in list(services) or list(self._tasks):
            for task in self._tasks.pop(service, ()):
                task.cancel()

    def memory(self) -> dict[str, int]:
        """Returns resident plus device memory of each service, in bytes by name, summed over the ranks that respond."""
        return {
            name: sum(status.memory_bytes + status.device_memory_bytes for status in list(ranks.values()))
            for name, ranks in list(self._statuses.items())
        }

    def gauges(self) -> dict[str, float]:
        """Returns the newest gauges of each service by "service/name", summed over the ranks that respond; see
        `Worker.gauges`."""
        totals: dict[str, float] = {}
        for service, ranks in list(self._statuses.items()):
            for status in list(ranks.values()):
                for name, value in status.gauges.items():
                    key = f"{service}/{name}"
                    totals[key] = totals.get(key, 0.0) + value
        return totals

    def responding(self) -> dict[str, int]:
        """Returns the number of ranks of each service whose status messages arrive, by name."""
        return {name: len(ranks) for name, ranks in list(self._statuses.items())}

    def running(self, groups: Mapping[str, RoleGroup]) -> dict[str, str]:
        """Returns the progress of the running calls of groups on rank 0, such as "12/64", by "group.Method"; an empty
        text for a call whose progress is unknown. Where calls of several steps run, the name has the step too, as
        "group.Method of step 3".

        Args:
            groups: Role groups by name.
        """
        shown = {}
        running = {name: (group, list(group.running.values())) for name, group in list(groups.items())}
        overlap = len({call.step for _, calls in running.values() for call in calls}) > 1
        for name, (group, calls) in running.items():
            status = self._statuses.get(group.ranks.service, {}).get(0)
            for call in calls:
                is_known = status is not None and status.done_of and status.method == call.method
                title = f"{name}.{call.method}" + (f" of step {call.step}" if overlap else "")
                shown[title] = f"{status.done}/{status.done_of}" if status and is_known else ""
        return shown

    async def _watch(self, client: RankClient) -> None:
        """Reads the status messages of a rank, and reopens the stream when it breaks. Does not raise where the rank
        is lost, since the next call on it does."""
        while True:
            try:
                request = worker_pb2.WatchRequest(interval_s=INTERVAL_S)
                async for status in client.stream(WORKER["Watch"], request):
                    self._statuses.setdefault(client.service, {})[client.rank] = status
            except RlhfError:
                self._statuses.get(client.service, {}).pop(client.rank, None)
            await asyncio.sleep(REOPEN_S)
