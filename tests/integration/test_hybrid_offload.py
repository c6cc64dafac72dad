"""An actor that gathers what it generates with frees that on Offload, and gathers it anew."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.conftest import Task
from integration.harness import Processes, Service, free_ports, is_listening, wait_until
from nccl_transfer.refs.batch import Batch
from rlhf.v1 import actor_pb2

START_S = 60
SAMPLING = actor_pb2.Sampling(greedy=True, max_new_tokens=6)
PROMPTS = Batch.of(prompt=["1", "12+3=", "99+99=", "7+7"])

CONFIG = """
[services.actor]
role = "actor"
address = "{address}"
ranks = 2
model = "{model}"
{engine}
"""
ENGINES = {
    "3d": """
engine = "3d"
mesh = "1-2-1"
generation_mesh = "1-1-2-1"
transition = "hybridflow_v"
""",
    "fsdp": 'generation_mesh = "1-2-1"',
}


@pytest.fixture(params=ENGINES)
def actor(request: pytest.FixtureRequest, task: Task, tmp_path: Path) -> Iterator[Service]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(address=address, model=task.model, engine=ENGINES[request.param]))
    processes = Processes()
    command = ("torchrun", "--rdzv-backend=rlhf", "--nproc-per-node", "2", "-m", "services", "actor")
    log = (tmp_path / "log").open("w")
    processes.start(*command, "--config", str(config), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: is_listening(address), START_S, "the service")
        service = Service("actor", address)
        yield service
        service.close()
    finally:
        processes.kill()
        log.close()


def test_an_actor_says_the_same_after_an_offload_that_dropped_its_weights(actor: Service) -> None:
    def responses() -> np.ndarray:
        return actor.column("generate_sequences", PROMPTS, "response_ids", sampling=SAMPLING).values

    before = responses()
    assert all(answer.moved_bytes > 0 for answer in actor.call("offload"))
    actor.call("onload")
    assert len(set(before.tolist())) > 1
    np.testing.assert_array_equal(responses(), before)
