"""A rank of a rollout service in this process: what it wants, what it generates with, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import WeightSlice, WeightTransfer
from nccl_transfer.refs.wire_ranks import endpoint_to_proto
from nccl_transfer.rows import FetchedRows
from rlhf.errors import InvalidRequest, Refused, TransferError
from rlhf.v1 import actor_pb2, common_pb2, rollout_pb2, weights_pb2, worker_pb2
from services.actor.worker import ActorWorker
from services.roles import receiving_worker as module
from services.rollout_service.worker import RolloutWorker
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallRows
from services.weights.copying import Values
from services.weights.wanted import weight_shards, whole_weights
from settings.actor import ActorTable
from settings.rollout import RolloutServiceTable

pytestmark = pytest.mark.usefixtures("process_group")

HERE = Endpoint("127.0.0.1:1", "host", 5)
CPU = torch.device("cpu")
GREEDY = actor_pb2.GenerateSequencesRequest(sampling=actor_pb2.Sampling(max_new_tokens=4, greedy=True))
NO_ROWS: Any = None


def call() -> CallContext:
    return CallContext(common_pb2.Call(call_id="c", seed=1, step=1), time.monotonic() + 60)


def prompts() -> CallRows:
    return CallRows(FetchedRows(2, {"prompt": ["w3", "w5"]}, {"prompt": "text"}, 0), np.arange(2))


def table(directory: Path, **keys: Any) -> RolloutServiceTable:
    return RolloutServiceTable.model_validate(
        {"role": "rollout", "address": HERE.address, "model": directory, **keys}
    )


class Sources:
    """Stands for the ranks that send: `receive` yields their weights, or raises after some of them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.fails_after = weights, len(weights) + 1

    def receive(
        self, transfer: WeightTransfer, receiver: int, *more: Any, **options: Any
    ) -> Iterator[tuple[WeightSlice, Values]]:
        for number, each in enumerate(transfer.receivers[receiver].slices):
            if number == self.fails_after:
                raise TransferError("rank 0 of the source is gone")
            box = tuple(map(slice, each.box.starts, each.box.stops))
            yield each, Values(self.weights[each.name][box])


@pytest.fixture
def sources(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    weights = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).state_dict()
    made = Sources({name: x + 0.01 * torch.randn_like(x) for name, x in weights.items()})
    monkeypatch.setattr(module, "receive", made.receive)
    return made


