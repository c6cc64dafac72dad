"""The cluster's own programs, run so that they fail: what they say, how they end, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from rlhf.v1 import worker_pb2, worker_pb2_grpc

HERE = Path(__file__).parent
MARK = "RLHF_CHAOS"
"""Environment variable by which a site finds every process that was started in it."""
TIMEOUT_S = 60.0
SERVICES = ("actor", "critic", "reference", "reward")
RANKS = {"actor": 2}
CONFIG = """\
[run]
name = "chaos"
directory = "runs"
steps = 1000
evaluate_every = 0
samples = 0
call_timeout_s = 60
connect_timeout_s = 2

[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
prompts_per_step = 64

[rollout]
samples_per_prompt = 2
max_response_tokens = 48

[algorithm]
mini_batch_size = 32

[services.actor]
role = "actor"
address = "127.0.0.1:{actor}"
ranks = 2
model = "model"

[services.critic]
role = "critic"
address = "127.0.0.1:{critic}"
model = "model"

[services.reference]
role = "reference"
address = "127.0.0.1:{reference}"
model = "model"

[services.reward]
role = "reward"
address = "127.0.0.1:{reward}"
function = "chaos_plugins:score"
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
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

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def until_it_says(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for a text in the output of a program that goes on."""
        wait_until(lambda: text in self.output or self.has_ended, timeout_s)
        assert text in self.output, f"ended with {self._process.returncode}:\n{self.output}"

    def end(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Waits for the end of a program."""
        code = self._process.wait(timeout_s)
        return Ended(code, self._out.read_text(), self._err.read_text())


class Site:
    """A directory with a config, and what it names, in which the cluster's programs run.

    Attributes:
        addresses: Address by service.
    """

    def __init__(self, directory: Path, model: Path | None, ports: Mapping[str, int]) -> None:
        self.directory = directory
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self._mark = uuid.uuid4().hex
        self._temporary = directory / "tmp"
        self._temporary.mkdir()
        (directory / "chaos.toml").write_text(CONFIG.format(**ports))
        if model is not None:
            (directory / "model").symlink_to(model)
        self.write_rows("train.jsonl", ["8"] * 64)
        self.write_rows("heldout.jsonl", ["8"] * 8)

    def write_rows(self, name: str, ground_truths: list[str]) -> None:
        """Writes a data file; the reward of `chaos_plugins` does what the ground truths ask for."""
        rows = [{"prompt": f"{number}+1=", "ground_truth": text} for number, text in enumerate(ground_truths)]
        (self.directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def start(self, program: str, *arguments: str) -> Program:
        """Starts an installed program."""
        path = Path(sys.executable).with_name(program)
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
        }
        return Program([str(path), *arguments], self.directory, environment)

    def controller(self, *settings: str, algorithm: str = "ppo", launch: bool = False) -> Program:
        """rlhf-controller with the config of the site and these settings."""
        flags = ["--launch"] * launch + [part for setting in settings for part in ("--set", setting)]
        return self.start("rlhf-controller", "--algo", algorithm, "--config", "chaos.toml", *flags)

    def deploy_up(self, *arguments: str) -> Program:
        """rlhf-deploy up with the config of the site."""
        return self.start("rlhf-deploy", "up", "chaos.toml", *arguments)

    def torchrun(self, role: str, *arguments: str) -> Program:
        """A service as the README starts it by hand."""
        ranks = f"--nproc-per-node={RANKS.get(role, 1)}"
        module = ("-m", f"services.{role}", "--config", "chaos.toml")
        return self.start("torchrun", "--standalone", ranks, *module, *arguments)

    def processes(self) -> list[psutil.Process]:
        """What lives of all that was started here."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def is_quiet(self) -> bool:
        """Whether nothing that was started here lives."""
        return not self.processes()

    def close(self) -> None:
        """Kills what still lives."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(self.is_quiet, TIMEOUT_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get(MARK) == self._mark
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Polls a condition until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def free_port() -> int:
    """A port that no other process will be given: below those the kernel gives out itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_call(address: str, method: str) -> None:
    """Returns while the service at an address computes a method."""
    with grpc.insecure_channel(address) as channel:
        watch = worker_pb2_grpc.WorkerServiceStub(channel).Watch
        for status in watch(worker_pb2.WatchRequest(interval_s=0.05), timeout=TIMEOUT_S):
            if status.method == method and status.phase == worker_pb2.PHASE_COMPUTING:
                return


def rank_pid(address: str, rank: int) -> int:
    """Process id of a rank of the service at an address."""
    with grpc.insecure_channel(address) as channel:
        describe = worker_pb2_grpc.WorkerServiceStub(channel).Describe
        return describe(worker_pb2.DescribeRequest(), timeout=TIMEOUT_S).ranks[rank].pid


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny untrained Llama and its tokenizer."""
    task = tmp_path_factory.mktemp("task") / "arithmetic"
    build = [sys.executable, "-m", "deploy.quickstart.build", "--out", str(task), "--max-steps", "1"]
    subprocess.run(build, check=True, capture_output=True, timeout=TIMEOUT_S)
    return task / "model"


@pytest.fixture
def ports() -> dict[str, int]:
    return {name: free_port() for name in SERVICES}
