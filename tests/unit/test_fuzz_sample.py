"""Random calls to every RPC of every role, in this process: none ends in a way that the contract does not allow, or
changes what the ranks compute afterwards. `make fuzz` sends many more, to services in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvloop
from chaos.fuzzing import Fuzzer, Results
from chaos.moving import moved, place_of
from chaos.shots import Service, Shot, rpcs
from chaos.targets import begin_session
from chaos.valid_requests import valid_requests
from transformers import LlamaConfig, LlamaForSequenceClassification

from integration import harness
from nccl_transfer.refs.batch import Batch
from rlhf.contract import SERVICES
from rlhf.v1 import common_pb2, worker_pb2
from services.actor.worker import ActorWorker
from services.critic.worker import CriticWorker
from services.reference.worker import ReferenceWorker
from services.reward.model import LearningRewardWorker
from services.reward.worker import RewardWorker
from services.rollout_service.worker import RolloutWorker
from services.runtime.ranks import Ranks
from services.runtime.server import RankServer
from services.runtime.worker import Worker
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.reference import ReferenceTable
from settings.reward import RewardTable
from settings.rollout import RolloutServiceTable

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(180)]

CALLS, REQUESTS = 4_700, 5_000
"""Some calls have several requests."""
SEED = 20261123
"""The same calls every time; `make fuzz` draws others."""
WORDS = ("w3", "w5", "w7", "w9", "w11")
TIMEOUT_S = 30.0
GROWTH = 64 << 20
"""Most bytes by which resident memory of this process may grow after the first half of the calls."""
MOST_MEMORY = 8 << 30
"""Bytes of address space that the calls may take: a claim of more fails, and not the machine."""

ROLES: dict[str, tuple[str, type[Worker], Any, dict[str, Any]]] = {
    "actor": ("actor", ActorWorker, ActorTable, {"micro_batch_tokens": 64}),
    "critic": ("critic", CriticWorker, CriticTable, {"micro_batch_tokens": 64}),
    "reference": ("reference", ReferenceWorker, ReferenceTable, {"micro_batch_tokens": 64}),
    "reward": ("reward", RewardWorker, RewardTable, {"function": "exact_match"}),
    "rollout": ("rollout", RolloutWorker, RolloutServiceTable, {}),
    "scorer": ("reward", LearningRewardWorker, RewardTable, {"kind": "model", "optimizer": {"learning_rate": 1e-3}}),
}  # fmt: skip
"""Of each service: its role, worker, and what its table has beside a model."""
RESULTS: dict[str, tuple[str, str]] = {
    "actor": ("compute_log_prob", "log_probs"),
    "critic": ("compute_values", "values"),
    "reference": ("compute_ref_log_prob", "ref_log_probs"),
    "scorer": ("compare_pairs", "chosen_scores"),
}
"""Of each service with a model: a method and a column of its rows."""


@pytest.fixture(scope="module")
def scorer_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, initializer_range=0.25,
    )  # fmt: skip
    config.num_labels = 1
    path = tmp_path_factory.mktemp("scorer")
    LlamaForSequenceClassification(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@contextlib.contextmanager
def no_more_memory_than(nbytes: int) -> Iterator[None]:
    """Context manager that limits how far the address space of this process grows in the block, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.asynccontextmanager
async def serving(workers: Mapping[str, Worker], root: Path) -> AsyncIterator[list[Service]]:
    """Serves the ranks in the running loop, and yields them once they listen."""
    for name, worker in workers.items():
        worker.service = name
    servers = {name: RankServer(worker) for name, worker in workers.items()}
    running = [asyncio.ensure_future(server.serve()) for server in servers.values()]
    try:
        for name, worker in workers.items():
            there = partial(harness.is_listening, worker.table.address)
            await asyncio.to_thread(harness.wait_until, there, TIMEOUT_S, name)
        yield [
            Service(
                name,
                worker.role,
                (worker.table.address,),
                worker.ranks.epoch,
                root,
                valid_requests(worker.role, WORDS),
            )
            for name, worker in workers.items()
        ]
    finally:
        for server in servers.values():
            server._stop.set()
        await asyncio.wait_for(asyncio.gather(*running), TIMEOUT_S)


