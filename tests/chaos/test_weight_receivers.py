"""A rollout service that is killed or stopped at any moment of a transfer of weights serves the old version or the new
one, whole; without a second buffer it refuses until it has been refreshed. Never a mixture."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import results
from controller.role_groups.weights import sync_weights
from integration.harness import SHARDED, Processes, free_ports, wait_until, write_config
from integration.weight_services import WeightServices, write_model
from nccl_transfer.refs.batch import Batch
from rlhf.errors import Refused, RlhfError
from rlhf.v1 import actor_pb2

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TIMEOUT_S, START_S = 60.0, 230.0
DEADLINE_S = 4.0
"""Of a call that moves weights."""
LONG_STOP_S = 2 * DEADLINE_S
BUCKET_BYTES = 32 << 10
PROMPTS = FutureBatch.of(prompt=["1+1=", "12", "7*3=", "a"])
GREEDY = actor_pb2.Sampling(greedy=True, max_new_tokens=5)
ONCE = actor_pb2.Schedule(epochs=1, mini_batches=1)
SEED = 20261123
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
Response = tuple[list[int], list[float]]
"""Tokens and their log-probabilities."""


class Target(WeightServices):
    """An actor with two versions of weights, and a rollout service that is struck, in processes of their own."""

    def __init__(self, directory: Path, processes: Processes, second_buffer: bool) -> None:
        self.directory, self._processes = directory, processes
        write_model(
            directory / "model",
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
            num_key_value_heads=2,
        )
        common = {"model": directory / "model", "output_roots": [directory], "startup_timeout_s": START_S}
        ports = free_ports(2)
        tables: dict[str, Any] = {
            "actor": {"role": "actor", "address": f"127.0.0.1:{ports[0]}", **common}
            | {"optimizer": {"learning_rate": 1e-2}},
            "rollout": {"role": "rollout", "address": f"127.0.0.1:{ports[1]}", **common}
            | {"ranks": 2, "mesh": "1-2-1", "second_buffer": second_buffer},
        }
        run = {"directory": directory / "runs", "connect_timeout_s": START_S}
        data = dict.fromkeys(("train", "heldout"), directory / "none.jsonl")
        both = Config.model_validate(
            {"run": run, "data": data, "rollout": {"max_response_tokens": 8}, "services": tables}
        )
        self._paths = {
            name: write_config(
                both.model_copy(update={"services": {name: both.services[name]}}), directory / f"{name}.toml"
            )
            for name in tables
        }
        self._launchers = {name: self._serve(name) for name in tables}
        super().__init__(Cluster(both, Session(seed=3, timeout_s=TIMEOUT_S, save_timeout_s=DEADLINE_S)))

    def _serve(self, name: str) -> subprocess.Popen[str]:
        return self._processes.serve(self._paths[name], self.directory / f"logs_{name}", timeout_s=START_S)

    def make_versions(self) -> dict[str, Response]:
        """Makes the two versions, and returns the responses with each."""
        self.cluster.connect()
        expected = {}
        for name in ("a", "b"):
            results(self.actor.save_checkpoint(str(self.directory / name), SHARDED).calls)
            self.sync()
            expected[name] = self.responses()
            rows = self.actor.generate_sequences(PROMPTS, GREEDY)
            results(self.actor.update_supervised(rows, ONCE).calls)
        assert expected["a"] != expected["b"]
        return expected

    def switch(self, name: str) -> None:
        """Makes a version the actor's."""
        results(self.actor.load_checkpoint(str(self.directory / name)).calls)

    def sync(self) -> None:
        results(sync_weights(self.actor, [self.rollout], BUCKET_BYTES).calls, TIMEOUT_S)

    def responses(self) -> Response:
        rows = self.rollout.generate_sequences(PROMPTS, GREEDY).result(
            ["response_ids", "rollout_log_probs"], TIMEOUT_S
        )
        return self._values(rows, "response_ids"), self._values(rows, "rollout_log_probs")

    def served(self, expected: dict[str, Response]) -> str:
        """The version that the service generates with; "none" if it refuses, "a mixture" if it is no version."""
        try:
            found = self.responses()
        except Refused as refusal:
            if "sync_weights" not in str(refusal):
                raise
            return "none"
        return next((name for name, responses in expected.items() if responses == found), "a mixture")

    def _values(self, rows: Batch, name: str) -> Any:
        column = rows.select([name])
        fetched = self.fetcher.fetch(column, time.monotonic() + TIMEOUT_S)
        return fetched.values[name].values.tolist()  # type: ignore[union-attr]

    def pids(self) -> list[int]:
        return [rank.pid for rank in self.rollout.description.ranks]

    def restart(self) -> None:
        """Starts the service whose rank was killed again, and connects to it."""
        launcher = self._launchers["rollout"]
        wait_until(lambda: launcher.poll() is not None, TIMEOUT_S, "the service to end")
        self._launchers["rollout"] = self._serve("rollout")
        self.cluster.reconnect("rollout")


@pytest.fixture
def target(second_buffer: bool, tmp_path: Path) -> Iterator[Target]:
    processes, made = Processes(), None
    try:
        made = Target(tmp_path, processes, second_buffer)
        yield made
    finally:
        if made is not None:
            made.close()
        processes.kill()


def strike(pid: int, delay_s: float, stop_s: float | None) -> threading.Thread:
    """Begins a thread that stops a process for some seconds, or kills it (None), after a delay."""

    def act() -> None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL if stop_s is None else signal.SIGSTOP)
        if stop_s is not None:
            time.sleep(stop_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("second_buffer", "stops", "kills"),
    [
        pytest.param(True, 3, 1, id="second buffer"),
        pytest.param(False, 3, 1, id="in place", marks=FULL),
        pytest.param(True, 40, 10, id="second buffer, often", marks=FULL),
        pytest.param(False, 40, 10, id="in place, often", marks=FULL),
    ],
)
def test_it_serves_one_whole_version_or_refuses(
    target: Target, second_buffer: bool, stops: int, kills: int
) -> None:
    drawn = random.Random(int(os.environ.get("SHOTS_SEED", SEED)))
    expected = target.make_versions()
    began = time.monotonic()
    target.switch("a")
    target.sync()
    takes_s = time.monotonic() - began
    served, ends = "a", []
    shots = ["stop"] * stops + ["kill"] * kills
    drawn.shuffle(shots)
    for number, shot in enumerate(shots):
        new = "b" if served == "a" else "a"
        target.switch(new)
        stop_s = LONG_STOP_S if number % 20 == 7 else drawn.uniform(0, 0.3)
        thread = strike(
            drawn.choice(target.pids()), drawn.uniform(0, 1.2 * takes_s), stop_s if shot == "stop" else None
        )
        try:
            target.sync()
            error = None
        except RlhfError as caught:
            error = caught
        thread.join()
        allowed = {new} if error is None else {served, new} if second_buffer else {served, new, "none"}
        if shot == "kill":
            target.restart()
            allowed = {"none"}
        found = target.served(expected)
        assert found in allowed, f"shot {number}, a {shot}: {error}"
        ends.append({served: "old", new: "new"}.get(found, found))
        target.sync()
        assert target.responses() == expected[new], f"shot {number}, a {shot}: after a refresh"
        served = new
    print({end: ends.count(end) for end in set(ends)}, f"of {len(shots)}; a transfer took {takes_s:.2f} s")
    results(target.rollout.verify_weights().calls, TIMEOUT_S)
