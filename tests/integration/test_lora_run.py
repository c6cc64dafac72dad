"""PPO with adapters over real services: the actor's ranks are the reference, and no other one is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster as ConnectedCluster
from controller.tracking.metrics import read_metrics
from integration.conftest import Task
from integration.harness import Cluster, Processes, Service, free_ports, write_config
from rlhf.errors import ConfigError
from settings.actor import ActorTable, LoraTable

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROLES = ("actor", "critic", "reward")
STEPS = 3
START_TIMEOUT_S = 110.0
RUN_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 40.0
UNEQUAL = ("time/", "mem/", "transfer/", "rank/")
"""Metrics that may differ between runs of one seed."""


@dataclass(frozen=True)
class Finished:
    """Two runs on services that were put back to where they started.

    Attributes:
        methods: What the actor's rank 0 says that it serves.
        logs: Names of the logs of the services.
        runs: Directories of the runs.
    """

    methods: set[str]
    logs: set[str]
    runs: list[Path]


def lora_config(config: Config, directory: Path) -> Config:
    """An actor on two ranks whose adapters learn, and no reference."""
    ports = iter(free_ports(len(ROLES)))
    services = {
        role: config.services[role].model_copy(update={"address": f"127.0.0.1:{next(ports)}"})
        for role in ROLES
    }
    actor = services["actor"]
    assert isinstance(actor, ActorTable)
    optimizer = actor.optimizer.model_copy(update={"learning_rate": 5e-3})
    services["actor"] = actor.model_copy(update={"lora": LoraTable(rank=8), "optimizer": optimizer})
    table = config.run.model_copy(update={"directory": directory / "runs", "steps": STEPS})
    return config.model_copy(update={"services": services, "run": table})


@pytest.fixture(scope="module")
def finished(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    directory = tmp_path_factory.mktemp("lora")
    chosen = lora_config(config, directory)
    path = write_config(chosen, directory / "lora.toml")
    processes = Processes()
    try:
        up = processes.serve(path, directory / "logs")
        learners = {name: Service(name, chosen.services[name].address) for name in ("actor", "critic")}
        methods = {method.name for method in learners["actor"].description.methods}
        for name, service in learners.items():
            service.save(directory / f"{name}-initial")
        runs = [run(processes, chosen, path)]
        for name, service in learners.items():
            again = Service(name, chosen.services[name].address)
            again.load(directory / f"{name}-initial")
            again.close()
            service.close()
        runs.append(run(processes, chosen, path))
        yield Finished(methods, {log.name for log in (directory / "logs").glob("*.log")}, runs)
        up.terminate()
        assert up.wait(STOP_TIMEOUT_S) == 0
    finally:
        processes.kill()


def run(processes: Processes, config: Config, path: Path) -> Path:
    before = set(config.run.directory.glob("*"))
    controller = processes.start("rlhf-controller", "--algo", "ppo", "--config", str(path))
    out, err = controller.communicate(timeout=RUN_TIMEOUT_S)
    assert controller.returncode == 0, out + err
    (made,) = set(config.run.directory.glob("*")) - before
    return made


def test_no_reference_is_started_and_the_actor_serves_it(finished: Finished) -> None:
    assert finished.logs == {f"{role}.log" for role in ROLES}
    served = {"rlhf.v1.ReferenceService/ComputeRefLogProb", "rlhf.v1.ActorService/UpdateActor"}
    assert served <= finished.methods


def test_the_policy_begins_as_the_reference_to_the_bit_and_leaves_it(finished: Finished) -> None:
    first, *later = (line["kl/mean"] for line in read_metrics(finished.runs[0]) if line["step"] > 0)
    assert first == 0.0
    assert all(kl != 0 for kl in later)


def test_the_reference_has_calls_and_times_of_its_own(finished: Finished) -> None:
    (line,) = (line for line in read_metrics(finished.runs[0]) if line["step"] == 1)
    assert line["time/compute_ref_log_prob_s"] > 0
    assert {key for key in line if key.startswith("mem/")} == {f"mem/{role}_bytes" for role in ROLES}
    events = json.loads((finished.runs[0] / "timeline.json").read_text())
    assert "compute_ref_log_prob" in {event["name"] for event in events}


def test_a_run_from_a_checkpoint_has_the_same_numbers_and_weights(finished: Finished) -> None:
    numbers = [
        [{k: v for k, v in line.items() if not k.startswith(UNEQUAL)} for line in read_metrics(directory)]
        for directory in finished.runs
    ]
    assert numbers[0] == numbers[1]
    hashes = {
        json.loads((directory / "summary.json").read_text())["actor_sha256"] for directory in finished.runs
    }
    assert len(hashes) == 1


def test_what_was_learned_is_exported_whole_and_as_an_adapter(finished: Finished, task: Task) -> None:
    directory = finished.runs[0] / "actor"
    trained, initial = (AutoModelForCausalLM.from_pretrained(path) for path in (directory, task.model))
    ids = torch.tensor([[1, 60, 61, 62]])
    with torch.no_grad():
        plain = initial(ids).logits
        adapted = PeftModel.from_pretrained(initial, str(directory / "adapter"))(ids).logits
        merged = trained(ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=0)
    assert not torch.allclose(merged, plain, atol=1e-2)


def test_an_actor_that_was_started_without_adapters_is_refused_as_the_reference(cluster: Cluster) -> None:
    chosen = cluster.select(actor="lone_actor")
    table = chosen.services["actor"].model_copy(update={"lora": LoraTable()})
    connecting = ConnectedCluster(chosen.model_copy(update={"services": {"actor": table}}), Session())
    try:
        with pytest.raises(ConfigError, match=r"services\.actor: .* role reference, .* started without lora"):
            connecting.connect()
    finally:
        connecting.close()
