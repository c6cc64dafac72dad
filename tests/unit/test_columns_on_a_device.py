"""Columns of floats stay on the device from rollout to update; what crosses to the host and back is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, Copy, Log, PretendTensors, pretending

from contract.host_devices import HostCuda
from controller.advantage.gae import gae
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Space
from nccl_transfer.registry import create_readers
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import host_id
from rlhf.contract import group_methods
from rlhf.v1 import actor_pb2, common_pb2, critic_pb2
from services.actor.worker import ActorWorker
from services.compute.microbatch import MicroBatch
from services.critic.worker import CriticWorker
from services.roles import torch_worker
from services.runtime.encoding import ResponseEncoder
from services.runtime.fetches import fetch_rows
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, Worker
from settings.actor import ActorTable
from settings.critic import CriticTable

pytestmark = pytest.mark.usefixtures("process_group")

PROMPTS = ["w3 w4", "w5", "w3 w4", "w6 w7 w8", "w9", "w5"]
NEW_TOKENS = 6
SAMPLING = actor_pb2.Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
SCHEDULE = actor_pb2.Schedule(epochs=1, mini_batches=2)
OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-4}
"""With so large an epsilon, rounding errors of a gradient of about 0 do not decide about the sign of its step."""


class OneRank:
    """An actor and a critic on one device, and the columns that they have returned."""

    def __init__(self, directory: Path, log: Log | None = None, **keys: Any) -> None:
        """On the pretend device if its log is given, else on the CPU; with further keys of both tables."""

        def table(role: str) -> dict[str, Any]:
            return {
                "role": role,
                "address": "127.0.0.1:1",
                "model": directory,
                "optimizer": OPTIMIZER,
            }

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_worker, "rank_device", lambda: DEVICE if log else torch.device("cpu"))
            self.actor = ActorWorker(ActorTable.model_validate(table("actor")), Ranks(0, 1, 0))
            self.critic = CriticWorker(CriticTable.model_validate(table("critic")), Ranks(0, 1, 0))
        device = (
            (DeviceArena(HostCuda("GPU-pretend"), 1 << 20), PretendTensors(log)) if log is not None else None
        )
        self.store = TensorStore(1 << 20, device=device)
        self.store.endpoint = Endpoint("127.0.0.1:1", host_id(), 1)
        self.fetcher = Fetcher(host_id(), create_readers(["memfd"]), self.store)
        self.columns: dict[str, Column] = {"prompt": LocalColumn(PROMPTS)}
        self.steps = 0

    def close(self) -> None:
        self.fetcher.close()
        self.store.close()

    def call(self, worker: Worker, name: str, request: Any, *names: str) -> dict[str, float]:
        """Fetches columns by name, calls a method with them, and stores those that it returns; returns its metrics."""
        self.steps += 1
        header = common_pb2.Call(call_id=f"c{self.steps}", session="s", seed=1, step=self.steps)
        call, timing = CallContext(header, time.monotonic() + 60), common_pb2.Timing()
        batch = wire.to_proto(Batch(len(PROMPTS), {name: self.columns[name] for name in names}))
        options = {"writable": worker.writes_to_rows, "on_device": worker.on_device}
        rows = fetch_rows(self.fetcher, batch, call, timing, **options)
        result = worker.around(lambda: getattr(worker, name)(rows, request, call))
        method = group_methods(worker.role)[name]
        response = ResponseEncoder(worker, self.store).encode(method, header, timing, result)
        if result.columns:
            self.columns |= wire.from_proto(response.batch).columns
        return {name: total / count for name, (total, count) in result.metrics.items()}

    def generate(self) -> None:
        request = actor_pb2.GenerateSequencesRequest(sampling=SAMPLING)
        self.call(self.actor, "generate_sequences", request, "prompt")

    def log_probs(self) -> None:
        names = ("prompt_ids", "response_ids", "rollout_log_probs")
        self.call(self.actor, "compute_log_prob", actor_pb2.ComputeLogProbRequest(temperature=1.0), *names)

    def values(self) -> None:
        request = critic_pb2.ComputeValuesRequest()
        self.call(self.critic, "compute_values", request, "prompt_ids", "response_ids")

    def advantages(self) -> None:
        """As the controller does: in host memory, from values that it has fetched."""
        ids, values = self.read("response_ids"), self.read("values")
        rewards = np.zeros(len(ids.values), np.float32)
        rewards[np.cumsum(ids.lengths) - 1] = [
            row.mean() / 61 for row in np.split(ids.values, ids.offsets[1:-1])
        ]
        advantages, returns = gae(Jagged(rewards, ids.lengths), values, gamma=1.0, lam=0.95)
        for name, column in (("advantages", advantages), ("returns", returns)):
            self.columns[name] = LocalColumn(Jagged(column.values.astype(np.float32), column.lengths))

    def read(self, name: str) -> Jagged[np.ndarray]:
        """A column in host memory."""
        batch = Batch(len(PROMPTS), {name: self.columns[name]})
        values: Any = self.fetcher.fetch(batch, time.monotonic() + 60)[name]
        assert isinstance(values, Jagged)
        return values

    def move(self, name: str) -> None:
        """Moves a column of the host to the device."""
        assert self.store.device is not None
        column = self.read(name)
        tensor = torch.from_numpy(column.values.copy()).to(DEVICE)
        self.columns[name] = self.store.device.put_column(Jagged(tensor, column.lengths), Lease("s", 1))

    def is_on_device(self, name: str) -> bool:
        column = self.columns[name]
        return isinstance(column, RemoteColumn) and {x.space for x in column.shards} == {Space.DEVICE}

    def update_critic(self) -> dict[str, float]:
        request = critic_pb2.UpdateCriticRequest(loss=critic_pb2.ValueLoss(), schedule=SCHEDULE)
        names = ("prompt_ids", "response_ids", "values", "returns")
        return self.call(self.critic, "update_critic", request, *names)

    def update_actor(self) -> dict[str, float]:
        loss = actor_pb2.PolicyLoss(entropy_coefficient=0.01)
        request = actor_pb2.UpdateActorRequest(loss=loss, schedule=SCHEDULE, temperature=1.0)
        names = ("prompt_ids", "response_ids", "rollout_log_probs", "log_probs", "advantages")
        return self.call(self.actor, "update_actor", request, *names)

    def iteration(self) -> list[dict[str, float]]:
        """One iteration of PPO; returns the metrics of the updates."""
        self.generate()
        self.log_probs()
        self.values()
        self.advantages()
        return [self.update_critic(), self.update_actor()]


def columns_among(copies: list[Copy]) -> list[Copy]:
    """Copies of floats that are more than the metrics of an update."""
    return [copy for copy in copies if copy.dtype.is_floating_point and copy.numel > 12]


@pytest.fixture(scope="module")
def pretend(process_group: None, tiny_llama_dir: Path) -> Iterator[tuple[OneRank, Log]]:
    """Ranks on a pretend device, which have generated once: their rollout engine has weights."""
    with pretending() as log:
        ranks = OneRank(tiny_llama_dir, log)
        ranks.generate()
        yield ranks, log
        ranks.close()


def check_numbers(on_cpu: OneRank, on_device: OneRank) -> None:
    """An iteration of PPO has the same numbers on both, and so has a generation with the new weights."""
    on_cpu.generate()
    for expected, measured in zip(on_cpu.iteration(), on_device.iteration(), strict=True):
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for ranks in (on_cpu, on_device):
        ranks.generate()  # with the new weights
    ids, other_ids = (ranks.read("response_ids").values.tolist() for ranks in (on_cpu, on_device))
    assert ids == other_ids
    for worker, other in ((on_cpu.actor, on_device.actor), (on_cpu.critic, on_device.critic)):
        expected = dict(worker.engine.full_tensors())
        for name, x in other.engine.full_tensors():
            assert x.device == DEVICE
            np.testing.assert_allclose(np.array(x.tolist()), expected[name].detach(), rtol=1e-3, atol=1e-4)
    on_cpu.close()


MINI_BATCHES = SCHEDULE.epochs * SCHEDULE.mini_batches
BUDGETS = {
    # Prompts and random numbers, and the places of the response tokens; lengths, and the token ids.
    "generate": (2, 2),
    # The layout of all micro-batches; the differences to the rollout engine, three numbers.
    "log_probs": (1, 1),
    "values": (1, 0),
    # Of each mini-batch, the layout of its micro-batches; its metrics.
    "update_critic": (MINI_BATCHES, MINI_BATCHES),
    "update_actor": (MINI_BATCHES, MINI_BATCHES),
}
"""Copies of each call to the device and to the host, where all columns of floats are on the device."""


def check_budgets(ranks: OneRank, log: Log) -> None:
    """No column of floats crosses between host and device, but for those of the host, and no copy is beyond BUDGETS."""

    def check(name: str, extra: int = 0) -> None:
        log.clear()
        getattr(ranks, name)()
        assert columns_among(log.to_device) == columns_among(log.to_host) == []
        to_device, to_host = BUDGETS[name]
        assert (len(log.to_device), len(log.to_host)) == (to_device + extra, to_host), f"{name}: {log}"

    copied_bytes = ranks.store.stat().host_copied_bytes
    for name in ("generate", "log_probs", "values"):
        check(name)
    assert len(log.waits) <= 2 * MINI_BATCHES, log.waits
    for name in ("values", "log_probs", "rollout_log_probs"):
        assert ranks.is_on_device(name)
    assert not ranks.is_on_device("response_ids")
    assert ranks.store.stat().host_copied_bytes == copied_bytes
    ranks.advantages()
    assert ranks.store.stat().host_copied_bytes == copied_bytes + ranks.columns["values"].nbytes
    copied_bytes = ranks.store.stat().host_copied_bytes
    check("update_critic", extra=1)  # all columns of the host reach the update in one copy
    for name in ("advantages", "returns"):
        ranks.move(name)
    for name in ("update_critic", "update_actor"):
        check(name)
        assert len(log.waits) <= 2 * MINI_BATCHES, log.waits
    assert ranks.store.stat().host_copied_bytes == copied_bytes


def test_ppo_on_a_device_ends_with_the_numbers_of_the_cpu(
    tiny_llama_dir: Path, pretend: tuple[OneRank, Log]
) -> None:
    check_numbers(OneRank(tiny_llama_dir), pretend[0])


def test_from_rollout_to_update_no_column_of_floats_leaves_the_device(pretend: tuple[OneRank, Log]) -> None:
    check_budgets(*pretend)


@pytest.mark.slow
def test_so_it_is_with_engine_3d(process_group: None, tiny_llama_dir: Path) -> None:
    keys: dict[str, Any] = {"engine": "3d", "mesh": "1-1-1"}
    with pretending() as log:
        ranks = OneRank(tiny_llama_dir, log, **keys)
        ranks.generate()
        check_budgets(ranks, log)
        ranks.close()
        ranks = OneRank(tiny_llama_dir, log, **keys)
        ranks.generate()
        check_numbers(OneRank(tiny_llama_dir, **keys), ranks)
        ranks.close()


def test_a_generation_copies_token_ids_and_waits_once_per_token(pretend: tuple[OneRank, Log]) -> None:
    ranks, log = pretend
    log.clear()
    ranks.generate()
    assert (len(log.to_device), len(log.to_host)) == BUDGETS["generate"]
    assert {copy.dtype for copy in log.to_host} == {torch.int64}
    assert len(log.waits) <= 2 * NEW_TOKENS


def test_a_planted_copy_on_the_way_is_seen(
    pretend: tuple[OneRank, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, log = pretend
    collect = MicroBatch.collect
    monkeypatch.setattr(MicroBatch, "collect", lambda self, x_BR: collect(self, x_BR).cpu().to(DEVICE))
    log.clear()
    ranks.values()
    assert len(columns_among(log.to_host)) == 1