@pytest.fixture(params=[True, False], ids=["second buffer", "in place"])
def worker(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> RolloutWorker:
    made = RolloutWorker(table(tiny_llama_dir, second_buffer=request.param), Ranks(0, 1, 5, endpoints=[HERE]))
    made.fetcher = cast(Any, None)
    return made


def load(worker: RolloutWorker, name: str, state_id: str, version: int = 7, *, empty: bool = False) -> Any:
    slices = worker.describe_weights(NO_ROWS, None, call()).fields["slices"]
    own = weights_pb2.RankWeights(endpoint=endpoint_to_proto(HERE), slices=[] if empty else slices)
    source = weights_pb2.RankWeights(endpoint=endpoint_to_proto(HERE), slices=slices)
    transfer = weights_pb2.WeightTransfer(id=name, policy_version=version, sources=[source], receivers=[own])
    request = rollout_pb2.LoadWeightsRequest(transfer=transfer, state_id=state_id)
    return worker.load_weights(NO_ROWS, request, call()).fields


def commit(worker: RolloutWorker, name: str) -> None:
    worker.commit_weights(NO_ROWS, rollout_pb2.CommitWeightsRequest(transfer=name), call())


def generated(worker: RolloutWorker | ActorWorker) -> list[list[float]]:
    columns = worker.generate_sequences(prompts(), GREEDY, call()).columns
    return [columns[name].values.tolist() for name in ("response_ids", "rollout_log_probs")]


def expected(directory: Path, weights: dict[str, torch.Tensor]) -> list[list[float]]:
    """As an actor with these weights generates."""
    actor = ActorWorker(
        ActorTable.model_validate({"role": "actor", "address": HERE.address, "model": directory}),
        Ranks(0, 1, 0),
    )
    actor.colocated._version = actor.policy_version
    actor.rollout.load_weights(weights.items())
    return generated(actor)


def test_it_generates_as_an_actor_with_the_weights_that_it_has_received(
    worker: RolloutWorker, sources: Sources, tiny_llama_dir: Path
) -> None:
    with pytest.raises(Refused, match="no whole weights"):
        generated(worker)
    nbytes = load(worker, "first", "state-1")["received_bytes"]
    assert nbytes == sum(x.nbytes for name, x in sources.weights.items())
    with pytest.raises(Refused, match="no whole weights"):
        generated(worker)
    commit(worker, "first")
    assert (worker.policy_version, worker.state_id) == (7, "state-1")
    assert generated(worker) == expected(tiny_llama_dir, sources.weights)
    assert worker.verify_weights(NO_ROWS, None, call()).fields["verified_bytes"] == nbytes


def test_a_transfer_that_fails_leaves_the_weights_from_before_or_none(
    worker: RolloutWorker, sources: Sources
) -> None:
    load(worker, "first", "state-1")
    commit(worker, "first")
    before = generated(worker)
    sources.weights = {name: x + 1 for name, x in sources.weights.items()}
    sources.fails_after = 3
    with pytest.raises(TransferError, match="is gone"):
        load(worker, "second", "state-2", 8)
    with pytest.raises(Refused, match="cannot be committed"):
        commit(worker, "second")
    if worker.table.second_buffer:
        assert generated(worker) == before
        assert (worker.policy_version, worker.state_id) == (7, "state-1")
    else:
        with pytest.raises(Refused, match="no whole weights"):
            generated(worker)
        assert worker.state_id == ""
    sources.fails_after = 100
    load(worker, "third", "state-2", 8)
    commit(worker, "third")
    assert generated(worker) != before


def test_weights_that_it_has_already_are_not_sent_again(worker: RolloutWorker, sources: Sources) -> None:
    with pytest.raises(Refused, match="does not have those of policy version 7"):
        load(worker, "none", "state-1", empty=True)
    load(worker, "first", "state-1")
    commit(worker, "first")
    before = generated(worker)
    assert "received_bytes" not in load(worker, "second", "state-1", empty=True)
    commit(worker, "second")
    assert generated(worker) == before


def test_a_session_begins_without_the_weights_of_the_one_before(
    worker: RolloutWorker, sources: Sources
) -> None:
    load(worker, "first", "state-1")
    commit(worker, "first")
    worker.begin_session(NO_ROWS, worker_pb2.BeginSessionRequest(keep_weights=True), call())
    assert worker.state_id == "state-1"
    worker.begin_session(NO_ROWS, worker_pb2.BeginSessionRequest(), call())
    assert worker.state_id == ""
    with pytest.raises(Refused, match="no whole weights"):
        generated(worker)
    with pytest.raises(InvalidRequest, match="saves no weights"):
        worker.begin_session(NO_ROWS, worker_pb2.BeginSessionRequest(directories=["/tmp/x"]), call())


def saved_qwen(directory: Path, *, tied: bool) -> Qwen2ForCausalLM:
    """A small model, saved in a directory."""
    config = Qwen2Config(
        vocab_size=70,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return model


def test_tied_weights_come_once(tmp_path: Path) -> None:
    model = saved_qwen(tmp_path, tied=True)
    wanted = whole_weights(tmp_path, torch.float32, CPU)
    assert wanted.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {each.name for each in wanted.slices()} == dict(model.named_parameters()).keys()
    assert {*wanted.layouts, *wanted.aliases} == model.state_dict().keys()


@pytest.mark.parametrize("tied", [True, False])
def test_the_shards_of_a_mesh_cover_every_element_of_the_checkpoint_once(tmp_path: Path, tied: bool) -> None:
    model = saved_qwen(tmp_path, tied=tied)
    mesh = Mesh(2, 2, 1)
    count = {name: np.zeros(x.shape, int) for name, x in model.named_parameters()}
    ends = {"model.embed_tokens.weight"} if tied else set()
    for rank in range(mesh.size):
        for each in weight_shards(tmp_path, mesh, rank, torch.float32, CPU).slices():
            count[each.name][tuple(map(slice, each.box.starts, each.box.stops))] += 1
    for name, times in count.items():
        # Not cut: one on each of two tensor ranks. Tied: one on each of two stages.
        replicas = 2 if name in ends or (times.ndim == 1 and not name.endswith("proj.bias")) else 1
        assert (times == replicas).all(), name
