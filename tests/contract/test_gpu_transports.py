"""`cuda_ipc` and `nccl`: transfers that stop, sides that die, and GPUs without room."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from contract.host_devices import HostCuda, HostNccl
from contract.transport_helpers import two_columns
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.testing.peer_process import MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, random_array, wait_until
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.nccl import NcclReader
from nccl_transfer.transports.gpu.nccl_source import ADVERT
from rlhf.errors import (
    DeadlineExceeded,
    OutOfSpace,
    Refused,
    ServiceLost,
)

pytestmark = pytest.mark.timeout(60)

BETWEEN_GPUS = pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"], indirect=True)


PLACES = [
    ("cuda_ipc", "copy", 0),
    ("cuda_ipc", "copy", 3),
    ("nccl", "copy", 0),
    ("nccl", "copy", 1),
    ("nccl", "send", 0),
]
"""Points where a transfer between GPUs can stop: at the start of staging, during staging, and in the group."""


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_peer_that_dies_in_the_middle_of_a_transfer_between_gpus_is_lost(
    fetcher, transport, mortal_peer, at, after
):
    batch = two_columns(mortal_peer)
    mortal_peer.ask("pause", at=at, after=after)

    def kill_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        mortal_peer.kill()

    killer = threading.Thread(target=kill_when_paused)
    killer.start()
    start = time.monotonic()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(fetcher, batch, within_s=10)
    assert time.monotonic() - start < 5
    killer.join()


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_transfer_between_gpus_whose_transport_is_closed_ends_and_leaves_nothing(
    in_use, transport, peer, at, after
):
    (fetcher, gpu), batch = in_use, two_columns(peer)
    before = peer.ask("device_used")["bytes"]
    peer.ask("pause", at=at, after=after)
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch, fetcher, batch)
        assert peer.answer() == {"event": "paused"}
        fetcher.close()
        with pytest.raises(Refused, match=f"{re.escape(str(peer.endpoint))}: .*the transport was closed"):
            fetching.result(5)
        wait_until(lambda: gpu.used == 0)
    peer.ask("go_on")
    wait_until(lambda: peer.ask("device_used")["bytes"] <= before)


@BETWEEN_GPUS
def test_a_transport_between_gpus_that_was_closed_refuses(fetcher, peer):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    fetcher.close()
    with pytest.raises(Refused, match="the transport was closed"):
        fetch(fetcher, batch)


@BETWEEN_GPUS
def test_a_source_that_is_back_at_its_address_is_read_from_also_once_it_was_forgotten(
    fetcher, peer, other_peer
):
    array = random_array("int32", (4,))
    batch = peer.put(array)
    fetch(fetcher, batch)
    peer.ask("end_sessions")
    fetch(fetcher, other_peer.put(array))
    assert_same_bits(fetch(fetcher, batch)["x"], array)


@pytest.mark.parametrize(("transport", "at", "after"), PLACES, indirect=["transport"])
def test_a_transfer_between_gpus_that_stops_ends_at_its_deadline_and_leaves_nothing(
    transport, in_use, peer, at, after
):
    (fetcher, gpu), batch = in_use, two_columns(peer)
    fetch(fetcher, batch.take(np.arange(1)))
    held = gpu.used, peer.ask("device_used")["bytes"]
    peer.ask("pause", at=at, after=after)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(peer.endpoint))):
        fetch(fetcher, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5
    assert peer.answer() == {"event": "paused"}
    wait_until(lambda: gpu.used <= held[0])
    peer.ask("go_on")
    wait_until(lambda: peer.ask("device_used")["bytes"] <= held[1])
    assert fetch(fetcher, batch).fetched_bytes == batch.nbytes


@BETWEEN_GPUS
@pytest.mark.parametrize("whose", ["the source's", "the reader's"])
def test_a_gpu_without_room_is_an_error_and_the_next_transfer_works(transport, in_use, peer, whose):
    (fetcher, gpu), array = in_use, random_array("uint8", (1, MIB))
    batch = peer.put(array)
    if whose == "the source's":
        peer.ask("limit_device", mib=0)
    elif transport == "nccl":
        gpu.capacity = 0
    else:
        pytest.skip("its reads need no memory of their own")
    with pytest.raises(OutOfSpace, match=r"has no .* bytes left"):
        fetch(fetcher, batch)
    gpu.capacity = 4 << 30
    peer.ask("limit_device", mib=4 << 10)
    assert_same_bits(fetch(fetcher, batch)["x"], array)


@BETWEEN_GPUS
def test_a_reader_that_is_killed_leaves_nothing_on_the_gpu_of_its_source(transport, other_peer, start_reader):
    # The shared peer may still hold what the readers of the tests before had.
    before, batch = other_peer.ask("device_used")["bytes"], two_columns(other_peer)
    other_peer.ask("pause", at="copy", after=1)
    reader = start_reader(transport, batch, 60)
    assert other_peer.answer() == {"event": "paused"}
    assert other_peer.ask("device_used")["bytes"] > before
    reader.kill()
    reader.communicate()
    other_peer.ask("go_on")
    wait_until(lambda: other_peer.ask("device_used")["bytes"] == before)


@BETWEEN_GPUS
def test_a_reader_that_is_killed_between_transfers_leaves_no_session_behind(
    transport, other_peer, start_reader
):
    before, batch = other_peer.ask("device_used")["bytes"], two_columns(other_peer)
    reader = start_reader(transport, batch, 60)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"fetched\n"
    if transport == "nccl":
        assert other_peer.ask("communicator_epochs") == {"epochs": [1]}
    else:
        assert other_peer.ask("device_used")["bytes"] > before
    reader.kill()
    reader.communicate()
    wait_until(lambda: other_peer.ask("communicator_epochs") == {"epochs": []})
    wait_until(lambda: other_peer.ask("device_used")["bytes"] == before)


def test_the_device_decides_which_transports_reach_a_rank():
    here, there = HostCuda("GPU-1"), "another host"
    ipc, nccl = CudaIpcReader(here), NcclReader(HostNccl(), here)

    def rank(device: str, version: int) -> Endpoint:
        uuid = device.encode()
        return Endpoint("a:1", there, adverts={"cuda_ipc": uuid, "nccl": ADVERT.pack(version) + uuid})

    source = Endpoint("a:1", there)
    assert (ipc.why_not(source, there), nccl.why_not(source, there)) == ("it has no GPU", "it offers no NCCL")
    same, other = rank("GPU-1", 22703), rank("GPU-2", 22703)
    assert ipc.why_not(same, there) is None
    assert ipc.why_not(other, there) == "it is on GPU-2, not on GPU-1"
    assert nccl.why_not(same, there) == "both are on GPU-1, and NCCL takes one rank per GPU"
    assert nccl.why_not(rank("GPU-2", 22809), there) == "NCCL is 2.28.9 there and 2.27.3 here"
    assert nccl.why_not(other, there) is None
