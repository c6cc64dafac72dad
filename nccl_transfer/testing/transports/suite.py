"""Contract of every transport, checked with a real second process at the other end. Authors of a transport subclass
`TransportContract`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.registry import find_transport
from nccl_transfer.testing.peer_process import PeerProcess
from nccl_transfer.testing.transports.arrivals import RowsArrive
from nccl_transfer.testing.transports.integrity import RowsAreVerified
from nccl_transfer.testing.transports.leaks import NothingIsLeft
from nccl_transfer.testing.transports.losses import RowsAreLost
from nccl_transfer.transports import host_id
from nccl_transfer.transports.base import Reader

MOST_ADVERT_BYTES = 200


def closed(peer: PeerProcess) -> Iterator[PeerProcess]:
    """Yields a peer, and ends its process."""
    yield peer
    peer.close()


class TransportContract(RowsArrive, RowsAreLost, RowsAreVerified, NothingIsLeft):
    """The tests that a transport passes, and their fixtures.

    Attributes:
        transport: Name of the transport by entry point, or "module:object" that processes can import.
    """

    transport: ClassVar[str]

    pytestmark = pytest.mark.timeout(60)

    @classmethod
    def start_peer(cls, directory: Path, arena_mib: int = 16, checksums: bool = False) -> PeerProcess:
        """Starts the process whose rows are read."""
        return PeerProcess(directory, [cls.transport, "grpc"], arena_mib, checksums)

    @pytest.fixture
    def transport_name(self) -> str:
        """Name of the transport in counts of traffic."""
        return find_transport(self.transport).name

    @pytest.fixture
    def make(self) -> Callable[[], Reader]:
        """Creates readers."""
        return find_transport(self.transport).reader

    @pytest.fixture
    def fetcher(self, make: Callable[[], Reader]) -> Iterator[Fetcher]:
        """Fetches by the transport alone."""
        fetcher = Fetcher(host_id(), [make()])
        yield fetcher
        fetcher.close()

    @pytest.fixture(scope="class")
    @classmethod
    def shared_peer(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerProcess]:
        yield from closed(cls.start_peer(tmp_path_factory.mktemp("peer"), arena_mib=80))

    @pytest.fixture
    def peer(self, shared_peer: PeerProcess) -> Iterator[PeerProcess]:
        """An empty peer, shared by many tests."""
        yield shared_peer
        shared_peer.release()

    @pytest.fixture(scope="class")
    @classmethod
    def shared_checked_peer(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerProcess]:
        yield from closed(cls.start_peer(tmp_path_factory.mktemp("checked"), arena_mib=80, checksums=True))

    @pytest.fixture
    def checked_peer(self, shared_checked_peer: PeerProcess) -> Iterator[PeerProcess]:
        """An empty peer that computes checksums."""
        yield shared_checked_peer
        shared_checked_peer.release()

    @pytest.fixture
    def mortal_peer(self, tmp_path: Path) -> Iterator[PeerProcess]:
        """A peer that a test may stop or kill."""
        peer = self.start_peer(tmp_path)
        yield peer
        peer.kill()
        peer.close()

    @pytest.fixture
    def other_peer(self, mortal_peer: PeerProcess) -> PeerProcess:
        """A second peer."""
        return mortal_peer

    @pytest.fixture
    def new_peer(self, tmp_path: Path) -> Callable[[], PeerProcess]:
        """Starts peers."""
        return lambda: self.start_peer(tmp_path)

    @pytest.fixture
    def big_peer(self, tmp_path: Path) -> Iterator[PeerProcess]:
        """A peer with room for a GiB."""
        yield from closed(self.start_peer(tmp_path, arena_mib=1100))

    def test_the_advert_is_short_lasting_and_accepted_by_its_reader(
        self, fetcher: Fetcher, transport_name: str, peer: PeerProcess
    ) -> None:
        advert = peer.endpoint.adverts[transport_name]
        assert len(advert) <= MOST_ADVERT_BYTES
        fetcher.check_adverts({transport_name: advert})
        assert peer.ask("adverts") == {
            "adverts": {each: a.hex() for each, a in peer.endpoint.adverts.items()}
        }
