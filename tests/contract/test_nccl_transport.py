"""`nccl`: plans, communicators, manifests and versions."""

from __future__ import annotations

import re
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from contract.host_devices import HostCuda, HostNccl
from contract.peer_process import GPU, READERS_GPU
from contract.transport_helpers import two_columns
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.registry import create_readers, served_transports
from nccl_transfer.store.store import TensorStore
from nccl_transfer.testing.peer_process import MIB
from nccl_transfer.testing.transports.rows import (
    assert_same_bits,
    fetch,
    moved_to,
    random_array,
    shard_of,
    wait_until,
)
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.communicator import CommunicatorError
from nccl_transfer.transports.gpu.manifest import manifest_item
from nccl_transfer.transports.gpu.nccl import NcclReader, NcclTransport
from nccl_transfer.transports.gpu.nccl_source import ADVERT
from rlhf.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Refused,
)
from rlhf.security import adopted
from rlhf.v1 import common_pb2 as pb
from settings.security import load_security

pytestmark = pytest.mark.timeout(60)


def of_version(batch: Batch, version: int | None) -> Batch:
    """The same rows, of a rank that tells another version of NCCL, or none."""
    adverts = dict(shard_of(batch).endpoint.adverts)
    told = adverts.pop("nccl")
    if version is not None:
        adverts["nccl"] = ADVERT.pack(version) + told[ADVERT.size :]
    return moved_to(batch, adverts=adverts)


OVER_NCCL = pytest.mark.parametrize("transport", ["nccl"], indirect=True)


@OVER_NCCL
@pytest.mark.parametrize(("at", "phase"), [("copy", "prepare"), ("send", "transfer")])
def test_a_group_that_fails_names_plan_peer_and_phase_and_the_next_has_a_new_communicator(
    fetcher, peer, at, phase
):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    peer.ask("pause", at=at)
    with pytest.raises(
        DeadlineExceeded, match=rf"{re.escape(str(peer.endpoint))}: plan [0-9a-f]{{12}}, {phase}: no answer"
    ):
        fetch(fetcher, batch, within_s=0.5)
    assert peer.answer() == {"event": "paused"}
    peer.ask("go_on")
    fetch(fetcher, batch)
    fetch(fetcher, batch)
    assert peer.ask("communicator_epochs") == {"epochs": [2]}


@OVER_NCCL
def test_a_source_that_does_not_join_ends_the_read_at_its_deadline_and_may_join_later(fetcher, peer):
    batch, threads = two_columns(peer), threading.active_count()
    peer.ask("pause", at="join")
    with pytest.raises(DeadlineExceeded, match=r"plan [0-9a-f]{12}, attach: no answer"):
        fetch(fetcher, batch, within_s=0.5)
    assert peer.answer() == {"event": "paused"}
    peer.ask("go_on")
    fetch(fetcher, batch)
    fetcher.close()
    wait_until(lambda: threading.active_count() <= threads)


@OVER_NCCL
def test_a_refused_plan_leaves_the_communicator_as_it_is(fetcher, peer):
    batch = two_columns(peer)
    fetch(fetcher, batch)
    peer.release()
    with pytest.raises(Refused, match=r"plan [0-9a-f]{12}, prepare: shard \d+ was released"):
        fetch(fetcher, batch)
    fetch(fetcher, two_columns(peer))
    assert peer.ask("communicator_epochs") == {"epochs": [1]}


@OVER_NCCL
def test_a_manifest_tells_columns_types_and_shapes_and_one_that_contradicts_itself_is_refused(
    fetcher, peer, monkeypatch
):
    columns = {
        "tokens": (random_array("int32", (7,)), "int32", [3, 0, 4]),
        "hidden": (random_array("bfloat16", (3, 2, 5)), "bfloat16", None),
    }
    batch, told = peer.put_columns(columns), []

    def tell(r, rows=0):
        item = manifest_item(r)
        told.append((item.column, pb.ElementType.Name(item.dtype), list(item.shape), item.range.nbytes))
        item.shape[0] += rows
        return item

    monkeypatch.setattr("nccl_transfer.transports.gpu.nccl_client.manifest_item", tell)
    fetch(fetcher, batch)
    assert told == [
        ("tokens", "ELEMENT_TYPE_INT32", [7], 28),
        ("hidden", "ELEMENT_TYPE_BFLOAT16", [3, 2, 5], 60),
    ]
    monkeypatch.setattr("nccl_transfer.transports.gpu.nccl_client.manifest_item", partial(tell, rows=1))
    with pytest.raises(InvalidRequest, match=r"column 'tokens', .* 28 bytes are not the 32 of int32 \(8,\)"):
        fetch(fetcher, batch)
    monkeypatch.undo()
    fetch(fetcher, batch)
    assert peer.ask("communicator_epochs") == {"epochs": [1]}


