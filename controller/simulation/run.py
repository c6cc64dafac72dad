"""A run of the real controller on simulated ranks: algorithm, role groups, transfer plans, order of calls and gates are
those of any run; ranks, rows, files and the clock are not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from client.fanout import FanOut
from client.session import Session
from client.waiting import counting
from controller.config.config import Config
from controller.config.data import SourceTable
from controller.config.rollout import EnvironmentTable
from controller.data.prompt_form import PromptForm
from controller.data.prompt_source import PromptSource
from controller.data.prompts import PromptData, TextData
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.loop import Loop
from controller.simulation.clock import VirtualTimeLoop
from controller.simulation.durations import Durations, TimedCall
from controller.simulation.ranks import EPOCH, RankWork, SimulatedRank, SimulatedService
from controller.simulation.rows import Shares, made_up_values
from controller.training.algorithm import Algorithm
from controller.training.evaluation import Evaluation
from controller.training.run import Run
from controller.training.step import Step
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire_ranks import endpoint_to_proto, mesh_to_proto
from rlhf.contract import group_methods
from rlhf.v1 import worker_pb2
from settings.meshes import generation_sizes, parse
from settings.model import ModelTable
from settings.reward import RewardTable
from settings.service import ServiceTable

RANKS_PER_HOST = 8
TIMEOUT_S = 1e9
"""Timeout of simulated calls, in virtual seconds."""
NOTHING = Evaluation(lambda batch: ({}, ()), lambda numbers: {})
"""Evaluation that measures nothing, in no time."""


@dataclass
class Trace:
    """A simulated run.

    Attributes:
        calls: Its calls, in the order of their steps; times are in virtual seconds since the start of the first step.
        metrics: Metrics of each step, in order.
        straggling: Seconds between the mean rank's end and the last rank's, summed over the calls of each step.
        controller_s: CPU time of the controller in all steps, in seconds of this host.
        requests, nbytes: Number and bytes of requests to ranks.
    """

    calls: list[TimedCall] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    straggling: dict[int, float] = field(default_factory=dict)
    controller_s: float = 0.0
    requests: int = 0
    nbytes: int = 0


class _Notes:
    """Stands for the recorder; see there."""

    path = Path()
    metric_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.trace = Trace()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step:
            self.trace.metrics.append(dict(metrics))

    def calls(self, step: int, records: Iterable[CallRecord], rows: int = 0) -> None:
        for each in (sent for record in records for sent in record.sent):
            self.trace.calls.append(TimedCall(each.started_s, each.ended_s, each.service, each.method, step))

    def samples(self, step: int, rows: object) -> None: ...


class _Rows:
    """Rows without contents, of any number; see `RowReader`."""

    fills_nulls = False

    def __init__(self, names: Sequence[str], count: int) -> None:
        self._row, self._count = dict.fromkeys(("prompt", "text", *names), "x"), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int, /) -> dict[str, str]:
        return dict(self._row)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[row] for row in range(self._count))

    def fingerprint(self) -> str:
        return ""

    def where(self, row: int) -> str:
        return f"simulated row {row}"


class SimulatedCluster(Cluster):
    """The services of a config as role groups, with simulated ranks.

    Args:
        config, session, loop: As of `Cluster`.
        make: Function that makes the service of a name.
    """

    def __init__(
        self, config: Config, session: Session, loop: Loop, make: Callable[[str], SimulatedService]
    ) -> None:
        super().__init__(config, session, loop)
        self._services = {name: make(name) for name in config.services}

    async def _connect(self, say: Callable[[str], None]) -> None:
        for name, service in self._services.items():
            self.groups[name] = self._group(name, service.description)
        for name, host in self.config.also_served.items():
            self._also_served[name] = self._second_role(name, host)

    def _fan_out(self, name: str, description: worker_pb2.DescribeResponse) -> FanOut:
        ranks = [SimulatedRank(self._services[name], rank) for rank in range(len(description.ranks))]
        return FanOut(ranks, EPOCH)  # type: ignore[arg-type]


class SimulatedRun(Run):
    """A run whose columns have no values, and without evaluations."""

    def steps(self, evaluation: Evaluation | None = None) -> Iterator[Step]:
        """Iterates over the training steps; see `Run.steps`."""
        return super().steps(NOTHING)

    def evaluate(self, evaluation: Evaluation | None = None) -> dict[str, float]:
        """Measures nothing."""
        return super().evaluate(NOTHING)

    def fetch(self, batch: FutureBatch, *names: str) -> dict[str, Any]:
        """Waits for columns and returns made-up values of them, by name."""
        return {name: made_up_values(column) for name, column in batch.result(names).columns.items()}


def simulate_run(
    config: Config,
    algorithm: Algorithm,
    durations: Durations,
    prompts: Shares,
    responses: Shares,
    steps: int,
) -> Trace:
    """Executes a run on simulated ranks and returns its trace. The controller itself takes the pauses of `durations`
    alone. Critics have no warm-up. Equal arguments give equal calls and metrics.

    Args:
        config: Configuration of the run, as `algorithm.configure` returned it.
        algorithm: The algorithm.
        durations: Durations of calls.
        prompts, responses: Distributions of the lengths of prompts and of responses.
        steps: Number of steps.

    Raises:
        RlhfError: The algorithm failed.
    """
    never = {"evaluate_every": 0, "rollouts_every": 0, "verify_every": 0}
    run_table = config.run.model_copy(update={"steps": steps, "call_timeout_s": TIMEOUT_S, **never})
    # A response is generated by one call: the model of costs has neither segments nor turns.
    one_call = {"segments": 1, "environment": EnvironmentTable()}
    rollout_table = config.rollout.model_copy(update=one_call)
    config = config.without_critic_warmup().model_copy(update={"run": run_table, "rollout": rollout_table})
    work, notes = RankWork(), _Notes()
    with contextlib.ExitStack() as opened, counting() as threads:
        event_loop = VirtualTimeLoop(threads)
        session = Session(
            name="simulated",
            seed=config.run.seed,
            timeout_s=TIMEOUT_S,
            save_timeout_s=TIMEOUT_S,
            balance=config.run.balance,
            now=event_loop.time,
        )

        def make(name: str) -> SimulatedService:
            return _service(config, name, durations, (prompts, responses), work)

        opened.callback((cluster := SimulatedCluster(config, session, Loop(event_loop), make)).close)
        cluster.connect()
        parts = config, _data(config, algorithm), cluster, notes, _texts(config)
        with SimulatedRun(*parts) as run:  # type: ignore[arg-type]
            cpu_s, ranks_s, began_s = time.process_time(), work.seconds, event_loop.time()
            algorithm(run)
            notes.trace.controller_s = time.process_time() - cpu_s - (work.seconds - ranks_s)
    return _completed(notes.trace, work, began_s)


def _completed(trace: Trace, work: RankWork, began_s: float) -> Trace:
    trace.calls = [replace(each, start=each.start - began_s, end=each.end - began_s) for each in trace.calls]
    trace.requests, trace.nbytes = work.requests, work.nbytes
    for step, ends in work.ends.values():
        late = max(ends) - sum(ends) / len(ends)
        trace.straggling[step] = trace.straggling.get(step, 0.0) + late
    return trace


def _service(
    config: Config,
    name: str,
    durations: Durations,
    lengths: tuple[Shares, Shares],
    work: RankWork,
) -> SimulatedService:
    table = config.services[name]
    mesh = _mesh(table)
    second = [role for role, host in config.also_served.items() if host == name]
    endpoints = [
        Endpoint(f"{name}-{rank}:1", f"{name}-{rank // RANKS_PER_HOST}", EPOCH, name, rank)
        for rank in range(mesh.size)
    ]
    methods = {method.path[1:] for role in (table.role, *second) for method in group_methods(role).values()}
    description = worker_pb2.DescribeResponse(
        role=table.role,
        service=name,
        epoch=EPOCH,
        ranks=[worker_pb2.RankInfo(endpoint=endpoint_to_proto(each)) for each in endpoints],
        mesh=mesh_to_proto(mesh),
        methods=[worker_pb2.MethodInfo(name=each) for each in sorted(methods)],
        input_form=input_form(table),
        dispatches=True,
    )
    return SimulatedService([name, *second], description, endpoints, mesh, durations, lengths, work)


def _mesh(table: ServiceTable) -> Mesh:
    """Returns the mesh of a service's ranks; all are data ranks where the table has none."""
    mesh = getattr(table, "mesh", "")
    training = parse(mesh) if mesh else (1, 1, table.ranks)
    if isinstance(table, ModelTable):
        training = table.training_sizes
    generation = generation_sizes(getattr(table, "generation_mesh", ""), mesh)
    return Mesh(*training, *generation, usual_order=not mesh and generation != training[:2])


def input_form(table: ServiceTable) -> Any:
    """Returns the InputForm that a service of a table takes its rows in."""
    reads_tokens = isinstance(table, RewardTable) and table.kind == "model" and table.input == "tensor"
    return worker_pb2.INPUT_FORM_TENSOR if reads_tokens else worker_pb2.INPUT_FORM_TEXT


def _data(config: Config, algorithm: Algorithm) -> tuple[PromptData, PromptData]:
    """Returns rows for training, and one held-out row."""
    count = max(1024, config.data.prompts_per_step)
    table = config.data

    def rows(number: int, sources: Sequence[SourceTable]) -> PromptData:
        reader, names = _Rows(algorithm.columns, number), [source.label for source in sources]
        names = names if table.sources else [""]
        return PromptData([PromptSource(reader, PromptForm(), name, algorithm.columns) for name in names])

    return rows(count, table.trained_sources), rows(1, table.all_sources)


def _texts(config: Config) -> TextData | None:
    return TextData(_Rows((), 1024)) if config.data.pretrain else None
