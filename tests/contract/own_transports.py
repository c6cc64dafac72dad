"""The published contract of transports, on those of this project."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from contract.transport_helpers import Make
from nccl_transfer.fetch import Fetcher
from nccl_transfer.testing.peer_process import PeerProcess
from nccl_transfer.testing.transports.suite import TransportContract
from nccl_transfer.transports import Reader


class OwnTransports(TransportContract):
    """The contract for each value of the fixture `transport`, with the peers and the `make` of the test's module or of
    its conftest."""

    shared_peer = peer = shared_checked_peer = checked_peer = None  # pyright: ignore[reportAssignmentType]
    mortal_peer = other_peer = new_peer = big_peer = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture
    def transport_name(self, transport: str) -> str:
        return transport

    @pytest.fixture
    def make(self, make: Make, transport: str) -> Callable[[], Reader]:
        return partial(make, transport)

    @pytest.mark.full
    def test_a_gibibyte_arrives(self, fetcher: Fetcher, big_peer: PeerProcess) -> None:
        super().test_a_gibibyte_arrives(fetcher, big_peer)
