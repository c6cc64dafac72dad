"""vLLM in the ranks of an actor without a mesh of training, which generate two together, with shards of the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from controller.config.config import Config
from integration.harness import Cluster, Processes, Service, free_ports, leaked_shared_memory, wait_for_line
from integration.test_rollout_vllm import PARITY, PROMPTS, SAMPLING, SEQUENCES, SIZES, generate, update, write

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
    ),
]

START_TIMEOUT_S, PATIENCE_S = 240.0, 100.0
ACTORS: dict[str, dict[str, Any]] = {
    "fsdp": {"ranks": 2, "generation_mesh": "1-2-1"},
    "fsdp-4": {"ranks": 4, "generation_mesh": "1-2-2"},
    "zero-3": {"ranks": 2, "generation_mesh": "1-2-1", "engine": "zero", "zero": {"stage": 3}},
}


@pytest.fixture(scope="module", params=list(ACTORS))
def actor(
    request: pytest.FixtureRequest, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    if request.param == "zero-3":
        pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("vllm")
    tables = config.model_dump(mode="json", exclude_unset=True)
    own = {"rollout_engine": "vllm", "vllm": SIZES, "startup_timeout_s": 200.0}
    address = {"address": f"127.0.0.1:{free_ports(1)[0]}"}
    table = {**tables["services"]["actor"], **own, **ACTORS[request.param], **address}
    services = {"actor": table, "reward": tables["services"]["reward"]}
    chosen = Config.model_validate({**tables, "services": services})
    processes, before = Processes(), leaked_shared_memory()
    try:
        path = write(chosen, directory / "services.toml")
        arguments = ("up", str(path), "--only", "actor", "--log-dir", str(directory / "logs"))
        wait_for_line(processes.start("rlhf-deploy", *arguments), "ready\n", START_TIMEOUT_S)
        assert not {name for name in leaked_shared_memory() - before if "rlhf" in name}
        with Cluster(chosen, {}, processes).service("actor") as service:
            yield service
    finally:
        processes.kill()


def test_log_probs_of_tensor_ranks_equal_those_of_training_after_every_update(actor: Service) -> None:
    previous = np.empty(0)
    for _ in range(3):
        made = generate(actor, timeout_s=PATIENCE_S)
        assert made.rows == PROMPTS.rows
        rollout = actor.values(made, "rollout_log_probs")
        recomputed = actor.column(
            "compute_log_prob", made.select(SEQUENCES), "log_probs", temperature=SAMPLING.temperature
        )
        np.testing.assert_allclose(rollout.values, recomputed.values, rtol=0, atol=PARITY)
        assert not np.array_equal(rollout.values, previous), "the update must have an effect"
        previous = rollout.values
        update(actor, made)


def test_a_session_that_starts_over_generates_the_same_rows_again(actor: Service) -> None:
    def said() -> list[int]:
        actor.call("begin_session")
        return actor.values(generate(actor, timeout_s=PATIENCE_S), "response_ids").values.tolist()

    first = said()
    update(actor, generate(actor, timeout_s=PATIENCE_S))
    assert said() == first
