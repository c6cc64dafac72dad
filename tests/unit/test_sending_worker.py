"""A rank describes the weights that it holds, and refuses to send others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.test_model_worker import context, make_critic, make_rows, update

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire_weights import slice_from_proto
from nccl_transfer.store.store import TensorStore
from rlhf.errors import CallCancelled, DeadlineExceeded, InvalidRequest, OutOfSpace, Refused
from rlhf.v1 import common_pb2, weights_pb2, worker_pb2
from rlhf.v1 import transfer_pb2 as pb
from services.critic.worker import CriticWorker
from services.engines.base import EngineOffloaded
from services.reward.worker import RewardWorker
from services.runtime.ranks import Ranks
from services.runtime.worker import NO_ROWS, CallResult
from services.storage.checkpoint import WeightShard
from settings.reward import RewardTable

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def critic(tiny_llama_dir: Path) -> CriticWorker:
    worker = make_critic(tiny_llama_dir, "fsdp")
    store = TensorStore(1 << 20)
    store.endpoint = Endpoint("127.0.0.1:1", "host", 1, "critic")
    worker.buckets = BucketBoard(store)
    return worker


def described(worker: CriticWorker) -> list[weights_pb2.WeightSlice]:
    return worker.describe_weights(NO_ROWS, None, context()).fields["slices"]


def send(worker: CriticWorker, transfer: weights_pb2.WeightTransfer | None) -> CallResult:
    request = worker_pb2.SendWeightsRequest(transfer=transfer)
    return worker.send_weights(NO_ROWS, request, context())


def transfer_of(worker: CriticWorker, **changed: object) -> weights_pb2.WeightTransfer:
    source = weights_pb2.RankWeights(
        endpoint=common_pb2.Endpoint(address="127.0.0.1:1"), slices=described(worker)
    )
    return weights_pb2.WeightTransfer(**{"id": "t", "sources": [source]} | changed)  # type: ignore[arg-type]


def test_a_worker_describes_what_its_engine_holds_in_the_type_of_the_optimizer(critic: CriticWorker):
    slices = {each.name: each for each in map(slice_from_proto, described(critic))}
    held = dict(critic.engine.full_tensors())
    assert slices.keys() == held.keys()
    for name, each in slices.items():
        assert (each.shape, each.box.shape, each.dtype) == (
            tuple(held[name].shape),
            tuple(held[name].shape),
            "float32",
        )
    update(critic, make_rows())
    assert [slice_from_proto(each) for each in described(critic)] == list(slices.values())


def test_a_description_that_fails_midway_is_not_taken_for_a_whole_one(
    critic: CriticWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(critic.engine.weight_shards())

    def one_shard() -> Iterator[tuple[str, WeightShard]]:
        yield whole[0]
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(critic.engine, "weight_shards", one_shard)
        with pytest.raises(RuntimeError, match="no memory"):
            described(critic)
    assert len(described(critic)) == len(whole) > 1


def test_a_transfer_that_nobody_reads_ends_at_once(critic: CriticWorker):
    assert send(critic, transfer_of(critic)).fields == {"packed_bytes": 0, "buckets": 0}


def test_a_receiver_that_is_late_is_named_though_the_service_finds_the_deadline_first(critic: CriticWorker):
    receiver = weights_pb2.RankWeights(
        endpoint=common_pb2.Endpoint(address="127.0.0.1:2", host_id="host", service="rollout", rank=1),
        slices=described(critic),
    )
    request = worker_pb2.SendWeightsRequest(transfer=transfer_of(critic, receivers=[receiver]))
    call = context()
    call.deadline = time.monotonic() + 0.3
    late = threading.Timer(0.2, lambda: setattr(call, "is_late", True))  # as the event loop does
    late.start()
    with pytest.raises(DeadlineExceeded, match="was not read by the deadline by rollout rank 1 at 127"):
        critic.send_weights(NO_ROWS, request, call)
    late.join()
    call = context()
    call.cancelled = True
    request.transfer.id = "another"
    with pytest.raises(CallCancelled):
        critic.send_weights(NO_ROWS, request, call)


def test_weights_of_another_policy_version_are_not_sent(critic: CriticWorker):
    with pytest.raises(Refused, match="transfer t: it is of policy version 3, but the weights have 0"):
        send(critic, transfer_of(critic, policy_version=3))


def test_a_transfer_of_another_number_of_ranks_is_refused(critic: CriticWorker):
    sources = list(transfer_of(critic).sources) * 2
    with pytest.raises(InvalidRequest, match="transfer t: it has 2 sources; this service has 1 ranks"):
        send(critic, transfer_of(critic, sources=sources))


def test_a_transfer_of_weights_that_the_rank_does_not_have_is_refused_by_name(critic: CriticWorker):
    other = weights_pb2.WeightSlice(name="other.weight", shape=[2], dtype=common_pb2.ELEMENT_TYPE_FLOAT32)
    sources = [weights_pb2.RankWeights(endpoint=common_pb2.Endpoint(address="127.0.0.1:1"), slices=[other])]
    with pytest.raises(InvalidRequest, match=r"weight other\.weight: this rank does not hold"):
        send(critic, transfer_of(critic, sources=sources))


def test_a_request_without_a_transfer_is_refused(critic: CriticWorker):
    with pytest.raises(InvalidRequest, match="transfer must be given"):
        send(critic, None)


def test_an_offloaded_engine_sends_nothing(critic: CriticWorker):
    moved = transfer_of(critic)
    critic.engine._leave_device()  # type: ignore[attr-defined]
    with pytest.raises(EngineOffloaded):
        send(critic, moved)


def test_a_role_without_weights_says_so():
    table = RewardTable.model_validate(
        {"role": "reward", "address": "127.0.0.1:1", "function": "exact_match"}
    )
    worker = RewardWorker(table, Ranks(0, 1, 1))
    assert worker.describe_weights(NO_ROWS, None, context()).fields == {}
    with pytest.raises(InvalidRequest, match="reward has no weights to send"):
        worker.send_weights(NO_ROWS, None, context())


def test_a_rank_that_fails_alone_waits_for_the_others_and_tells_its_receivers(
    critic: CriticWorker, monkeypatch: pytest.MonkeyPatch
):
    """Its peers send meanwhile: without the wait, its process would leave as one that may hold them up for ever."""
    agreed: list[BaseException | None] = []

    def agree(failure: BaseException | None, until: float) -> None:
        agreed.append(failure)
        if failure is not None:
            raise failure

    transfer = transfer_of(critic)
    monkeypatch.setattr(critic.ranks, "agree", agree)
    monkeypatch.setattr("services.weights.sending.send", fail_to_send)
    with pytest.raises(OutOfSpace):
        send(critic, transfer)
    assert [type(failure) for failure in agreed] == [type(None), OutOfSpace]
    asked = pb.TakeBucketRequest(epoch=1, transfer_id="t")
    with pytest.raises(OutOfSpace, match="the arena is full"):
        asyncio.run(critic.buckets.take(asked, 5))


def fail_to_send(*arguments: object) -> None:
    raise OutOfSpace("the arena is full")
