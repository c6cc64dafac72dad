"""Watches the ranks of a service on other hosts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from deploy.health import ANSWER_TIMEOUT_S, CHANNEL_OPTIONS, Probe
from rlhf.access import Access
from rlhf.channels import open_channel
from rlhf.errors import ServiceLost
from rlhf.v1 import worker_pb2, worker_pb2_grpc

PEER_TIMEOUT_S = 30.0
"""Time, in seconds, without an answer after which a rank on another host counts as lost. Its supervisor ends all ranks
of its host when one ends, so a rank of each host is enough."""
INTERVAL_S = 1.0
"""Interval, in seconds, between two health checks of a rank."""
PAUSE_S = 5.0
"""Time, in seconds, between two polls from which this process counts as suspended, as by Ctrl-Z. A rank is not asked
meanwhile, so that the time does not count as one without an answer."""


class PeerWatch:
    """Checks the health of one rank of a service on each other host, without blocking.

    Args:
        name: Name of the service.
        address: Address of its rank 0, whose Describe returns those of all ranks.
        ranks: Rank to check, by name of its host.
    """

    def __init__(self, name: str, address: str, ranks: Mapping[str, int]) -> None:
        self._name, self._ranks = name, dict(ranks)
        self._channel = open_channel(address, CHANNEL_OPTIONS, Access.READ)
        self._describe = worker_pb2_grpc.WorkerServiceStub(self._channel).Describe
        self._description: Any = None
        self._probes: dict[str, tuple[str, Probe]] = {}
        self._polled = time.monotonic()
        self._next = 0.0
        self._seen: dict[str, float] = {}

    def poll(self) -> None:
        """Starts and reads health checks, and never blocks. The first call is made when the service is up.

        Raises:
            ServiceLost: A rank has not answered for `PEER_TIMEOUT_S`; the text has its number, host and address.
        """
        now = time.monotonic()
        pause, self._polled = now - self._polled, now
        if pause > PAUSE_S:
            self._seen = {host: seen + pause for host, seen in self._seen.items()}
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        self._seen = self._seen or dict.fromkeys(self._ranks, now)
        if not self._probes:
            self._find()
        for host, (_, probe) in self._probes.items():
            if probe.serving():
                self._seen[host] = now
        for host, seen in self._seen.items():
            if now - seen > PEER_TIMEOUT_S:
                address, probe = self._probes.get(host, ("an unknown address", None))
                reason = f" ({probe.reason})" if probe and probe.reason else ""
                raise ServiceLost(
                    f"service {self._name}: rank {self._ranks[host]} on {host}, at {address}, has not answered for "
                    f"{PEER_TIMEOUT_S:g} s{reason}; the host is lost, or rlhf-deploy has ended there"
                )

    def close(self) -> None:
        """Closes all channels."""
        self._channel.close()
        for _, probe in self._probes.values():
            probe.close()

    def _find(self) -> None:
        """Asks rank 0 for the addresses of the ranks, and opens a probe to each once it has answered."""
        if self._description is None:
            self._description = self._describe.future(  # pyright: ignore[reportFunctionMemberAccess]
                worker_pb2.DescribeRequest(), timeout=ANSWER_TIMEOUT_S
            )
        if not self._description.done():
            return
        answer, self._description = self._description, None
        if answer.exception() is None:
            addresses = [rank.endpoint.address for rank in answer.result().ranks]
            self._probes = {
                host: (addresses[rank], Probe(addresses[rank])) for host, rank in self._ranks.items()
            }
