"""vLLM in the actor's ranks: a whole run, and ranks that generate each for itself or two together."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from transformers import AutoModelForCausalLM

from controller.config.config import Config
from controller.tracking.metrics import each_sample, read_metrics
from integration.conftest import Task
from integration.harness import (
    POLICY_LOSS,
    TWO_STEPS,
    Cluster,
    Processes,
    Service,
    free_ports,
    jagged,
    leaked_shared_memory,
)
from integration.listeners import assert_closed
from nccl_transfer.refs.batch import Batch
from rlhf.errors import CallCancelled
from rlhf.v1 import actor_pb2, worker_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
    ),
]

START_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 30.0
STEPS = 2
PARITY = 1e-4
SIZES = {"kv_cache_gb": 0.25}
ACTOR: dict[str, Any] = {"vllm": SIZES}
PAIRED_ACTOR: dict[str, Any] = {
    "rollout_sleep": True,
    "vllm": {**SIZES, "engine_args": {"max_num_batched_tokens": 2048}},
}
PAIRS: dict[str, dict[str, Any]] = {
    "fsdp": {**PAIRED_ACTOR, "ranks": 2, "generation_mesh": "1-2-1"},
    "3d": {**PAIRED_ACTOR, "engine": "3d", "ranks": 4, "mesh": "2-2-1", "generation_mesh": "1-2-2-1"},
}
ACTORS = ("actor", "paired_actor")
OTHERS = ("critic", "reference", "reward")
SAMPLING = actor_pb2.Sampling(temperature=0.7, max_new_tokens=6)
SEQUENCES = ("prompt_ids", "response_ids")
PROMPTS = Batch.of(prompt=["1", "12+3=", "99+99=", "7+7", "55+5="] * 3)


def write(config: Config, path: Path) -> Path:
    """Fields set in the config, as a TOML file."""
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture(scope="module", params=["fsdp", pytest.param("3d", marks=pytest.mark.full)])
def up(
    request: pytest.FixtureRequest, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """`actor` on two ranks that have rows of their own; `paired_actor`, whose ranks train with shards, or in stages,
    and generate in pairs, and whose vLLM sleeps while it trains; and the others."""
    directory = tmp_path_factory.mktemp("vllm")
    tables = config.model_dump(mode="json", exclude_unset=True)
    given = dict(zip(ACTORS, (ACTOR, PAIRS[request.param]), strict=True))
    services = {
        name: {**tables["services"]["actor"], "rollout_engine": "vllm", "startup_timeout_s": 200.0, **table}
        for name, table in given.items()
    } | {name: tables["services"][name] for name in OTHERS}
    for table, port in zip(services.values(), free_ports(len(services)), strict=True):
        table["address"] = f"127.0.0.1:{port}"
    config = Config.model_validate({**tables, "services": services})
    processes, before = Processes(), leaked_shared_memory()
    try:
        path = write(config, directory / "services.toml")
        started = processes.serve(path, directory / "logs", timeout_s=START_TIMEOUT_S)
        assert not {name for name in leaked_shared_memory() - before if "rlhf" in name}
        yield Cluster(config, {}, processes)
        started.terminate()
        assert started.wait(STOP_TIMEOUT_S) == 0
    finally:
        processes.kill()


@pytest.fixture(params=ACTORS)
def actor(request: pytest.FixtureRequest, up: Cluster) -> Iterator[Service]:
    with up.service(request.param) as service:
        yield service


def generate(service: Service, prompts: Batch = PROMPTS, **options: Any) -> Batch:
    return service.rows("generate_sequences", prompts, sampling=SAMPLING, **options)


def update(service: Service, made: Batch) -> None:
    """A PPO update on what was made, with random advantages."""
    log_probs = service.values(made, "rollout_log_probs")
    drawn = np.random.default_rng(0).normal(size=len(log_probs.values)).astype(np.float32)
    rows = Batch.of(
        **{name: service.values(made, name) for name in SEQUENCES},
        log_probs=log_probs,
        advantages=jagged(np.split(drawn, np.cumsum(log_probs.lengths)[:-1]), np.float32),
    )
    service.call("update_actor", rows, loss=POLICY_LOSS, schedule=TWO_STEPS, temperature=SAMPLING.temperature)


@pytest.mark.slow
def test_vllm_listens_on_the_configured_hosts_alone(up: Cluster) -> None:
    assert_closed(up.processes.living(), up.config)


def test_the_engine_and_what_it_cannot_do_are_described(actor: Service) -> None:
    assert actor.description.engine.endswith("rollout vllm")
    assert any("vLLM does not sleep on a CPU" in limit for limit in actor.description.limits)


@pytest.mark.full
def test_a_row_says_the_same_on_one_rank_and_on_two(up: Cluster) -> None:
    responses = []
    for name in ACTORS:
        with up.service(name) as service:
            made = generate(service)
            responses.append(service.values(made, "response_ids"))
            assert len(set(responses[-1].lengths.tolist())) > 1
    one, two = responses
    assert one.lengths.tolist() == two.lengths.tolist()
    assert one.values.tolist() == two.values.tolist()


def test_rollout_log_probs_equal_recomputed_ones_after_every_update(actor: Service) -> None:
    previous = np.empty(0)
    for _ in range(3):
        made = generate(actor)
        rollout = actor.values(made, "rollout_log_probs")
        recomputed = actor.column(
            "compute_log_prob", made.select(SEQUENCES), "log_probs", temperature=SAMPLING.temperature
        )
        np.testing.assert_allclose(rollout.values, recomputed.values, rtol=0, atol=PARITY)
        assert not np.array_equal(rollout.values, previous), "the update must have an effect"
        previous = rollout.values
        update(actor, made)


def test_a_session_that_starts_over_generates_from_the_model_directory_again(actor: Service) -> None:
    def said() -> tuple[list[int], list[float]]:
        made = generate(actor)
        return tuple(
            actor.values(made, name).values.tolist() for name in ("response_ids", "rollout_log_probs")
        )

    actor.call("begin_session")
    fresh = said()
    for _ in range(2):
        update(actor, generate(actor))
    trained = said()
    assert trained != fresh
    actor.call("begin_session", keep_weights=True)
    assert said() == trained
    actor.call("begin_session")
    assert actor.versions == [0] * len(actor.ranks)
    assert said() == fresh


def test_cancel_of_one_rank_ends_a_generation_and_the_next_one_works(actor: Service) -> None:
    header = actor.header()
    many = Batch.of(prompt=["12+30="] * 1024)
    long = actor_pb2.Sampling(temperature=2.0, max_new_tokens=50)
    pending = actor.start("generate_sequences", many, header=header, sampling=long, timeout_s=100)
    for rank in actor.ranks:
        actor.watch_until(lambda status: status.phase == worker_pb2.PHASE_COMPUTING, rank)
    assert actor.cancel(header.call_id, ranks=[1]) == [True]
    outcomes = pending.outcomes()
    assert any(isinstance(outcome, CallCancelled) for outcome in outcomes), outcomes
    assert generate(actor).rows == PROMPTS.rows


@dataclass(frozen=True)
class Finished:
    """A run of `rlhf-controller`, its output and its directory."""

    status: int
    output: str
    directory: Path


def run_ppo(up: Cluster, path: Path, **algorithm: Any) -> Finished:
    """`rlhf-controller --algo ppo` on the services that are up, whose actor generates with vLLM."""
    config = up.select(**{name: name for name in ("actor", *OTHERS)})
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": path / "runs", "steps": STEPS},
        "rollout": {"stop": ("99",)},
        "algorithm": algorithm,
    }
    updated = {table: getattr(config, table).model_copy(update=update) for table, update in changes.items()}
    file = write(config.model_copy(update=updated), path / "run.toml")
    processes = Processes()
    try:
        controller = processes.start("rlhf-controller", "--algo", "ppo", "--config", str(file))
        output = "".join(controller.communicate(timeout=RUN_TIMEOUT_S))
        (directory,) = (path / "runs").iterdir()
        return Finished(controller.returncode, output, directory)
    finally:
        processes.kill()


def test_ppo_runs_end_to_end(up: Cluster, task: Task, tmp_path: Path) -> None:
    run = run_ppo(up, tmp_path)
    assert run.status == 0, run.output
    lines = [line for line in read_metrics(run.directory) if line["step"] > 0]
    assert len(lines) == STEPS
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert all(0 < line["rollout/parity_max_abs"] < PARITY for line in lines)
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == STEPS
    assert not any("99" in sample.response for _, sample in each_sample(run.directory))
    trained = AutoModelForCausalLM.from_pretrained(run.directory / "actor").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(task.model).state_dict()
    assert any(not x.equal(initial[name]) for name, x in trained.items())


def test_ppo_ends_where_vllm_drifts_from_training(up: Cluster, tmp_path: Path) -> None:
    run = run_ppo(up, tmp_path, max_log_prob_drift=1e-12)
    assert run.status == 1
    assert re.search(
        r"error: step 1: .*actor's .* up to \S+ apart, .*max_log_prob_drift, 1e-12; its rows are in ",
        run.output,
        re.M,
    )