def computed(services: list[Service]) -> dict[str, Any]:
    """Computes, in a new session of each service with a model, from the weights of its directory."""
    found: dict[str, Any] = {}
    for service in services:
        client = harness.Service(service.role, service.addresses[0])
        try:
            begin_session(client, take_over=True)
            if service.name in RESULTS:
                method, column = RESULTS[service.name]
                rows, options = service.valid[method]
                assert isinstance(rows, Batch)
                values = client.column(method, rows, column, **options)
                found[service.name] = getattr(values, "values", values).tolist()
            elif service.role == "rollout":
                (found[service.name],) = client.versions  # it has no weights to compute with
            else:
                (answer,) = client.call("compute_reward", **service.valid["compute_reward"][1])
                found[service.name] = [score.score for score in answer.scores]
        finally:
            client.close()
    return found


async def fuzz(workers: Mapping[str, Worker], directory: Path, seed: int) -> tuple[Results, list[Any]]:
    """Sends the calls; returns how they ended, and before, in the middle and after them: resident bytes, threads, and
    the numbers that the services compute."""
    states = []

    async def note() -> None:
        numbers = await asyncio.wait_for(asyncio.to_thread(computed, services), TIMEOUT_S)
        states.append((psutil.Process().memory_info().rss, threading.active_count(), numbers))

    async with serving(workers, directory) as services:
        async with Fuzzer(services, seed, directory / "bad", at_once=32, longest_s=0.3) as fuzzer:
            await note()
            for half in range(2):
                await fuzzer.run(CALLS // 2, first=half * CALLS // 2)
                await note()
        return fuzzer.results, states


def test_five_thousand_random_requests_leave_every_role_as_it_was(
    tiny_llama_dir: Path, scorer_dir: Path, tmp_path: Path
) -> None:
    seed = int(os.environ.get("FUZZ_SEED", SEED))
    print(f"FUZZ_SEED={seed}", flush=True)
    ports = harness.free_ports(len(ROLES))
    models = dict.fromkeys(("actor", "critic", "reference", "rollout"), tiny_llama_dir) | {
        "scorer": scorer_dir
    }
    workers = {}
    for port, (name, (role, worker, table, more)) in zip(ports, ROLES.items(), strict=True):
        given = {"role": role, "address": f"127.0.0.1:{port}", "arena_mb": 16, **more}
        if name in models:
            given["model"] = models[name]
        workers[name] = worker(table.model_validate(given), Ranks(0, 1, 1))
    with no_more_memory_than(MOST_MEMORY):
        results, (before, middle, after) = uvloop.run(fuzz(workers, tmp_path, seed))
    results.check()
    print(results.requests, dict(results.codes), [state[:2] for state in (before, middle, after)], flush=True)
    assert before[2] == middle[2] == after[2]
    assert after[0] - middle[0] < GROWTH
    served = {rpc.path for worker in workers.values() for rpc in rpcs(worker.role)}
    assert results.requests >= REQUESTS
    assert results.paths.keys() == served


def test_a_saved_call_is_moved_to_services_of_another_start(tmp_path: Path) -> None:
    """Bytes that are no request stay as they are."""
    before, now = (
        Service("critic", "critic", (f"127.0.0.1:{port}",), epoch, tmp_path / str(epoch), {})
        for port, epoch in ((1001, 77), (1002, 99))
    )
    place, dispatch = json.loads(json.dumps(place_of(before))), SERVICES["worker"]["Dispatch"]
    save, begun = SERVICES["worker"]["SaveCheckpoint"], place["unix_ns"] - 5
    inner = worker_pb2.SaveCheckpointRequest(
        call=common_pb2.Call(epoch=77, session_started_unix_ns=begun), directory=f"{before.root}/x"
    )
    message = worker_pb2.DispatchRequest(method=save.path, request=inner.SerializeToString(), timeout_s=1)
    sent = (message.SerializeToString(), b"\x0b")
    shot = Shot("critic", (0,), dispatch.path, sent, streams=True, timeout_s=1.0, cancel_after_s=None)
    again = moved(Shot.from_json(json.loads(json.dumps(shot.to_json()))), place, now)
    assert again.messages[1] == sent[1]
    message.ParseFromString(again.messages[0])
    inner.ParseFromString(message.request)
    assert (inner.call.epoch, inner.directory) == (99, f"{now.root}/x")
    assert begun < inner.call.session_started_unix_ns <= time.time_ns()
