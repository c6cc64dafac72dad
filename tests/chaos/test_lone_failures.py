"""One rank of a service fails alone, anywhere within a method: every rank answers soon, and then the next calls are
right, or the service has ended with one line that says why."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import tomli_w
from chaos import failing_workers

from integration.harness import (
    HUGGING_FACE,
    POLICY_LOSS,
    PREPARED_LOSS,
    SHARDED,
    TWO_STEPS,
    VALUE_LOSS,
    Service,
    free_ports,
    is_listening,
    jagged,
    wait_until,
)
from integration.ranks import server_context
from nccl_transfer.refs.batch import Batch
from rlhf.errors import OutOfStep, RlhfError, ServiceLost
from rlhf.v1 import actor_pb2

NUM_FAILURES = 100
ANSWERS_WITHIN_S = 10.0
START_TIMEOUT_S = 60.0
RANKS = 2

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp"},
    "3d": {"engine": "3d", "mesh": "1-2-1"},
    "3d-pipeline": {"engine": "3d", "mesh": "2-1-1"},
    "zero": {"engine": "zero", "zero": {"stage": 3}},
}
ERRORS = ("ValueError", "MemoryError", "RuntimeError", "OSError", "KeyError", "ArithmeticError")

SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=6)
GENERATOR = np.random.default_rng(3)
LENGTHS = [3, 1, 5, 2, 4, 2, 6, 1]
TEXTS = Batch.of(
    prompt=[f"{i}+{i + 1}=" for i in range(8)],
    response=[str(2 * i + 1) for i in range(8)],
    text=[f"{i}+{i}={2 * i}" for i in range(8)],
    chosen=[str(2 * i + 1) for i in range(8)],
    rejected=[str(i) for i in range(8)],
)
ROWS = Batch.of(
    prompt_ids=jagged([GENERATOR.integers(48, 58, 3) for _ in LENGTHS], np.int64),
    response_ids=jagged([GENERATOR.integers(48, 58, n) for n in LENGTHS], np.int64),
    **{
        name: jagged([GENERATOR.normal(-1, 0.1, n) for n in LENGTHS], np.float32)
        for name in ("log_probs", "advantages", "values", "returns")
    },
)
SEQUENCES = ROWS.select(["prompt_ids", "response_ids"])
UPDATE = {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}

METHODS: dict[str, dict[str, tuple[Batch | None, dict[str, Any]]]] = {
    "actor": {
        "generate_sequences": (TEXTS.select(["prompt"]), {"sampling": SAMPLING}),
        "compute_log_prob": (SEQUENCES, {"temperature": 1.0}),
        "compute_loss": (TEXTS.select(["text"]), {}),
        "tokenize": (TEXTS.select(["prompt", "response"]), {}),
        "update_actor": (ROWS.select(["prompt_ids", "response_ids", "log_probs", "advantages"]), UPDATE),
        "prepare_update": (
            ROWS.select(["prompt_ids", "response_ids", "log_probs", "advantages"]),
            {**UPDATE, "loss": PREPARED_LOSS, "rows": 16},
        ),
        "update_supervised": (SEQUENCES, {"schedule": TWO_STEPS}),
        "offload": (None, {}),
        "onload": (None, {}),
        "save_checkpoint": (None, {"directory": "runs/checkpoint", "format": SHARDED}),
        "export": (None, {"directory": "runs/model", "format": HUGGING_FACE}),
        "load_checkpoint": (None, {"directory": "runs/initial"}),
        "profile": (None, {"directory": "runs/traces", "calls": 1}),
        "begin_session": (None, {}),
    },
    "critic": {
        "compute_values": (SEQUENCES, {}),
        "update_critic": (
            ROWS.select(["prompt_ids", "response_ids", "values", "returns"]),
            {"loss": VALUE_LOSS, "schedule": TWO_STEPS},
        ),
        "begin_session": (None, {}),
    },
    "reference": {"compute_ref_log_prob": (SEQUENCES, {"temperature": 1.0})},
    "reward": {
        "compute_reward": (SEQUENCES, {}),
        "compare_pairs": (TEXTS.select(["prompt", "chosen", "rejected"]), {}),
        "update_reward": (
            TEXTS.select(["prompt", "chosen", "rejected"]),
            {"loss": "bradley_terry", "epochs": 1, "mini_batches": 2},
        ),
        "load_checkpoint": (None, {"directory": "runs/initial"}),
        "begin_session": (None, {}),
    },
}  # fmt: skip
UPDATES = {"actor": "update_actor", "critic": "update_critic", "reward": "update_reward"}
READS = {
    "actor": ("generate_sequences", "compute_log_prob"),
    "critic": ("compute_values",),
    "reference": ("compute_ref_log_prob",),
    "reward": ("compare_pairs", "compute_reward"),
}


@dataclass(frozen=True)
class Case:
    """A method of a service in which a rank is to fail."""

    role: str
    engine: str
    method: str


def cases() -> Iterator[Case]:
    """Every method with every engine, twice; engine 3d once as tensors and once as stages."""
    for role, methods in METHODS.items():
        engines = ("fsdp", "zero") if role != "reward" else ("fsdp",)
        for engine, method in itertools.product(engines, methods):
            yield from (Case(role, engine, method),) * 2
        if role != "reward":
            yield from (Case(role, engine, method) for engine in ("3d", "3d-pipeline") for method in methods)


@dataclass
class Running:
    """A service whose ranks are told where to fail.

    Attributes:
        calls: By method and rank, how many functions it calls there.
    """

    case: Case
    directory: Path
    context: Any
    address: str = ""
    ranks: list[BaseProcess] = field(default_factory=list)
    service: Service | None = None
    calls: dict[tuple[str, int], int] = field(default_factory=dict)

    def start(self) -> Service:
        """The service, which is up."""
        if self.service is not None:
            return self.service
        address, store = (f"127.0.0.1:{port}" for port in free_ports(2))
        table: dict[str, Any] = {
            "role": self.case.role, "address": address, "ranks": RANKS, "model": str(self.directory / "model"),
            "stuck_timeout_s": 20.0, "output_roots": [str(self.directory / "runs")],
        }  # fmt: skip
        if self.case.role == "reward":
            table |= {"kind": "model", "input": "tensor", "optimizer": {"learning_rate": 1e-3}}
        else:
            table |= {**ENGINES[self.case.engine], "micro_batch_tokens": 64}
        if self.case.role in ("actor", "critic"):
            table["optimizer"] = {"learning_rate": 1e-3}
        config = self.directory / "config.toml"
        config.write_text(tomli_w.dumps({"services": {self.case.role: table}}))
        self.log.write_bytes(b"")
        port = int(store.rpartition(":")[2])
        self.ranks = [
            self.context.Process(
                target=failing_workers.serve,
                args=(self.case.role, rank, RANKS, port, self.directory, config, self.log),
            )
            for rank in range(RANKS)
        ]
        for rank in self.ranks:
            rank.start()
        wait_until(lambda: is_listening(address) or not self.lives, START_TIMEOUT_S, "the service")
        assert self.lives, self.log.read_text()
        self.service = Service(self.case.role, address)
        if self.case.role in UPDATES:
            self.call("save_checkpoint", directory="runs/initial", format=SHARDED).responses()
        return self.service

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def lives(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def call(self, method: str, batch: Batch | None = None, **options: Any) -> Any:
        """A call, as the cases name it."""
        assert self.service is not None
        if "directory" in options:
            options["directory"] = str(self.directory / options["directory"])
        name = "save_checkpoint" if method == "export" else method
        return self.service.start(name, batch, header=self.service.header(), **options)

    def learn(self) -> None:
        """An update, where the role learns."""
        if self.case.role in UPDATES:
            method = UPDATES[self.case.role]
            batch, options = METHODS[self.case.role][method]
            self.call(method, batch, **options).responses()

    def tell(self, rank: int, at: int, error: str) -> None:
        """Has a rank fail in its next call."""
        (self.directory / f"rank-{rank}.fault").write_text(json.dumps({"at": at, "error": error}))

    def told(self, rank: int) -> tuple[int, str]:
        """How many functions it called, and in which it failed."""
        path = self.directory / f"rank-{rank}.calls"
        calls, place = json.loads(
            wait_until(lambda: path.exists() and path.read_text(), ANSWERS_WITHIN_S, "the rank")
        )
        path.unlink()
        return calls, place

    def state(self) -> dict[str, Any]:
        """Policy versions, and what calls make of weights and rows, bit for bit."""
        service = self.start()
        role = self.case.role
        if role == "actor":
            self.call("onload").responses()
        found: dict[str, Any] = {"versions": service.versions}
        if role in UPDATES:
            (self.directory / "runs").mkdir(exist_ok=True)
            found["sha256"] = (
                self.call("export", directory="runs/state", format=HUGGING_FACE).responses()[0].sha256
            )
        for method in READS[role]:
            batch, options = METHODS[role][method]
            responses = self.call(method, batch, **options).responses()
            if method == "compute_reward":
                found["scores"] = [score.score for response in responses for score in response.scores]
                continue
            made = service.made(responses)
            for column in made.columns:
                values = service.values(made, column)
                found[column] = getattr(values, "values", values).tolist()
        return found

    def end(self) -> None:
        """Ends its living ranks, as a launcher does once one of them has ended."""
        if self.service is not None:
            self.service.close()
        self.service = None
        for rank in self.ranks:
            if rank.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid or 0, signal.SIGTERM)
        deadline = time.monotonic() + 15
        for rank in self.ranks:
            rank.join(max(deadline - time.monotonic(), 0.1))
        late = [rank for rank in self.ranks if rank.is_alive()]
        for rank in late:
            rank.kill()
            rank.join()
        self.ranks = []
        assert not late, f"ranks do not end:\n{self.log.read_text()}"


def fail(running: Running, method: str, chance: random.Random) -> tuple[float, str]:
    """Fails one rank in a method, and checks what becomes of it; returns after how many seconds all ranks had answered,
    and what became of it in a few words."""
    running.start()
    batch, options = METHODS[running.case.role][method]
    rank = chance.randrange(RANKS)
    if (method, rank) not in running.calls:
        running.learn()
        running.tell(rank, at=0, error="")
        running.call(method, batch, **options).responses()
        running.calls[method, rank] = running.told(rank)[0]
    if method == "begin_session":
        running.learn()  # else there is nothing to go back from
    before = running.state()
    at, error = chance.randint(1, running.calls[method, rank]), chance.choice(ERRORS)
    running.tell(rank, at, error)
    began = time.monotonic()
    outcomes = running.call(method, batch, **options).outcomes()
    seconds = time.monotonic() - began
    assert seconds < ANSWERS_WITHIN_S, (
        f"{error} at {at} of rank {rank}, answered after {seconds:.1f} s: {outcomes}"
    )
    place, known = running.told(rank)[1], running.calls[method, rank]
    where = place or "a call that did not come"
    what = f"{error} in {where} ({at} of {known}) of rank {rank}, answered after {seconds:.1f} s"
    assert not place or isinstance(outcomes[rank], RlhfError), f"{what}: {outcomes}"
    if any(isinstance(outcome, OutOfStep | ServiceLost) for outcome in outcomes):
        wait_until(lambda: not running.lives, ANSWERS_WITHIN_S, "the end of a rank")
        running.end()
        fatal = [line for line in running.log.read_text().splitlines() if line.startswith("fatal: ")]
        assert sum(" failed alone in " in line for line in fatal) == 1, (what, fatal)
        assert " failed alone in " in fatal[0], (what, fatal)
        return seconds, f"{what}: the service ended"
    after = running.state()
    if place and after["versions"] == before["versions"]:
        assert after == before, what
    assert len(set(after["versions"])) == 1, what
    return seconds, f"{what}: the next calls are right"


@pytest.fixture(scope="module")
def context() -> Any:
    """Makes processes that have imported what ranks import."""
    return server_context()


def fail_everywhere(drawn: list[Case], model: Path, directory: Path, context: Any, seed: int) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}", flush=True)
    begun, ended, answered = time.monotonic(), 0, defaultdict[tuple[str, str, str], list[float]](list)
    for number, ((role, engine), methods) in enumerate(
        itertools.groupby(
            sorted(drawn, key=lambda case: (case.role, case.engine)), lambda case: (case.role, case.engine)
        )
    ):
        own = directory / f"{number}-{role}-{engine}"
        own.mkdir()
        (own / "model").symlink_to(model)
        running = Running(Case(role, engine, ""), own, context)
        try:
            for case in methods:
                seconds, said = fail(running, case.method, chance)
                ended += said.endswith("ended")
                answered[role, engine, case.method].append(seconds)
                print(f"{role} {engine} {case.method}: {said}", flush=True)
        finally:
            running.end()
    print(f"{len(drawn)} failures in {time.monotonic() - begun:.0f} s; {ended} ended the service", flush=True)
    print(f"{'role':10}{'engine':13}{'method':22}count  median s  max s")
    for (role, engine, method), times in answered.items():
        print(f"{role:10}{engine:13}{method:22}{len(times):5}{median(times):10.2f}{max(times):7.2f}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_fails_alone_is_told_to_all(model: Path, tmp_path: Path, context: Any) -> None:
    seed = random.SystemRandom().randrange(2**32)
    drawn = random.Random(seed).sample([case for case in cases() if case.engine in ("fsdp", "3d")], 8)
    fail_everywhere(drawn, model, tmp_path, context, seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_rank_that_fails_alone_in_any_method_is_told_to_all(
    model: Path, tmp_path: Path, context: Any
) -> None:
    """Every method with every engine twice, and more if these are less than a hundred."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**32)))
    every = list(cases())
    more = random.Random(seed).choices(every, k=max(NUM_FAILURES - len(every), 0))
    fail_everywhere([*every, *more], model, tmp_path, context, seed)
