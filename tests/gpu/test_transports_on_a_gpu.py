"""The contract suite of the transports on a real GPU: `cuda_ipc` between two processes, `nccl` as a rank that sends to
itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.loopback import LoopbackNccl, OwnPeer
from contract.test_transports import (  # noqa: F401 - run here
    PeerProcess,
    test_a_gibibyte_arrives,
    test_a_peer_that_dies_between_reads_is_lost_and_what_was_read_stays_good,
    test_a_peer_that_hangs_ends_the_read_at_its_deadline,
    test_a_peer_that_has_died_is_lost,
    test_a_range_beyond_its_shard_is_an_error,
    test_any_shape_arrives_also_without_rows,
    test_any_size_arrives,
    test_every_element_type_arrives_bit_by_bit,
    test_jagged_rows_arrive_also_empty_ones,
    test_many_small_columns_arrive_in_one_transfer,
    test_released_rows_are_refused,
    test_repeated_rows_travel_once,
    test_rows_arrive_in_the_order_asked_for,
    test_rows_of_another_epoch_are_refused,
    test_rows_whose_place_was_taken_again_are_refused,
    test_threads_may_read_at_the_same_time,
)
from nccl_transfer.fetch import Fetcher
from nccl_transfer.transports import create_transports, host_id
from nccl_transfer.transports.nccl import NcclTransport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ARENA_MIB = 1200


@pytest.fixture(params=["cuda_ipc", "nccl"], scope="module")
def transport(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def looped(cuda, nccl) -> LoopbackNccl:
    return LoopbackNccl(nccl)


@pytest.fixture(scope="module")
def shared_peer(transport, cuda, looped, tmp_path_factory) -> Iterator[PeerProcess | OwnPeer]:
    if transport == "nccl":
        peer = OwnPeer(looped, cuda, ARENA_MIB << 20)
    else:
        peer = PeerProcess(tmp_path_factory.mktemp("peer"), ARENA_MIB, devices="gpu")
    yield peer
    peer.close()


@pytest.fixture
def peer(shared_peer) -> Iterator[PeerProcess | OwnPeer]:
    yield shared_peer
    shared_peer.release()


@pytest.fixture
def big_peer(peer) -> PeerProcess | OwnPeer:
    return peer


@pytest.fixture
def mortal_peer(transport, tmp_path) -> Iterator[PeerProcess]:
    if transport == "nccl":
        pytest.skip("a rank that sends to itself dies with itself")
    peer = PeerProcess(tmp_path, devices="gpu")
    yield peer
    peer.kill()
    peer.close()


@pytest.fixture
def fetcher(transport, cuda, looped) -> Iterator[Fetcher]:
    made = NcclTransport(looped, cuda) if transport == "nccl" else create_transports([transport])[0]
    fetcher = Fetcher(host_id(), [made])
    yield fetcher
    fetcher.close()
