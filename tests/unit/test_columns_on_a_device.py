"""Columns of floats stay on the device from rollout to update; what crosses to the host and back is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, Copy, Log, pretending

from controller.advantage.gae import gae
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import FetchedRows
from rlhf.v1 import actor_pb2, common_pb2, critic_pb2
from services.actor.worker import ActorWorker
from services.compute.microbatch import MicroBatch
from services.critic.worker import CriticWorker
from services.roles import torch_worker
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallRows, Worker
from settings.actor import ActorTable
from settings.critic import CriticTable

pytestmark = pytest.mark.usefixtures("process_group")

PROMPTS = ["w3 w4", "w5", "w3 w4", "w6 w7 w8", "w9", "w5"]
NEW_TOKENS = 6
SAMPLING = actor_pb2.Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
SCHEDULE = actor_pb2.Schedule(epochs=1, mini_batches=2)
OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-4}
"""With so large an epsilon, rounding errors of a gradient of about 0 do not decide about the sign of its step."""
Columns = dict[str, Any]


class OneRank:
    """An actor and a critic on one device, and the columns that they have returned."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        def table(role: str) -> dict[str, Any]:
            return {
                "role": role,
                "address": "127.0.0.1:1",
                "model": directory,
                "optimizer": OPTIMIZER,
            }

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_worker, "rank_device", lambda: device)
            self.actor = ActorWorker(ActorTable.model_validate(table("actor")), Ranks(0, 1, 0))
            self.critic = CriticWorker(CriticTable.model_validate(table("critic")), Ranks(0, 1, 0))
        self.columns: Columns = {"prompt": PROMPTS}
        self.steps = 0

    def call(self, worker: Worker, method: str, request: Any, *names: str) -> dict[str, float]:
        """Calls a method with columns by name and keeps those that it returns; returns its metrics."""
        self.steps += 1
        call = CallContext(
            common_pb2.Call(call_id=f"c{self.steps}", seed=1, step=self.steps), time.monotonic() + 60
        )
        values = {name: self.columns[name] for name in names}
        dtypes = {name: _dtype(each) for name, each in values.items() if not isinstance(each, list)}
        rows = CallRows(FetchedRows(len(PROMPTS), values, dtypes, 0), np.arange(len(PROMPTS)))
        result = worker.around(lambda: getattr(worker, method)(rows, request, call))
        self.columns |= {name: _stored(each) for name, each in result.columns.items()}
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
        ids, values = self.columns["response_ids"], on_host(self.columns["values"])
        rewards = np.zeros(len(ids.values), np.float32)
        rewards[np.cumsum(ids.lengths) - 1] = [
            row.mean() / 61 for row in np.split(ids.values, ids.offsets[1:-1])
        ]
        advantages, returns = gae(Jagged(rewards, ids.lengths), values, gamma=1.0, lam=0.95)
        for name, column in (("advantages", advantages), ("returns", returns)):
            self.columns[name] = Jagged(column.values.astype(np.float32), column.lengths)

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


def _dtype(values: Any) -> str:
    array = values.values if isinstance(values, Jagged) else values
    return str(array.dtype).removeprefix("torch.")


def _stored(values: Any) -> Any:
    """A column as the store of a rank with a device arena returns it: floats where they are, ids in host memory."""
    if isinstance(values, list) or not isinstance(values.values, torch.Tensor):
        return values
    tensor = values.values
    if tensor.is_floating_point():
        return Jagged(tensor.clone(), values.lengths)
    assert tensor.device.type == "cpu", "token ids leave a rank in host memory"
    return Jagged(tensor.numpy(), values.lengths)


def on_host(column: Jagged[Any]) -> Jagged[np.ndarray]:
    values = column.values
    return Jagged(values.cpu().numpy() if isinstance(values, torch.Tensor) else values, column.lengths)


def columns_among(copies: list[Copy]) -> list[Copy]:
    """Copies of floats that are more than the metrics of an update."""
    return [copy for copy in copies if copy.dtype.is_floating_point and copy.numel > 12]


@pytest.fixture(scope="module")
def pretend(process_group: None, tiny_llama_dir: Path) -> Iterator[tuple[OneRank, Log]]:
    """Ranks on a pretend device, which have generated once: their rollout engine has weights."""
    with pretending() as log:
        ranks = OneRank(tiny_llama_dir, DEVICE)
        ranks.generate()
        yield ranks, log


def test_ppo_on_a_device_ends_with_the_numbers_of_the_cpu(
    tiny_llama_dir: Path, pretend: tuple[OneRank, Log]
) -> None:
    on_device, _ = pretend
    on_cpu = OneRank(tiny_llama_dir, torch.device("cpu"))
    on_cpu.generate()
    for expected, measured in zip(on_cpu.iteration(), on_device.iteration(), strict=True):
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for ranks in (on_cpu, on_device):
        ranks.generate()  # with the new weights
    ids, other_ids = (ranks.columns["response_ids"].values.tolist() for ranks in (on_cpu, on_device))
    assert ids == other_ids
    for worker, other in ((on_cpu.actor, on_device.actor), (on_cpu.critic, on_device.critic)):
        expected = dict(worker.engine.full_tensors())
        for name, x in other.engine.full_tensors():
            assert x.device == DEVICE
            np.testing.assert_allclose(np.array(x.tolist()), expected[name].detach(), rtol=1e-3, atol=1e-4)


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


def test_from_rollout_to_update_no_column_of_floats_leaves_the_device(pretend: tuple[OneRank, Log]) -> None:
    ranks, log = pretend

    def check(name: str, extra: int = 0) -> None:
        log.clear()
        getattr(ranks, name)()
        assert columns_among(log.to_device) == columns_among(log.to_host) == []
        to_device, to_host = BUDGETS[name]
        assert (len(log.to_device), len(log.to_host)) == (to_device + extra, to_host), f"{name}: {log}"

    for name in ("generate", "log_probs", "values"):
        check(name)
    assert len(log.waits) <= 2 * MINI_BATCHES, log.waits
    for name in ("values", "log_probs", "rollout_log_probs"):
        assert ranks.columns[name].values.device == DEVICE
    ranks.advantages()
    check("update_critic", extra=1)  # all columns of the host reach the update in one copy
    for name in ("advantages", "returns"):
        column = ranks.columns[name]
        ranks.columns[name] = Jagged(torch.from_numpy(column.values).to(DEVICE), column.lengths)
    for name in ("update_critic", "update_actor"):
        check(name)
        assert len(log.waits) <= 2 * MINI_BATCHES, log.waits


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
