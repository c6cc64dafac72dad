"""Sessions that share a service of several ranks, which all run the same calls in one order, whatever the orders of
arrival: queues of real ranks in one process, with rounds between them that are simulated."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.contract import group_methods
from rlhf.errors import DeadlineExceeded, OutOfStep, PeerFailed, Refused, RlhfError
from rlhf.v1 import common_pb2
from services.runtime import fetches as fetches_module
from services.runtime import sessions, turn_queue
from services.runtime.execution import CallQueue
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reference import ReferenceTable

TABLE = ReferenceTable(role="reference", address="127.0.0.1:1", model=Path())
METHODS = group_methods("reference")
NAMES = ("synchronize", "compute_ref_log_prob", "profile", "compute_ref_log_prob", "compute_ref_log_prob")
"""Methods of a session's calls, in turn: two of them without a meeting of the ranks."""
SESSIONS = ("a", "b", "c")
WITHIN_S = 20.0
"""Deadline of calls that are expected to end well."""

Call = tuple[str, int]
"""A call's session and sequence number."""
Delivery = tuple[int, str, int]
"""Arrival of a session's next call at a rank: rank, session, and turns of the event loop until the next arrival."""


class SimulatedRound:
    """A round between ranks of one process, which ends when every rank has begun it."""

    def __init__(self, size: int) -> None:
        self.notes: dict[int, list[float]] = {}
        self._size = size
        self._is_over = threading.Event()
        self._arrivals: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()

    def begin(self, rank: int, note: Sequence[float]) -> None:
        with self._lock:
            self.notes[rank] = list(map(float, note))
            if len(self.notes) == self._size:
                self._is_over.set()
                for arrival in self._arrivals:
                    arrival.get_loop().call_soon_threadsafe(arrival.set_result, None)

    def result(self) -> list[list[float]]:
        return [self.notes[rank] for rank in range(self._size)]

    def wait(self, until: float) -> list[list[float]]:
        if not self._is_over.wait(until - time.monotonic()):
            raise OutOfStep("a peer did not come")
        return self.result()

    async def arrive(self) -> list[list[float]]:
        with self._lock:
            is_over = self._is_over.is_set()
            arrival = asyncio.get_running_loop().create_future()
            if not is_over:
                self._arrivals.append(arrival)
        if not is_over:
            await arrival
        return self.result()


class AllRounds:
    """The rounds of the ranks, in the order in which each rank begins them. Thread-safe."""

    def __init__(self) -> None:
        self._rounds: list[SimulatedRound] = []
        self._lock = threading.Lock()

    def get(self, number: int, size: int) -> SimulatedRound:
        with self._lock:
            if number == len(self._rounds):
                self._rounds.append(SimulatedRound(size))
            return self._rounds[number]


@dataclass
class SimulatedRanks(Ranks):
    """One rank of several in one process."""

    all_rounds: AllRounds = field(default_factory=AllRounds)

    def begin_round(self, note: Sequence[float]) -> Any:
        begun = self.all_rounds.get(self.rounds, self.size)
        self.rounds += 1
        begun.begin(self.rank, note)
        return begun


