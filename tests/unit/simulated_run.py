"""A whole run of the controller on simulated services: real role groups and messages, ranks that only hash what they
are sent. What a service returns depends on its state and on its inputs alone, so any other order of calls that change
a service gives other numbers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from client.session import Session, StepContext
from controller import algorithms
from controller.config.config import Config, load
from controller.data.prompts import load_data
from controller.role_groups.cluster import Cluster
from controller.role_groups.futures import results
from controller.role_groups.replacement import Replaced, Replacement
from controller.role_groups.roles import group_type
from controller.role_groups.weights import sync_weights
from controller.training.run import Run
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.contract import Method, group_methods
from rlhf.errors import RlhfError, ServiceLost
from rlhf.v1 import reward_pb2, worker_pb2

ROLLOUT = (
    'services.rollout={role="rollout",address="127.0.0.1:7199",device="cpu",model="runs/arithmetic/model"}'
)
"""Setting that gives a config a rollout service, which generates for its actor."""
VALUES = 'services.values={role="values",address="127.0.0.1:7198",device="cpu",model="runs/arithmetic/model"}'
"""Setting that gives a config a values service, which computes the values of its critic."""
BESIDE = ("describe_weights", "load_weights")
QUICKSTARTS = Path(__file__).parent.parent.parent / "deploy" / "quickstart"


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def numbers(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).random(count)


@dataclass
class Weather:
    """Random delays of calls, waits for another call, and a failure of the n-th call of all.

    Attributes:
        seed: Seed of the delays.
        longest_s: Longest delay of a call, in seconds.
        fails: Number of the call that fails; 0: none.
        after: For a call, "service.method", step and how many-th in the step, "service.method" and step of a call that
            must begin before it ends; it fails where that does not begin within ten seconds.
        losses: Numbers of the calls of rewards, from 1 in the order in which they begin, with which their service is
            lost, and all other calls of it that are under way.
    """

    seed: int = 0
    longest_s: float = 0.0
    fails: int = 0
    after: Mapping[tuple[str, int, int], tuple[str, int]] = field(default_factory=dict)
    losses: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._begun: Counter[tuple[str, int]] = Counter()
        self._rewards = 0
        self._events: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)

    def strikes(self, call: str) -> bool:
        """Whether the service of a call that begins is lost with it."""
        is_of_reward = call.endswith(".compute_reward")
        self._rewards += is_of_reward
        return is_of_reward and self._rewards in self.losses

    async def pass_over(self, call: str, step: int) -> None:
        """A call of a step, which has begun, goes on after this."""
        self._begun[call, step] += 1
        self._events[call, step].set()
        if self._begun.total() == self.fails:
            raise RlhfError(f"{call}: struck by lightning")
        await asyncio.sleep(self._random.uniform(0, self.longest_s))
        if other := self.after.get((call, step, self._begun[call, step])):
            async with asyncio.timeout(10):
                await self._events[other].wait()


@dataclass
class Entry:
    """A call in the order in which its service executed it; `born` is the version of the first token of each row that
    is generated."""

    service: str
    method: str
    step: int
    version: int
    rows: tuple[bytes, ...] = ()
    born: tuple[int, ...] = ()


class SimulatedRanks:
    """Stands for the `FanOut` of a service of one rank.

    Attributes:
        state: State of the service: its seed and policy version.
    """

    def __init__(self, service: str, weather: Weather, log: list[Entry], state: tuple[int, int]) -> None:
        self.service, self.state, self.state_id = service, state, ""
        self._arrived = state
        self.clients = [SimpleNamespace(service=service)]
        self._weather, self._log = weather, log
        self._prepared: dict[int, tuple[object, ...]] = {}
        self._turn = asyncio.Lock()
        self._calls: set[str] = set()
        self.is_lost, self.epoch = False, 0

    async def start_again(self, deadline: float, may_be_same: bool) -> bool:
        """The service is started again, which takes a moment."""
        await asyncio.sleep(0.01)
        self.is_lost, self.epoch = False, self.epoch + 1
        return True

    def address(self, header: Any, started_unix_ns: int, *, beside: bool = False) -> None:
        """Numbers are not looked at: the lock of `send` keeps the order."""

    async def send(
        self,
        method: Method,
        call_id: str,
        requests: list[bytes],
        timeout_s: float,
        was_sent: Callable[[], None],
        *,
        beside: bool = False,
    ) -> list[Any]:
        was_sent()
        assert call_id not in self._calls, "a rank that was not started again has the error of this call"
        self._calls.add(call_id)
        epoch = self.epoch
        if self.is_lost or self._weather.strikes(f"{self.service}.{method.snake_name}"):
            self.is_lost = True
            raise ServiceLost(f"{self.service}: gone with the wind")
        async with contextlib.nullcontext() if beside else self._turn:
            request = method.request.FromString(requests[0])
            await self._weather.pass_over(f"{self.service}.{method.snake_name}", request.call.step)
            if self.is_lost or epoch != self.epoch:
                raise ServiceLost(f"{self.service}: gone with the wind")
            return [self._answer(method, request)]

    async def cancel(self, call_id: str) -> list[Any]:
        return []

    async def reach_all(self, method: Method, request: Any, timeout_s: float) -> list[Any]:
        return [method.response()]

    def _answer(self, method: Method, request: Any) -> Any:
        name, step = method.snake_name, request.call.step
        rows = wire.from_proto(request.batch) if method.takes_rows else Batch(0, {})
        values = values_of(rows)
        entry = Entry(self.service, name, step, self.state[1])
        response = method.response()
        if name == "generate_sequences":
            made = self._generated(values, request)
            if not request.segment_tokens:
                entry.rows = rows_of(made["response_ids"])
                versions = made["response_versions"]
                entry.born = tuple(int(versions.row(row)[0]) for row in range(versions.rows))
        else:
            made = self._made(name, values)
        if name == "describe_weights":
            response.outcome.state_id = json.dumps(self.state)
        elif name == "load_weights":
            seed, version = json.loads(request.state_id)
            self._arrived = seed, version
        elif name == "commit_weights":
            self.state = self._arrived
        if name == "prepare_update":
            entry.rows = rows_of(values["response_ids"])
            self._prepare(request, values)
        if name == "update_actor":
            self._use_prepared(request, values)
        if name.startswith("update_"):
            entry.rows = rows_of(values["response_ids"])
            self.state = (
                digest(self.state, sorted((k, bytes_of(v)) for k, v in values.items())),
                self.state[1] + 1,
            )
        if name == "compute_reward":
            lengths = values["response_ids"].lengths
            scores = [digest(row) % 5 / 4 for row in rows_of(values["response_ids"])]
            response.scores.extend(reward_pb2.RowScore(score=score) for score in scores)
            assert len(lengths) == len(scores)
        elif made:
            response.batch.CopyFrom(wire.to_proto(Batch.of(**made)))
        response.outcome.policy_version = self.state[1]
        self._log.append(entry)
        return response

    def _prepare(self, request: Any, values: Mapping[str, Any]) -> None:
        """Keeps what an update has been given of rows, to be compared with what it is given itself."""
        found = prepared_rows(request, values, self.state)
        assert not found.keys() & self._prepared.keys(), "a row is prepared once"
        self._prepared |= found

    def _use_prepared(self, request: Any, values: Mapping[str, Any]) -> None:
        whole = prepared_rows(request, values, self.state)
        assert bool(self._prepared) == request.prepared
        assert self._prepared.items() <= whole.items(), "a row was prepared as it is trained on"
        assert len(self._prepared) < len(whole), "the last chunk is not prepared"
        self._prepared = {}

    def _generated(self, values: Mapping[str, Any], request: Any) -> dict[str, Any]:
        """Responses of 2, 3 or 4 tokens, of which a call adds at most `segment_tokens`."""
        call, prompts = request.call, values["prompt"]
        where = ("greedy",) if request.sampling.greedy else (call.seed, call.step, call.ordinal)
        nothing = Jagged(np.zeros(0, np.int64), np.zeros(len(prompts), np.int64))
        before, versions = values.get("partial_ids", nothing), values.get("partial_versions", nothing)
        rows, born = [], []
        for i, (number, text) in enumerate(zip(wire.row_numbers(request.batch), prompts, strict=True)):
            count = min(2 + int(number) % 3 - int(before.lengths[i]), request.segment_tokens or 4)
            drawn = numbers(digest(self.state, *where, int(number), text), count)
            rows.append(np.concatenate([before.row(i), (drawn * 2**31).astype(np.int64)]))
            born.append(np.concatenate([versions.row(i), np.full(count, self.state[1])]).astype(np.int64))
        lengths = np.asarray([len(row) for row in rows])
        ids = Jagged(np.concatenate(rows), lengths)
        log_probs = Jagged((-np.concatenate(rows) / 2**31).astype(np.float32), lengths)
        made: dict[str, Any] = {"prompt_ids": ids, "response_ids": ids, "rollout_log_probs": log_probs}
        made["response_versions"] = Jagged(np.concatenate(born), lengths)
        most = request.sampling.max_new_tokens
        if request.return_ends:
            made["turn_end"] = ["stop" if length < most else "length" for length in lengths]
        return made | ({"response": ["x"] * len(prompts)} if request.return_text else {})

    def _made(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        column = {
            "compute_log_prob": "log_probs",
            "compute_values": "values",
            "compute_ref_log_prob": "ref_log_probs",
        }
        if name not in column:
            return {}
        ids = values["response_ids"]
        made = np.concatenate([numbers(digest(self.state, row), len(row) // 8) for row in rows_of(ids)])
        return {column[name]: Jagged(-made.astype(np.float32), ids.lengths)}


def prepared_rows(
    request: Any, values: Mapping[str, Any], state: tuple[int, int]
) -> dict[int, tuple[object, ...]]:
    """The values that an update reads of each row, by its number, and the id of the update."""
    call = request.call
    update = (call.step, call.ordinal, state, str(request.loss), str(request.schedule), request.temperature)
    rows = zip(*(list(row_values(values[name])) for name in sorted(values)), strict=True)
    return {
        int(number): (*update, *row)
        for number, row in zip(wire.row_numbers(request.batch), rows, strict=True)
    }


def row_values(values: Any) -> Iterator[bytes]:
    """Values of each row of a column."""
    jagged = isinstance(values, Jagged)
    return (
        (values.row(row) if jagged else np.asarray(values[row])).tobytes()
        for row in range(values.rows if jagged else len(values))
    )


def values_of(rows: Batch) -> dict[str, Any]:
    return {name: each.values for name, each in rows.columns.items() if isinstance(each, LocalColumn)}


def bytes_of(values: Any) -> object:
    if isinstance(values, list):
        return values
    return values.values.tobytes() if isinstance(values, Jagged) else np.asarray(values).tobytes()


def rows_of(ids: Jagged[np.ndarray]) -> tuple[bytes, ...]:
    return tuple(ids.row(row).tobytes() for row in range(ids.rows))


class Notes:
    """Stands for the recorder: keeps the metrics of each step, and the calls."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.records: list[tuple[int, Any]] = []
        self.samples_of: list[tuple[int, Any]] = []
        self.rollouts_of: dict[int, Any] = {}
        self.said: list[str] = []
        self.progress = SimpleNamespace(message=self.said.append)
        self.path = Path()

    @property
    def metric_names(self) -> list[str]:
        return list(self.metrics)  # type: ignore[arg-type]

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert step not in self.metrics
        self.metrics[step] = {
            k: v for k, v in metrics.items() if not k.startswith(("time/", "mem/", "rank/"))
        }

    def calls(self, step: int, records: list[Any], rows: int = 0) -> None:
        self.records += [(step, record) for record in records]

    def samples(self, step: int, rows: Any) -> None:
        self.samples_of.append((step, rows))

    def rollouts(self, step: int, rows: Any) -> None:
        self.rollouts_of[step] = rows


