"""Weights of an actor in rollout services of other meshes and engines: every bit, and no byte more than is lacking."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import results
from controller.role_groups.roles import RolloutGroup
from controller.role_groups.weights import sync_weights
from integration.harness import HUGGING_FACE, Processes, free_ports, write_config
from integration.weight_services import WeightServices, write_model
from rlhf.errors import Refused
from rlhf.v1 import actor_pb2

PARITY = 1e-4
TIMEOUT_S = 120.0
PROMPTS = FutureBatch.of(prompt=["1+1=", "12", "7*3=", "a", "99+1", "5", "abc", "0-0"])
SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=6)
GREEDY = actor_pb2.Sampling(greedy=True, max_new_tokens=6)
ONCE = actor_pb2.Schedule(epochs=1, mini_batches=1)
DUMPING = "integration.dumping_rollout:ROLE"
WITHOUT_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
FULL = [pytest.mark.full, pytest.mark.timeout(500)]


@dataclass(frozen=True)
class Pair:
    """An actor and a rollout service, as keys of their tables, and whether their model's embedding is tied."""

    actor: dict[str, Any]
    rollout: dict[str, Any]
    tied: bool = False


def mesh(name: str, **keys: Any) -> dict[str, Any]:
    pipeline, tensor, data = map(int, name.split("-"))
    return {"mesh": name, "ranks": pipeline * tensor * data, **keys}


PAIRS = [
    pytest.param(
        Pair({"engine": "fsdp", "ranks": 4}, mesh("1-2-1"), tied=True),
        id="fsdp 4 to 1-2-1",
        marks=FULL,
    ),
    pytest.param(
        Pair({"engine": "zero", "ranks": 2}, {"ranks": 1, "second_buffer": False}),
        id="zero 2 to hf 1",
        marks=pytest.mark.slow,
    ),
    pytest.param(Pair(mesh("1-4-2", engine="3d"), mesh("1-2-2")), id="1-4-2 to 1-2-2", marks=FULL),
    pytest.param(
        Pair(mesh("2-2-2", engine="3d"), mesh("1-1-4", second_buffer=False), tied=True),
        id="2-2-2 to 1-1-4",
        marks=FULL,
    ),
    pytest.param(
        Pair(mesh("2-1-1", engine="3d"), mesh("2-2-1", second_buffer=False), tied=True),
        id="2-1-1 to 2-2-1 in place",
        marks=FULL,
    ),
    pytest.param(
        Pair(
            mesh("2-2-1", engine="3d", rollout_engine="hf"),
            mesh("1-2-1", rollout_engine="vllm", vllm={"kv_cache_gb": 0.25}, startup_timeout_s=240.0),
        ),
        id="3d to vllm 2",
        marks=[*FULL, WITHOUT_VLLM],
    ),
]