class Recorder(Worker):
    """Records its collective calls, in which all ranks have to be at the same one."""

    role = "reference"
    is_frozen = True

    def __init__(self, ranks: SimulatedRanks) -> None:
        super().__init__(TABLE, ranks)
        self.computed: list[Call] = []

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        mine = SESSIONS.index(call.call.session), call.call.sequence
        total = self.ranks.total(mine, call.peers_deadline)
        assert total == [self.ranks.size * number for number in mine], "ranks compute different calls"
        self.computed.append((call.call.session, call.call.sequence))
        return CallResult()

    @register("ONE_TO_ALL", collective=False)
    def profile(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult()


class Fetches:
    """A fetcher whose fetches for one session last until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def fetch(self, batch: Any, deadline: float, relay: Any, **options: Any) -> Any:
        if relay.lease.session == "a":
            self.released.wait(WITHIN_S)
        return SimpleNamespace(fetched_bytes=0, traffic={}, rows=0, values={}, verify=lambda: None)


class Service:
    """Ranks of a service that several sessions share, and the calls that they were sent."""

    def __init__(self, size: int, fetches: Any = None) -> None:
        store = cast(
            Any,
            SimpleNamespace(
                endpoint=None, begin=lambda name: None, end=lambda name: None, release=lambda name: None
            ),
        )
        shared = AllRounds()
        self.ranks = [SimulatedRanks(rank, size, epoch=1, all_rounds=shared) for rank in range(size)]
        self.workers = [Recorder(ranks) for ranks in self.ranks]
        self.queues = [CallQueue(worker, store, fetches) for worker in self.workers]
        self.sent: dict[tuple[int, str, int], asyncio.Future[Any]] = {}
        for queue in self.queues:
            for name in SESSIONS:
                queue.sessions.opened_stream(name)

    def send(self, rank: int, session: str, number: int, within_s: float = WITHIN_S, **fields: Any) -> None:
        """Sends a rank a call of a session by its number."""
        method = METHODS[NAMES[number % len(NAMES)]]
        worker: Any = self.workers[rank]
        start = 1 + SESSIONS.index(session)
        header = common_pb2.Call(
            call_id=f"{session}_{number}", session=session, sequence=number, session_started_unix_ns=start
        )
        request = method.request(call=header, **fields)
        registration = getattr(type(worker), method.snake_name).registration
        try:
            made = self.queues[rank].start(method, registration, request, within_s)
        except RlhfError as error:
            made = asyncio.get_running_loop().create_future()
            made.set_exception(error)
        self.sent[rank, session, number] = made

    async def ended(self) -> Mapping[tuple[int, str, int], BaseException | None]:
        """Waits for all calls; the error of each, by (rank, session, number)."""
        await asyncio.wait(self.sent.values(), timeout=WITHIN_S)
        assert all(made.done() for made in self.sent.values()), "a call does not end"
        return {key: made.exception() for key, made in self.sent.items()}

    async def close(self) -> None:
        """Ends the threads."""
        for queue in self.queues:
            await queue.drain()

    def assert_in_order(self) -> None:
        """All ranks have computed the same calls in the same order, each session's by their numbers."""
        computed = self.workers[0].computed
        assert all(worker.computed == computed for worker in self.workers)
        for session in SESSIONS:
            numbers = [number for name, number in computed if name == session]
            assert numbers == sorted(numbers)


@contextmanager
def impatient(missing_s: float) -> Iterator[None]:
    """Ranks that wait for a missing call for a short time."""
    before, turn_queue.MISSING_S = turn_queue.MISSING_S, missing_s
    try:
        yield
    finally:
        turn_queue.MISSING_S = before


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(SESSIONS), st.integers(0, 4)), min_size=0, max_size=50
)


async def deliver(
    service: Service, arrivals: Sequence[Delivery], num_calls: int, lost: Any = (), within_s: float = WITHIN_S
) -> None:
    """Sends every rank all calls of all sessions but the lost ones, each session's in order: first those of the
    arrivals, then the rest."""
    size, next_of = len(service.ranks), {}
    rest = [(rank, name, 0) for _ in range(num_calls) for rank in range(size) for name in SESSIONS]
    for rank, name, turns in [*arrivals, *rest]:
        number = next_of.get((rank, name), 0) + 1
        if rank >= size or number > num_calls:
            continue
        next_of[rank, name] = number
        if (rank, name, number) not in lost:
            service.send(rank, name, number, within_s if name == "a" else WITHIN_S)
        for _ in range(turns):
            await asyncio.sleep(0)


@pytest.mark.timeout(120)
@given(size=st.integers(2, 3), arrivals=ARRIVALS)
@settings(deadline=None, max_examples=60)
def test_ranks_run_the_calls_of_all_sessions_in_one_order_whatever_the_order_of_arrival(
    size: int, arrivals: list[Delivery]
) -> None:
    async def main() -> None:
        service = Service(size)
        await deliver(service, arrivals, num_calls=5)
        errors = await service.ended()
        assert not any(errors.values()), errors
        service.assert_in_order()
        assert len(service.workers[0].computed) == 3 * len(SESSIONS)
        await service.close()

    asyncio.run(main())


LOST = st.sets(st.tuples(st.integers(0, 2), st.just("a"), st.integers(2, 5)), max_size=4)