class Saver:
    """Stands for the checkpointer: keeps the state of the run and of its services."""

    def __init__(self, every: int, states: Callable[[], dict[str, tuple[int, int]]]) -> None:
        self.every, self.states = every, states
        self.saved: dict[int, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {}
        self.cuts: list[int] = []

    def begin(self, state: Callable[[], Any]) -> None:
        state()

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return bool(self.every) and step % self.every == 0

    def after_step(
        self, step: int, metrics: Any, state: Callable[[], Any], *, is_cut: bool, **others: Any
    ) -> None:
        self.cuts += [step] if is_cut else []
        self.saved[step] = json.loads(json.dumps(state())), self.states()


@dataclass
class Simulation:
    """A run on simulated services, and what was seen of it."""

    config: Config
    algorithm: Any
    weather: Weather
    every: int = 0
    resumed: tuple[dict[str, Any], dict[str, tuple[int, int]]] | None = None
    log: list[Entry] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    said: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)

    def execute(self) -> Simulation:
        state, states = self.resumed or (None, {})
        session = Session(seed=self.config.run.seed, timeout_s=20.0, save_timeout_s=20.0)
        self.cluster = cluster = Cluster(self.config, session)
        self.ranks = {
            name: SimulatedRanks(name, self.weather, self.log, states.get(name, (digest(name), 0)))
            for name in self.config.services
        }
        for name, table in self.config.services.items():
            cluster.groups[name] = group_type(table.role)(
                self.ranks[name],  # type: ignore[arg-type]
                worker_pb2.DescribeResponse(
                    role=table.role,
                    epoch=1,
                    ranks=[worker_pb2.RankInfo()],
                    mesh=worker_pb2.MeshShape(pipeline=1, tensor=1, data=1),
                    input_form=worker_pb2.INPUT_FORM_TENSOR,
                    methods=[
                        worker_pb2.MethodInfo(
                            name=method.path[1:],
                            beside=name in BESIDE and getattr(table, "second_buffer", False),
                        )
                        for name, method in group_methods(table.role).items()
                    ],
                ),
                self.config.devices_of(name),
                session,
                cluster._placement,
                cluster._loop,
                learns=table.keeps_state or name in self.config.valuers.values(),
            )
            if allowed := table.allowed_restarts:
                again, report = self.ranks[name].start_again, self.replaced.append
                cluster.groups[name].replacement = Replacement(
                    name, allowed, 10.0, again, self.said.append, report
                )
        self.saver = Saver(self.every, self.states)
        if state:
            session.newest = StepContext(state["step"])
        for source, receiver in self.config.receivers.items():
            results(sync_weights(cluster.groups[source], [cluster.groups[receiver]]).calls)
        run = Run(
            self.config,
            load_data(self.config),
            cluster,
            self.notes,  # type: ignore[arg-type]
            checkpointer=self.saver,  # type: ignore[arg-type]
            resumed=state,
        )
        try:
            with run:
                self.algorithm(run)
        finally:
            cluster._loop.close()
        return self

    def states(self) -> dict[str, tuple[int, int]]:
        return {name: ranks.state for name, ranks in self.ranks.items()}


