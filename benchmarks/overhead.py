"""Overhead of the cluster: PPO iterations of the quickstart through services, beside the same under plain torchrun.

The anchor (`benchmarks.overhead_plain`) has the same ranks, threads, concurrency and numerical code, but no
service, no RPC, no tensor store and no record of a run; that its weights end up the same, bit for bit, shows
that it does the same work. One process that does everything in turn stands beside. They take short
turns, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import tomli_w
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.ports import free_port
from benchmarks.report import circumstances, console, json_option, write_json
from client.session import Session
from controller.algorithms.ppo import ppo
from controller.config.config import Config, load
from controller.data.prompts import PromptData
from controller.launch import LaunchedServices
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.tracking.progress import Progress
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.training.run import Run
from controller.training.step import Step
from deploy import processes, with_parent
from deploy.launch import environment
from services.compute import matmul

QUICKSTART = Path(__file__).parents[1] / "deploy" / "quickstart" / "quickstart.toml"
CLUSTER, PLAIN, LONE = "cluster", "plain torchrun", "one process"
PLAIN_RANKS = 5
MOST_OVERHEAD = 0.10
START_TIMEOUT_S = 180.0
TURN_TIMEOUT_S = 600.0
GRACE_S = 10.0
POLL_S = 0.1

COMPUTING, REST = "some rank computes", "rest"
Span = tuple[float, float]


@dataclass
class Iteration:
    """One iteration of the cluster, in Unix time.

    Attributes:
        fetched_s: When the controller had the floats for the advantages.
        finished_s: When the last call of the step had ended; what follows is bookkeeping.
    """

    step: Step
    started_s: float
    fetched_s: float = 0.0
    finished_s: float = 0.0
    ended_s: float = 0.0


class PacedRun(Run):
    """A run that waits for its turn before some of its steps, and records times."""

    def __init__(self, *arguments: Any, turns: Mapping[int, Callable[[], None]]) -> None:
        super().__init__(*arguments)
        self.iterations: list[Iteration] = []
        self._turns = turns

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            if self.iterations:
                self.iterations[-1].ended_s = time.time()
            if turn := self._turns.get(step.number):
                turn()
            self.iterations.append(Iteration(step, time.time()))
            yield step
            self.iterations[-1].finished_s = time.time()

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        values = super().fetch(batch, *names)
        self.iterations[-1].fetched_s = time.time()
        return values


class Torchrun:
    """`benchmarks.overhead_plain` on a number of ranks, which iterates on request. A context
    manager: no process of it outlives the context."""

    def __init__(
        self, name: str, ranks: int, threads: int, config: Config, config_path: Path, log: Path
    ) -> None:
        self.name = name
        self.seconds: list[list[float]] = []
        self.computing_s: list[float] = []
        self._ranks = ranks
        self._mark = uuid.uuid4().hex
        self._log = log
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pace = PrefixStore(name, server)
        self._environment = environment(config.services["actor"], self._mark)
        self._environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # Where cores are short, threads that spin for others keep them from running: 20 times the time.
        self._environment.setdefault("GOMP_SPINCOUNT", "10000")
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "benchmarks.overhead_plain", "--config", str(config_path), "--name", name),
            *("--pace", f"127.0.0.1:{server.port}", "--threads", str(threads)),
        ]

    def __enter__(self) -> Torchrun:
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                with_parent.wrap(self._command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        processes.stop(self._mark, GRACE_S)
        self._process.wait()

    def wait_until_ready(self) -> None:
        for rank in range(self._ranks):
            self._answer(f"ready/{rank}", START_TIMEOUT_S)

    def turn(self, count: int) -> None:
        """Runs `count` iterations."""
        number = len(self.seconds)
        self._pace.set(f"steps/{number}", str(count))
        answers = [self._answer(f"seconds/{number}/{rank}", TURN_TIMEOUT_S) for rank in range(self._ranks)]
        works = [self._answer(f"work/{number}/{rank}", TURN_TIMEOUT_S) for rank in range(self._ranks)]
        self.seconds.append(json.loads(answers[0]))
        spans = [tuple(span) for work in works for span in json.loads(work)]
        whole = [(min(start for start, _ in spans), max(stop for _, stop in spans))]
        self.computing_s.append(_length(whole) - _length(_subtract(whole, spans)))

    def sha256(self) -> str:
        """Ends it; returns the sha256 of the actor's weights."""
        self._pace.set(f"steps/{len(self.seconds)}", "0")
        return self._answer("sha256/0", TURN_TIMEOUT_S)

    def _answer(self, key: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not self._pace.check([key]):
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").splitlines()[-30:]
                raise click.ClickException(f"{self.name}: no {key}; its log ends with:\n" + "\n".join(lines))
            time.sleep(POLL_S)
        return self._pace.get(key).decode()


def attribute(iteration: Iteration) -> dict[str, float]:
    """Where the time of an iteration went, in seconds. Every moment counts once: for the first line that
    applies."""
    records = iteration.step.records
    update_s = min(r.started_s for r in records if r.method.startswith("update_"))
    inputs_s = max(r.ended_s for r in records if r.ended_s < iteration.fetched_s)
    layers: dict[str, list[Span]] = {
        COMPUTING: _phases(records, "compute"),
        "ranks write results": _phases(records, "store"),
        "ranks fetch inputs": _phases(records, "fetch"),
        "ranks wait for their turn": _phases(records, "queue"),
        "call under way: dispatch, response": [(r.started_s, r.ended_s) for r in records],
        "controller fetches floats": [(inputs_s, iteration.fetched_s)],
        "controller computes advantages": [(iteration.fetched_s, update_s)],
        "metrics, timeline, release": [(iteration.finished_s, iteration.ended_s)],
        REST: [(iteration.started_s, iteration.ended_s)],
    }
    left, seconds = [(iteration.started_s, iteration.ended_s)], {}
    for name, spans in layers.items():
        before, left = left, _subtract(left, spans)
        seconds[name] = _length(before) - _length(left)
    return seconds


def _phases(records: Iterable[CallRecord], wanted: str) -> list[Span]:
    """Times in which ranks were in a phase of a call, by their own reports."""
    spans = []
    for record in records:
        for response in record.responses:
            timing = response.outcome.timing
            at = timing.arrived_unix_s
            for phase in ("queue", "fetch", "compute", "store"):
                start, at = at, at + getattr(timing, f"{phase}_s")
                if phase == wanted:
                    spans.append((start, at))
    return spans


def _subtract(spans: Sequence[Span], taken: Iterable[Span]) -> list[Span]:
    """The parts of the spans that no taken span covers."""
    left = list(spans)
    for start, stop in taken:
        pieces = [piece for s, e in left for piece in ((s, min(e, start)), (max(s, stop), e))]
        left = [(s, e) for s, e in pieces if s < e]
    return left


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


@dataclass
class OverheadTimes:
    """Seconds of each iteration by system and turn, phases and hashes."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    plain_computing_s: float = 0.0
    sha256: dict[str, str] = field(default_factory=dict)


def measure(config: Config, directory: Path, warm_up: int, iterations: int, num_turns: int) -> OverheadTimes:
    """All systems, in turns."""
    path = directory / "config.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    sizes = [warm_up, *[iterations] * num_turns, 1]
    starts = [1 + sum(sizes[:turn]) for turn in range(len(sizes))]
    threads = config.services["actor"].threads
    with contextlib.ExitStack() as stack:
        plain, lone = others = [
            stack.enter_context(Torchrun(*what, config, path, directory / f"{what[0]}.log"))
            for what in ((PLAIN, PLAIN_RANKS, threads), (LONE, 1, os.cpu_count() or 1))
        ]
        stack.enter_context(LaunchedServices(config, path, directory / "logs"))
        for other in others:
            other.wait_until_ready()

        def turn(size: int) -> Callable[[], None]:
            def run() -> None:
                click.echo(f"a turn of {size} iterations", err=True)
                lone.turn(1)
                plain.turn(size)

            return run

        turns = {start: turn(size) for start, size in zip(starts, sizes, strict=True)}
        paced, sha256 = _run_cluster(config, turns)
        measured = OverheadTimes(sha256={CLUSTER: sha256, PLAIN: plain.sha256()})
    done = [i.ended_s - i.started_s for i in paced.iterations[: starts[-1] - 1]]
    measured.seconds[CLUSTER] = [
        done[s - 1 : s - 1 + n] for s, n in zip(starts[1:-1], sizes[1:-1], strict=True)
    ]
    for other in others:
        measured.seconds[other.name] = other.seconds[1:-1]
    counted = [attribute(i) for i in paced.iterations[warm_up : starts[-1] - 1]]
    measured.shares = {name: statistics.mean(seconds[name] for seconds in counted) for name in counted[0]}
    measured.plain_computing_s = sum(plain.computing_s[1:-1]) / (iterations * num_turns)
    return measured


def _run_cluster(config: Config, turns: Mapping[int, Callable[[], None]]) -> tuple[PacedRun, str]:
    """The whole run, with all that `rlhf-controller` does; returns it and the sha256 of the actor's weights."""
    data = (
        PromptData.load(config.data.train, "data.train"),
        PromptData.load(config.data.heldout, "data.heldout"),
    )
    directory = RunDirectory.create(config.run.directory, config.run.name)
    progress = Progress(Console(file=io.StringIO()))
    # Plain torchrun deals rows out by count.
    session = Session(seed=config.run.seed, timeout_s=config.run.call_timeout_s, balance=False)
    cluster = Cluster(config, session)
    with contextlib.closing(cluster):
        cluster.connect()
        progress.begin(config.run.steps)
        with (
            Recorder(directory, progress) as recorder,
            recorder.following(cluster.running, cluster.memory),
            contextlib.closing(PacedRun(config, data, cluster, recorder, turns=turns)) as run,
        ):
            ppo(run)
            return run, run.finish()["actor_sha256"]


def show(measured: OverheadTimes) -> None:
    """The tables."""
    screen = console()
    table = Table(title="One PPO iteration, seconds")
    for name in ("system", "iterations", "mean", "median", "medians of turns", "over plain (turns)"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for name, turns in measured.seconds.items():
        every, medians = _flat(turns), [statistics.median(turn) for turn in turns]
        against = over_plain(measured, name)
        table.add_row(
            name,
            str(len(every)),
            f"{statistics.mean(every):.3f}",
            f"{statistics.median(every):.3f}",
            f"{min(medians):.3f} to {max(medians):.3f}",
            "" if name == PLAIN else f"{against[0]:+.1%} ({against[1]:+.1%} to {against[2]:+.1%})",
        )
    screen.print(table)
    shares = Table(title="Where the time of an iteration goes, mean in milliseconds")
    for name in ("", CLUSTER, PLAIN):
        shares.add_column(name, justify="right" if name else "left")
    plain_s = statistics.mean(_flat(measured.seconds[PLAIN]))
    plain = {COMPUTING: measured.plain_computing_s, REST: plain_s - measured.plain_computing_s}
    for name, seconds in measured.shares.items():
        shares.add_row(name, f"{seconds * 1e3:.1f}", f"{plain[name] * 1e3:.1f}" if name in plain else "")
    screen.print(shares)
    same = measured.sha256[CLUSTER] == measured.sha256[PLAIN]
    screen.print(
        f"the actor's weights after the last step are {'the same' if same else 'NOT the same'} in both"
    )
    overhead = over_plain(measured, CLUSTER)[0]
    verdict = "met" if overhead <= MOST_OVERHEAD else "missed"
    screen.print(f"cluster over plain torchrun: {overhead:+.1%}, aim at most {MOST_OVERHEAD:+.0%}: {verdict}")


def over_plain(measured: OverheadTimes, name: str) -> tuple[float, float, float]:
    """More time than plain torchrun, as a fraction: the median over the turns, the least and the most."""
    turns = zip(measured.seconds[name], measured.seconds[PLAIN], strict=True)
    of_turns = [statistics.median(ours) / statistics.median(plain) - 1 for ours, plain in turns]
    return statistics.median(of_turns), min(of_turns), max(of_turns)


def _flat(turns: list[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(turns))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--warm-up", default=3, show_default=True, type=click.IntRange(1), help="Iterations not counted."
)
@click.option("--iterations", default=2, show_default=True, type=click.IntRange(1), help="In a turn.")
@click.option("--turns", default=12, show_default=True, type=click.IntRange(1), help="Of each system.")
@json_option
def main(warm_up: int, iterations: int, turns: int, json_path: Path | None) -> None:
    """Time PPO iterations of the quickstart through the cluster beside plain torchrun."""
    before = circumstances()
    steps = warm_up + iterations * turns + 1
    with tempfile.TemporaryDirectory() as directory:
        config = _config(Path(directory), steps)
        build = [sys.executable, "-m", "deploy.quickstart.build", "--out", str(config.data.train.parent)]
        subprocess.run(build, check=True)
        try:
            measured = measure(config, Path(directory), warm_up, iterations, turns)
        except KeyboardInterrupt:
            raise click.Abort from None
    show(measured)
    figures = {
        "before": before,
        "after": circumstances(),
        "rows": config.rows_per_step,
        "seconds": measured.seconds,
        "over_plain": {name: over_plain(measured, name) for name in measured.seconds if name != PLAIN},
        "cluster_mean_s": measured.shares,
        "plain_computing_s": measured.plain_computing_s,
        "actor_sha256": measured.sha256,
    }
    write_json(json_path, figures)


def _config(directory: Path, steps: int) -> Config:
    """The quickstart on ports that are free, without evaluations between the steps, and with the faster library of
    matrix products in both systems: where each chose by itself, they could have chosen differently."""
    services, library = load(QUICKSTART).services, matmul.faster(*matmul.measure())
    settings = [f"services.{name}.address=127.0.0.1:{free_port()}" for name in services]
    settings += [f"services.{name}.matmul={library}" for name in ("actor", "critic", "reference")]
    return load(
        QUICKSTART,
        (f"run.steps={steps}", "run.evaluate_every=0", f"run.directory={directory / 'runs'}", *settings),
    )


if __name__ == "__main__":
    main()