@OVER_NCCL
@pytest.mark.parametrize("version", [None, 1])
def test_rows_of_a_rank_without_nccl_or_with_another_come_by_the_next_transport(
    make, transport, peer, version
):
    array = random_array("int32", (4,))
    fetcher = Fetcher(host_id(), [make(transport), *create_readers(["tcp"])])
    assert_same_bits(fetch(fetcher, of_version(peer.put(array), version))["x"], array)
    assert set(fetcher.traffic()) == {"tcp"}
    fetcher.close()


@pytest.mark.parametrize("side", ["reader", "source"])
def test_rows_come_by_the_next_transport_where_a_communicator_cannot_be_made(mortal_peer, side):
    class NoCable(HostNccl):
        def join(self, unique_id, rank, size):
            if side == "reader":
                raise CommunicatorError("no cable")
            return super().join(unique_id, rank, size)

    array, threads = random_array("int32", (4,)), threading.active_count()
    if side == "source":
        mortal_peer.ask("fail_joins")
    fetcher = Fetcher(host_id(), [NcclReader(NoCable(), HostCuda(READERS_GPU)), *create_readers(["tcp"])])
    for _ in range(2):
        assert_same_bits(fetch(fetcher, mortal_peer.put(array))["x"], array)
    assert {name: moved.transfers for name, moved in fetcher.traffic().items()} == {"tcp": 2}
    assert re.fullmatch(
        rf"{re.escape(str(mortal_peer.endpoint))}: plan [0-9a-f]{{12}}, attach: .*no cable",
        fetcher.failures()["nccl"],
    )
    assert mortal_peer.ask("communicator_epochs") == {"epochs": []}
    fetcher.close()
    if side == "reader":  # else a thread of NCCL waits for the source, as long as NCCL does
        wait_until(lambda: threading.active_count() <= threads)


def test_mixed_versions_of_nccl_are_refused_also_where_the_endpoint_says_otherwise(peer):
    fetcher = Fetcher(host_id(), [NcclReader(HostNccl(22809), HostCuda(READERS_GPU))])
    batch = of_version(peer.put(random_array("int32", (4,))), 22809)
    with pytest.raises(Refused, match=r"NCCL is 2\.27\.3 here and 2\.28\.9 at the reader"):
        fetch(fetcher, batch)
    fetcher.close()


def test_a_reader_that_is_stopped_leaves_no_plan_behind_once_its_deadline_has_passed(
    other_peer, start_reader
):
    # The shared peer may still hold what the readers of the tests before had.
    before, batch = other_peer.ask("device_used")["bytes"], two_columns(other_peer)
    other_peer.ask("pause", at="send")
    reader = start_reader("nccl", batch, 3)
    assert other_peer.answer() == {"event": "paused"}
    reader.send_signal(signal.SIGSTOP)
    assert other_peer.ask("device_used")["bytes"] > before
    wait_until(lambda: other_peer.ask("device_used")["bytes"] == before)
    reader.kill()
    reader.communicate()


def test_a_rank_tells_the_nccl_and_the_gpu_that_it_sends_by():
    store = TensorStore(MIB)
    source = NcclTransport(HostNccl(), HostCuda(GPU)).source(store, "127.0.0.1")
    assert source.advert() == ADVERT.pack(22703) + GPU.encode()
    source.close()
    store.close()


@pytest.mark.parametrize(("wanted", "is_offered"), [((), False), (("tcp",), False), (("tcp", "nccl"), True)])
def test_with_certificates_rows_are_sent_by_nccl_only_where_the_config_names_it(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...], is_offered: bool
) -> None:
    monkeypatch.setattr("nccl_transfer.transports.gpu.nccl.why_no_nccl", lambda: None)

    def served() -> list[str]:
        return [transport.name for transport in served_transports(wanted, on_gpu=True)]

    assert "nccl" in served()
    with adopted(load_security(certificates)):
        assert ("nccl" in served()) == is_offered
        assert served()[0] == "memfd"
