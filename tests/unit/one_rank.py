"""An actor and a critic of one rank each in this process: methods are called as ranks call them, without RPCs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, Log, PretendTensors

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
from services.critic.worker import CriticWorker
from services.roles import torch_worker
from services.runtime.encoding import ResponseEncoder
from services.runtime.fetches import fetch_rows
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, Worker
from settings.actor import ActorTable
from settings.critic import CriticTable

PROMPTS = ["w3 w4", "w5", "w3 w4", "w6 w7 w8", "w9", "w5"]
NEW_TOKENS = 6
SAMPLING = actor_pb2.Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
SCHEDULE = actor_pb2.Schedule(epochs=1, mini_batches=2)
OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-4}
"""With so large an epsilon, rounding errors of a gradient of about 0 do not decide about the sign of its step."""


class OneRank:
    """An actor and a critic on one device, and the columns that they have returned."""

    def __init__(
        self, directory: Path, log: Log | None = None, *, actor: dict[str, Any] | None = None, **keys: Any
    ) -> None:
        """On the pretend device if its log is given, else on the CPU; `actor` has further keys of the actor's table,
        and `keys` are those of both tables."""

        def table(role: str) -> dict[str, Any]:
            return {
                "role": role,
                "address": "127.0.0.1:1",
                "model": directory,
                "optimizer": OPTIMIZER,
                "kernels": "eager",  # none can be compiled for a pretend device
                "matmul": "mkl",  # "auto" measures for each worker, and may choose otherwise for the next
                **keys,
            }

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_worker, "rank_device", lambda: DEVICE if log else torch.device("cpu"))
            self.actor = ActorWorker(
                ActorTable.model_validate(table("actor") | (actor or {})), Ranks(0, 1, 0)
            )
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