@pytest.mark.timeout(120)
@given(size=st.integers(2, 3), arrivals=ARRIVALS, lost=LOST, ends=st.booleans())
@settings(deadline=None, max_examples=25)
def test_a_session_whose_calls_are_lost_or_that_ends_does_not_disturb_the_others(
    size: int, arrivals: list[Delivery], lost: set[tuple[int, str, int]], ends: bool
) -> None:
    """Its own calls end, at their deadlines if not before, and succeed on all ranks or on none."""

    async def main() -> None:
        service = Service(size)
        await deliver(service, arrivals, 5, lost, within_s=0.3)
        if ends:
            for queue in service.queues:
                queue.sessions.end("a")
                await asyncio.sleep(0)
        errors = await service.ended()
        assert not any(error for (_, name, _), error in errors.items() if name != "a"), errors
        assert all(isinstance(error, RlhfError | None) for error in errors.values()), errors
        service.assert_in_order()
        await service.close()

    with impatient(0.05):
        asyncio.run(main())


def test_rows_that_one_session_waits_for_hold_up_no_other() -> None:
    """As those of an actor that has died."""

    async def main() -> None:
        fetches = Fetches()
        service = Service(2, fetches)
        for name in ("a", "b"):
            for rank in range(2):
                service.send(rank, name, 1, batch=common_pb2.Batch(rows=0))
                service.send(rank, name, 3)
        for rank in range(2):
            service.send(rank, "b", 2)
        await asyncio.wait_for(
            asyncio.gather(*(service.sent[rank, "b", number] for rank in range(2) for number in (1, 2, 3))),
            10,
        )
        assert not service.sent[0, "a", 1].done()
        fetches.released.set()
        for rank in range(2):
            service.send(rank, "a", 2)
        assert not any((await service.ended()).values())
        await service.close()

    asyncio.run(main())


class OneHangs(Fetches):
    """A fetcher that keeps no deadline: fetches of batches with rows last until they are released."""

    def fetch(self, batch: Any, deadline: float, relay: Any, **options: Any) -> Any:
        if batch.rows:
            self.released.wait(WITHIN_S)
        return SimpleNamespace(fetched_bytes=0, traffic={}, rows=0, values={}, verify=lambda: None)


def test_all_ranks_learn_that_the_rows_of_one_did_not_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half a second for the rows, and all the rest for the ranks to agree, however busy the host is.
    monkeypatch.setattr(fetches_module, "time_to_agree", lambda deadline: deadline - 2 * WITHIN_S + 1)

    async def main() -> None:
        fetches = OneHangs()
        service = Service(2, fetches)
        for rank in range(2):
            service.send(rank, "a", 1, batch=common_pb2.Batch(rows=rank))
        for number in (2, 3):
            for rank in range(2):
                service.send(rank, "a", number)
        errors = await service.ended()
        fetches.released.set()
        assert isinstance(errors[0, "a", 1], PeerFailed)
        assert isinstance(errors[1, "a", 1], DeadlineExceeded)
        assert "its rows were not there by its deadline" in str(errors[1, "a", 1])
        assert not any(errors[rank, "a", number] for rank in range(2) for number in (2, 3))
        await service.close()

    asyncio.run(main())


def test_calls_of_a_session_that_has_ended_are_refused_and_the_others_go_on() -> None:
    async def main() -> None:
        service = Service(2)
        for name in ("a", "b"):
            for rank in range(2):
                service.send(rank, name, 1)
        assert not any((await service.ended()).values())
        for queue in service.queues:
            queue.sessions.end("a")
        for name in ("a", "b"):
            for rank in range(2):
                service.send(rank, name, 2)
        errors = await service.ended()
        for rank in range(2):
            assert isinstance(errors[rank, "a", 2], Refused)
            assert errors[rank, "b", 2] is None
        await service.close()

    asyncio.run(main())


def test_a_session_whose_calls_come_without_a_stream_ends_after_its_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "SILENCE_S", 0.3)

    async def main() -> None:
        fetches = Fetches()
        service = Service(1, fetches)
        (queue,) = service.queues
        for name in SESSIONS:
            queue.sessions.closed_stream(name)
            queue.sessions.end(name)
        service.send(0, "a", 1, batch={"rows": 1})
        await asyncio.sleep(1)
        assert queue.sessions.names == {"a"}, "its call fetches rows still"
        fetches.released.set()
        assert not any((await service.ended()).values())
        deadline = time.monotonic() + WITHIN_S
        while queue.sessions.names:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await service.close()

    asyncio.run(main())
