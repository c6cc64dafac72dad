"""Ranks that are killed or stopped at a random moment of a weight update within a run: the run ends in time with an
error that names the service, or as if nothing had happened, and every row that was scored is of one whole version."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller import job
from controller.config.config import Config
from controller.role_groups.group import RoleGroup
from controller.tracking.metrics import read_metrics
from integration.harness import Processes, Service, free_ports, wait_until, write_config
from integration.resuming import UNEQUAL, Results, with_tables
from integration.weight_services import write_model
from rlhf.errors import RlhfError

TIMEOUT_S, START_S = 60.0, 230.0
CALL_S, UPDATE_S = 15.0, 4.0
"""Deadlines of a call of a run, and of one that moves weights."""
ENDS_WITHIN_S = 100.0
"""Longest time of a run, in which one call after another may wait for its deadline."""
STEPS, PROMPTS = 5, 4
SEED = 20261125
STRUCK = ("actor", "rollout")
MATMUL = "mkl"
"""Services that are started again have to round as before, which "auto", a measurement, does not promise."""


@dataclass(frozen=True)
class Shot:
    """A disturbance of a rank during an update.

    Attributes:
        service, rank: The rank.
        update: Number of the weight update, from 1; the first comes before the first step.
        at: Moment, as a share of the time that an update takes.
        stop_s: Seconds that it is stopped; inf: until the run has ended; None: it is killed.
    """

    service: str
    rank: int
    update: int
    at: float
    stop_s: float | None

    @staticmethod
    def draw(drawn: random.Random, kind: str) -> Shot:
        stop_s = {"kill": None, "stop": float("inf"), "pause": drawn.uniform(0.0, 0.5)}[kind]
        place = drawn.choice(STRUCK), drawn.randrange(2), drawn.randint(2, STEPS)
        return Shot(*place, drawn.uniform(0.0, 1.2), stop_s)


class Strike:
    """Strikes at the moment of a shot.

    Args:
        pid: The process.
        shot: The shot.
        takes_s: Seconds that an update takes.
    """

    def __init__(self, pid: int, shot: Shot, takes_s: float) -> None:
        self._pid, self._shot, self._takes_s = pid, shot, takes_s
        self._updates, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._act)

    def update_begins(self) -> None:
        """Notes that a weight update begins."""
        self._updates += 1
        if self._updates == self._shot.update:
            self._thread.start()

    def end(self) -> bool:
        """Lets a stopped process go on. Returns whether the update has begun, and so the process was struck."""
        self._ended.set()
        has_begun = self._thread.ident is not None
        if has_begun:
            self._thread.join()
        return has_begun

    def _act(self) -> None:
        self._ended.wait(self._shot.at * self._takes_s)
        stop_s = self._shot.stop_s
        os.kill(self._pid, signal.SIGKILL if stop_s is None else signal.SIGSTOP)
        if stop_s is not None:
            self._ended.wait(None if stop_s == float("inf") else stop_s)
            os.kill(self._pid, signal.SIGCONT)


class Target:
    """The services of a run of GRPO with a rollout service, each in processes of its own."""

    def __init__(self, directory: Path, processes: Processes, ahead: int) -> None:
        self.directory, self._processes = directory, processes
        self._log = directory / "scored"
        model = {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
        }
        write_model(directory / "model", **model)
        count = STEPS * PROMPTS
        rows = [{"prompt": f"{n}+{n * 7 % 10}=", "ground_truth": str(self._log)} for n in range(count)]
        data = directory / "rows.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        common = {
            "model": directory / "model",
            "startup_timeout_s": START_S,
            "stuck_timeout_s": 20.0,
            "matmul": MATMUL,
        }
        tables: dict[str, dict[str, Any]] = {
            "actor": {
                **common,
                "ranks": 2,
                "output_roots": [directory],
                "optimizer": {"learning_rate": 1e-2},
                "rollout_engine": "none",
            },
            "rollout": {**common, "ranks": 2, "mesh": "1-2-1"},
            "reward": {"function": "chaos.logged_rewards:logged"},
        }
        services = {
            name: {"role": name, "address": f"127.0.0.1:{port}", **tables[name]}
            for name, port in zip(tables, free_ports(len(tables)), strict=True)
        }
        run = {
            "steps": STEPS,
            "evaluate_every": 0,
            "ahead": ahead,
            "samples": 2,
            "connect_timeout_s": START_S,
        }
        self.config = Config.model_validate(
            {
                "run": {**run, "call_timeout_s": CALL_S, "save_timeout_s": UPDATE_S},
                "data": {"train": data, "heldout": data, "prompts_per_step": PROMPTS},
                "rollout": {"max_response_tokens": 6, "samples_per_prompt": 2},
                "algorithm": {"mini_batch_size": 2 * PROMPTS, "kl_loss_coefficient": 0.0},
                "services": services,
            }
        )
        self._launchers = {name: self._serve(name) for name in tables}

    def run(self, directory: Path) -> tuple[RlhfError | None, list[str]]:
        """Executes a run. Returns the error by which it ended, and the prompt and response of each row that was
        scored."""
        self._log.write_text("")
        config = with_tables(self.config, run={"directory": directory})
        with ThreadPoolExecutor(1) as threads:
            try:
                threads.submit(job.run, config, "grpo", take_over=True).result(ENDS_WITHIN_S)
                error = None
            except RlhfError as caught:
                error = caught
        return error, self._log.read_text().splitlines()

    def pid(self, service: str, rank: int) -> int:
        return self._described(service).ranks[rank].pid

    def restart(self) -> None:
        """Starts the services that were struck again. Where a call has failed, ranks may be out of step, upon which
        they end some seconds later."""
        for name in STRUCK:
            self._launchers[name].terminate()
        for name in STRUCK:
            launcher = self._launchers[name]
            wait_until(lambda launcher=launcher: launcher.poll() is not None, TIMEOUT_S, f"the end of {name}")
            self._launchers[name] = self._serve(name)

    def _described(self, name: str) -> Any:
        service = Service(name, self._address(name))
        service.close()
        return service.description

    def _address(self, name: str) -> str:
        return self.config.services[name].address

    def _serve(self, name: str) -> subprocess.Popen[str]:
        alone = self.config.model_copy(update={"services": {name: self.config.services[name]}})
        path = write_config(alone, self.directory / f"{name}.toml")
        return self._processes.serve(path, self.directory / f"logs_{name}", timeout_s=START_S)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    processes = Processes()
    try:
        yield Target(tmp_path, processes, ahead=1)
    finally:
        processes.kill()


def metrics_of(directory: Path) -> dict[int, dict[str, float]]:
    """Metrics of the finished steps of the run in a directory, by step, but those that may differ."""
    (run_dir,) = directory.iterdir()
    return {
        int(line["step"]): {name: value for name, value in line.items() if not name.startswith(UNEQUAL)}
        for line in read_metrics(run_dir)
    }


FULL = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("kinds", "seed"),
    [
        pytest.param(
            {"stop": 1, "pause": 1, "kill": 1}, 0, marks=[pytest.mark.full, pytest.mark.timeout(600)]
        ),
        *(
            pytest.param({"stop": 10, "pause": 11, "kill": 4}, n, id=f"25 shots, {n}", marks=FULL)
            for n in range(4)
        ),
    ],
)
def test_a_run_ends_by_name_and_no_row_is_of_mixed_weights(
    target: Target, kinds: dict[str, int], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strikes: list[Strike] = []
    call_within = RoleGroup.call_within

    def struck(self: RoleGroup, name: str, *more: Any, **options: Any) -> Any:
        if strikes and self.name == "actor" and name == "describe_weights":
            strikes[-1].update_begins()
        return call_within(self, name, *more, **options)

    monkeypatch.setattr(RoleGroup, "call_within", struck)
    error, scored = target.run(tmp_path / "whole")
    assert error is None
    (whole,) = (tmp_path / "whole").iterdir()
    expected, updates = metrics_of(tmp_path / "whole"), [line for line in read_metrics(whole) if line["step"]]
    takes_s = sum(line["time/sync_weights_s"] for line in updates) / len(updates)
    assert len(scored) == len(set(scored)) > 0, "no response twice, so that a mixture is seen"
    drawn = random.Random(int(os.environ.get("SHOTS_SEED", SEED)) + seed)
    shots = [Shot.draw(drawn, kind) for kind, count in kinds.items() for _ in range(count)]
    drawn.shuffle(shots)
    ended = []
    for number, shot in enumerate(shots):
        strikes.append(strike := Strike(target.pid(shot.service, shot.rank), shot, takes_s))
        directory = tmp_path / f"shot-{number}"
        try:
            error, seen = target.run(directory)
        finally:
            has_struck = strike.end()
        said = f"shot {number}, {shot}: {error}"
        print(said, flush=True)
        assert has_struck, f"{said}, before the update"
        assert set(seen) <= set(scored), f"{said}; rows of no version: {set(seen) - set(scored)}"
        assert metrics_of(directory).items() <= expected.items(), said
        if error is None:
            assert (shot.stop_s or UPDATE_S) < UPDATE_S, said
            (run_dir,) = directory.iterdir()
            assert Results.of(run_dir) == Results.of(whole), said
        else:
            assert shot.service in str(error), said
        ended.append("whole" if error is None else type(error).__name__)
        strikes.clear()
        if error is not None:
            target.restart()
    print({each: ended.count(each) for each in set(ended)}, f"an update took {takes_s:.3f} s")