class Services(WeightServices):
    """An actor and a rollout service that run, and a controller in this process."""

    def __init__(self, directory: Path, pair: Pair, processes: Processes) -> None:
        self.directory, self.processes = directory, processes
        write_model(
            directory / "model",
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_key_value_heads=4,
            head_dim=32,
            tie_word_embeddings=pair.tied,
        )
        common = {"model": directory / "model", "output_roots": [directory]}
        ports = free_ports(2)
        self.config = Config.model_validate(
            {
                "run": {"directory": directory / "runs", "call_timeout_s": 60.0},
                "data": dict.fromkeys(("train", "heldout"), directory / "none.jsonl"),
                "rollout": {"max_response_tokens": 8},
                "services": {
                    "actor": {
                        "role": "actor",
                        "address": f"127.0.0.1:{ports[0]}",
                        "optimizer": {"learning_rate": 1e-2},
                        **common,
                        **pair.actor,
                    },
                    "rollout": {
                        "role": DUMPING,
                        "address": f"127.0.0.1:{ports[1]}",
                        **common,
                        **pair.rollout,
                    },
                },
            }
        )
        path = write_config(self.config, directory / "services.toml")
        processes.serve(path, directory / "logs", timeout_s=280.0)
        super().__init__(Cluster(self.config, Session(seed=3, timeout_s=60.0, save_timeout_s=60.0)))

    def train(self) -> None:
        """One step on what the actor generates: its weights are no longer those of any directory."""
        rows = self.actor.generate_sequences(PROMPTS, SAMPLING)
        results(self.actor.update_supervised(rows, ONCE).calls, TIMEOUT_S)

    def exported(self) -> dict[str, torch.Tensor]:
        """The actor's weights by name, as it exports them."""
        directory = self.directory / "exported"
        results(self.actor.save_checkpoint(str(directory), HUGGING_FACE).calls, TIMEOUT_S)
        return {name: x for path in directory.glob("*.safetensors") for name, x in load_file(path).items()}

    def sync(self) -> tuple[float, list[int]]:
        """Bytes that a sync has moved, and those into each rank of the rollout service."""
        batch = sync_weights(self.actor, [self.rollout])
        (whole,) = results(batch.calls, TIMEOUT_S)
        loads = [record for record in whole.parts if record.method == "load_weights"]
        into = [response.received_bytes for record in loads for response in record.responses]
        return whole.metrics["weights_bytes"], into

    def dumps(self) -> list[dict[str, tuple[tuple[int, ...], torch.Tensor]]]:
        """Per rank, the first index and the values of each slice that it generates with."""
        ranks = range(self.config.services["rollout"].ranks)
        return [torch.load(self.directory / "dumps" / f"rollout-{rank}.pt") for rank in ranks]

    def farthest(self) -> float:
        """The largest difference between log-probabilities of the rollout service and of the actor, in nats."""
        rows = self.rollout.generate_sequences(PROMPTS, SAMPLING)
        computed = self.actor.compute_log_prob(rows, 1.0)
        (record,) = computed.records(TIMEOUT_S)
        tokens = max(response.parity.tokens for response in record.responses)
        assert tokens > 0
        return max(response.parity.max_abs for response in record.responses)


@pytest.fixture(params=PAIRS)
def services(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Services]:
    if request.param.actor.get("engine") == "zero":
        pytest.importorskip("deepspeed")
    processes = Processes()
    made = None
    try:
        made = Services(tmp_path, request.param, processes)
        made.cluster.connect()
        yield made
    finally:
        if made is not None:
            made.close()
        processes.kill()


def refused(calls: tuple[Future[Any], ...]) -> str:
    with pytest.raises(Refused) as raised:
        results(calls, TIMEOUT_S)
    return str(raised.value)


def test_a_rollout_service_gets_the_bits_that_it_lacks_and_no_byte_more(services: Services) -> None:
    assert "no whole weights" in refused(services.rollout.generate_sequences(PROMPTS, GREEDY).calls)
    services.train()
    moved, into = services.sync()
    exported, dumps = services.exported(), services.dumps()
    assert into == [sum(values.nbytes for _, values in dump.values()) for dump in dumps]
    assert moved == sum(into)
    covered = {name: np.zeros(x.shape, bool) for name, x in exported.items()}
    for dump in dumps:
        for name, (offsets, values) in dump.items():
            box = tuple(slice(first, first + n) for first, n in zip(offsets, values.shape, strict=True))
            assert torch.equal(values, exported[name][box]), name
            covered[name][box] = True
    assert all(whole.all() for name, whole in covered.items() if name != "lm_head.weight" or name in dumps[0])
    assert services.farthest() < PARITY
    # The same weights again move nothing, and those of another version all.
    assert services.sync() == (0.0, [])
    results(services.rollout.verify_weights().calls, TIMEOUT_S)
    services.train()
    assert services.sync() == (moved, into)
    assert services.farthest() < PARITY
    # The actor's own ranks serve the role too, and take no weights.
    own = services.actor.in_role(RolloutGroup, "rollout")
    assert sync_weights(services.actor, [own]).records(TIMEOUT_S)[0].metrics["weights_bytes"] == 0
    rows = own.generate_sequences(PROMPTS, GREEDY)
    assert rows.result(["response_ids"], TIMEOUT_S).rows == PROMPTS.rows
    assert "that it trains" in refused(own.call("commit_weights", transfer="any").calls)