def simulate(
    directory: Path,
    name: str,
    *settings: str,
    weather: Weather | None = None,
    every: int = 0,
    resumed: Any = None,
    algorithm: Any = None,
) -> Simulation:
    """Executes an algorithm on simulated services.

    Args:
        directory: Directory for the rows.
        name: Name of the algorithm whose configuration the run has.
        settings: Settings of its config, "key.path=value". With ROLLOUT it has a rollout service.
        weather: Delays and failures. Default: none.
        every: Number of steps between checkpoints. 0: none.
        resumed: What `Saver.saved` has of the step to go on from.
        algorithm: The algorithm. Default: that of this name.
    """
    found = algorithms.find_algorithm(name)
    for part in ("train", "heldout"):
        path = directory / f"{part}.jsonl"
        if not path.exists():
            rows = [
                json.dumps({"prompt": f"{part} {i}", "ground_truth": "x", "response": "y"}) + "\n"
                for i in range(12)
            ]
            path.write_text("".join(rows))
    config = load(
        QUICKSTARTS / f"{found.quickstart}.toml",
        (
            f"data.train='{directory / 'train.jsonl'}'",
            f"data.heldout='{directory / 'heldout.jsonl'}'",
            "data.prompts_per_step=4",
            "rollout.samples_per_prompt=2",
            "algorithm.mini_batch_size=4",
            "run.steps=5",
            "run.samples=0",
            "run.evaluate_every=2",
            *settings,
        ),
    )
    configured = found.configure(config)
    return Simulation(configured, algorithm or found, weather or Weather(), every, resumed).execute()
