"""The cluster's own programs, made to fail: what they say, how they end, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import tomli_w
from chaos.forked_program import run_program
from python_path import python_path

from deploy.quickstart import Recipe
from deploy.quickstart.build import build
from integration.harness import free_ports
from integration.ranks import server_context
from rlhf.v1 import worker_pb2, worker_pb2_grpc

HERE = Path(__file__).parent
MARK = "RLHF_CHAOS"
"""Environment variable by which a site finds every process that was started in it."""
TIMEOUT_S = 60.0
START_TIMEOUT_S = 100.0
"""Longest that services take to start beside each other."""
ENDS_WITHIN_S = 20.0
"""Longest that a run takes to end once something has gone wrong; where it does so at once, from its start."""
STUCK_S = 5.0
"""How long a call past its deadline may be without progress."""
ROLES = ("actor", "critic", "reference", "reward")


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"not one line on stderr:\n{self.err}"
        return lines[0]


class Program:
    """A program in a session of its own, with its output in files."""

    def __init__(self, command: list[str], directory: Path, environment: Mapping[str, str]) -> None:
        name = uuid.uuid4().hex
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._out.read_text() + self._err.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Sends the program, and nobody else, a signal."""
        self._process.send_signal(number)

    def until_it_says(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for a text in the output of a program that goes on."""
        wait_until(lambda: text in self.output or self.has_ended, timeout_s)
        assert text in self.output, f"ended with {self._process.returncode}:\n{self.output}"

    def end(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Waits for the end of the program."""
        code = self._process.wait(timeout_s)
        return Ended(code, self._out.read_text(), self._err.read_text())


class Site:
    """A directory with a config, and all that the config names, in which the cluster's programs run.

    Attributes:
        config: Tables of the config file; call `write_config` after a change.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        tables: dict[str, dict[str, Any]] = {
            role: {"role": role, "address": f"127.0.0.1:{free_port()}", "stuck_timeout_s": STUCK_S}
            for role in ROLES
        }
        for role in ("actor", "critic", "reference"):
            # Runs of other sites export there too.
            tables[role] |= {"model": "model", "output_roots": [str(directory.parent)]}
        tables["actor"]["ranks"] = 2
        tables["reward"]["function"] = "chaos_plugins:score"
        self.config: dict[str, Any] = {
            "run": {"name": "chaos", "directory": "runs", "steps": 1000, "evaluate_every": 0, "samples": 0,
                    "call_timeout_s": TIMEOUT_S, "connect_timeout_s": 2.0},
            "data": {"train": "train.jsonl", "heldout": "heldout.jsonl", "prompts_per_step": 64},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 48},
            "algorithm": {"mini_batch_size": 32},
            "services": tables,
        }  # fmt: skip
        self.write_config()
        self.write_rows("train.jsonl", [""] * 64)
        self.write_rows("heldout.jsonl", [""] * 8)
        self._mark = uuid.uuid4().hex
        self._temporary = directory / "tmp"
        self._temporary.mkdir()

    def write_config(self) -> None:
        (self.directory / "chaos.toml").write_text(tomli_w.dumps(self.config))

    def write_rows(self, name: str, ground_truths: list[str]) -> None:
        """Writes prompts; the reward of `chaos_plugins` does what their ground truths ask for."""
        rows = [{"prompt": f"{number}+1=", "ground_truth": text} for number, text in enumerate(ground_truths)]
        (self.directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def address(self, service: str) -> str:
        return self.config["services"][service]["address"]

    def start(self, program: str, *arguments: str) -> Program:
        """Starts an installed program."""
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        return Program(command, self.directory, self._environment())

    def run_forked(self, program: str, *arguments: str, timeout_s: float) -> Ended:
        """Runs an installed program to its end, in a fork of a process that has imported most of it: for the many that
        end before they have done anything, an interpreter's start takes most of the time."""
        out, err = self.directory / f"{program}.out", self.directory / f"{program}.err"
        given = (program, arguments, self.directory, self._environment(), out, err)
        process = server_context().Process(target=run_program, args=given)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{program} goes on after {timeout_s:g} s")
        return Ended(process.exitcode, out.read_text(), err.read_text())

    def controller(self, *settings: str, algorithm: str = "ppo", launch: bool = False) -> Program:
        """Starts rlhf-controller with the config and these settings."""
        flags = ["--launch"] * launch + [part for setting in settings for part in ("--set", setting)]
        return self.start("rlhf-controller", "--algo", algorithm, "--config", "chaos.toml", *flags)

    def torchrun(self, service: str, *arguments: str) -> Program:
        """Starts a service by hand, as the README does."""
        table = self.config["services"][service]
        ranks = f"--nproc-per-node={table.get('ranks', 1)}"
        named = (table["role"], "--config", "chaos.toml", "--name", service)
        return self.start("torchrun", "--rdzv-backend=rlhf", ranks, "-m", "services", *named, *arguments)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes started here that have these words on their command line."""
        found = []
        for process in psutil.process_iter():
            # A process may end while it is looked at, or belong to somebody else.
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and set(words) <= set(process.cmdline()):
                    found.append(process)
        return found

    def is_quiet(self) -> bool:
        """Whether nothing that was started here lives any more."""
        return not self.processes()

    def temporary_files(self) -> list[Path]:
        """Files left in the directory for temporary files, and the empty directories of torchrun."""
        left = self._temporary.rglob("*")
        return [path for path in left if not path.is_dir() or path.name.startswith("torchelastic_")]

    def close(self) -> None:
        """Kills what still lives; raises AssertionError where something did."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(self.is_quiet, TIMEOUT_S)
        assert not left, "processes are left behind"

    def _environment(self) -> dict[str, str]:
        own = {MARK: self._mark, "TMPDIR": str(self._temporary), "PYTHONPATH": python_path(HERE)}
        return {**os.environ, **own}


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Polls a condition until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {timeout_s:g} s"
        time.sleep(0.02)


def free_port() -> int:
    """A free port of loopback; see `free_ports`."""
    (port,) = free_ports(1)
    return port


def watch_until(address: str, condition: Callable[[worker_pb2.WatchResponse], bool]) -> None:
    """Returns when the rank at an address has a status that meets the condition."""
    with grpc.insecure_channel(address) as channel:
        watch = worker_pb2_grpc.WorkerServiceStub(channel).Watch
        statuses = watch(worker_pb2.WatchRequest(interval_s=0.1), timeout=TIMEOUT_S)
        next(status for status in statuses if condition(status))


def describe(address: str) -> worker_pb2.DescribeResponse:
    """The Describe response of the rank at an address."""
    with grpc.insecure_channel(address) as channel:
        return worker_pb2_grpc.WorkerServiceStub(channel).Describe(
            worker_pb2.DescribeRequest(), timeout=TIMEOUT_S
        )


def wait_for_call(run: Program, address: str, method: str) -> None:
    """Returns when every rank of the service at an address computes a call of a training step."""
    run.until_it_says("step 0/", START_TIMEOUT_S)
    for rank in describe(address).ranks:
        watch_until(
            rank.endpoint.address, lambda s: s.method == method and s.phase == worker_pb2.PHASE_COMPUTING
        )


def with_vocabulary(model: Path, directory: Path, change: Callable[[dict[str, int]], None]) -> Path:
    """A copy of a model whose tokenizer has another vocabulary."""
    shutil.copytree(model, directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny untrained Llama and its tokenizer."""
    task = tmp_path_factory.mktemp("task") / "arithmetic"
    build(task, Recipe(max_steps=1))
    return task / "model"


@pytest.fixture
def site(tmp_path: Path, model: Path) -> Iterator[Site]:
    """A site where nothing runs yet."""
    site = Site(tmp_path)
    (tmp_path / "model").symlink_to(model)
    yield site
    site.close()
