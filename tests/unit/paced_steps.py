"""A model of runs whose steps overlap, in virtual time and on one thread: the loop over steps, its gates, the order of
calls on devices and the futures are the real ones; services are queues whose calls last for random times."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from client import waiting
from client.session import AFTER_UPDATES, Session, StepContext
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise, all_of, lateness_of, pass_on, resolve_after, results, then
from controller.role_groups.group import GENERATES, _begun
from controller.role_groups.placement import Place, Placement
from controller.training import loop
from controller.training.loop import StepLoop
from controller.training.step import Step
from rlhf.errors import RlhfError

PROMPTS = 3
"""Prompts of a batch."""
SEGMENT = 4
"""Tokens that a call adds to a response where it has several segments."""


class Deadlock(AssertionError):
    """Raised where the loop waits and no call is under way."""


class Events:
    """Virtual time: stands for `ExecutingThreads`, so that the loop's waits execute what is due until they end."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), work))

    def step(self) -> bool:
        """Executes the next event; returns False where there is none."""
        if not self._due:
            return False
        self.now, _, work = heapq.heappop(self._due)
        work()
        return True

    def wait(self, future: Future[Any]) -> None:
        while not future.done():
            if not self.step():
                raise Deadlock("the loop waits, and no call is under way")


@dataclass
class Row:
    """A prompt that was drawn. `versions` are those of the weights that generated each segment of its response."""

    number: int
    length: int
    versions: list[tuple[int, int]] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)


@dataclass
class Executed:
    """A call that a service has executed."""

    service: str
    method: str
    step: int
    start: float
    end: float
    devices: frozenset[str]


@dataclass
class Service:
    """Executes calls one after another, in the order in which they were sent."""

    name: str
    devices: frozenset[str]
    learns: bool = False
    version: int = 0
    queue: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(frozen=True)
class Schedule:
    """Random events of a run. `slow` makes durations long-tailed; `fails` is the number of the call that fails, 0 for
    none; `waits` says for which results the algorithm waits in the loop."""

    seed: int
    ahead: int
    segments: int
    steps: int
    evaluate_every: int
    checkpoint_every: int
    waits: str
    has_rollout: bool
    pools: tuple[tuple[str, ...], ...]
    slow: float
    fails: int

    @staticmethod
    def drawn(seed: int) -> Schedule:
        chosen = random.Random(seed)
        ahead = chosen.choice((0, 1, 1, 2, 3))
        devices = "abc"[: chosen.randint(1, 3)]
        return Schedule(
            seed,
            ahead,
            chosen.randint(1, min(ahead + 1, 3)),
            chosen.randint(2, 6),
            chosen.choice((0, 0, 1, 2)),
            chosen.choice((0, 0, 0, 2, 3)),
            chosen.choice(("", "", "", "rewards", "rounds", "all")),
            chosen.random() < 0.5,
            tuple(tuple(chosen.sample(devices, chosen.randint(1, len(devices)))) for _ in range(5)),
            chosen.choice((0.0, 1.0, 4.0)),
            chosen.randint(1, 30) if chosen.random() < 0.25 else 0,
        )


class PacedRun:
    """A run of the model.

    Attributes:
        drawn: Batches of rows, as they were drawn.
        executed: Calls, in the order of their ends.
        calls: Futures of all calls.
        evaluated: Version of the weights that each evaluation measured, by step.
        cuts: Steps after which a checkpoint was written, with the number of calls that were under way.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events, self.placement = Events(), Placement()
        self.session = Session(name="model", now=lambda: self.events.now)
        self._random = random.Random(schedule.seed + 1)
        places = [frozenset(pool) for pool in schedule.pools]
        self.actor, self.critic = Service("actor", places[0], True), Service("critic", places[1], True)
        self.reward, self.reference = Service("reward", places[2]), Service("reference", places[3])
        self.generator = Service("rollout", places[4]) if schedule.has_rollout else self.actor
        self.drawn: list[list[Row]] = []
        self.executed: list[Executed] = []
        self.calls: list[Future[Any]] = []
        self.evaluated: dict[int, int] = {}
        self.cuts: list[tuple[int, int]] = []
        self._begun_calls = 0
        self._is_on_thread = False

    def execute(self) -> PacedRun:
        """Executes the run and everything that is still under way at its end."""
        with self._patched():
            steps: Any = self._loop().steps(None)  # type: ignore[arg-type]
            try:
                self._algorithm(steps)
            finally:
                steps.close()
                while self.events.step():
                    pass
        return self

    def _algorithm(self, steps: Iterator[Step]) -> None:
        waits = self.schedule.waits
        for step in steps:
            made, scored = self._round(step.context, self.drawn[-1])
            rounds = [self.drawn[-1]]
            if waits in ("rewards", "rounds"):
                FutureBatch(PROMPTS, {}, (scored,), step.context).records()
            if waits == "rounds" and self._random.random() < 0.5:
                rounds.append(self._draw())
                again, scored_again = self._round(step.context, rounds[-1])
                made, scored = all_of([made, again]), all_of([scored, scored_again])
            ref = self._call(self.reference, "compute_ref_log_prob", step.context, [made])
            log_probs = self._call(self.actor, "compute_log_prob", step.context, [made])
            values = self._call(self.critic, "compute_values", step.context, [made])
            if waits == "all":
                FutureBatch(PROMPTS, {}, (log_probs,), step.context).records()
            advantages = then(all_of([scored, ref, log_probs, values]), lambda found: found)
            rows = [row for batch in rounds for row in batch]
            ends = [
                self._call(self.critic, "update_critic", step.context, [advantages]),
                self._call(
                    self.actor, "update_actor", step.context, [advantages], partial(self._train, rows)
                ),
            ]
            if self.generator is not self.actor:
                ends.append(self._synced(step.context))
            step.finish(FutureBatch(PROMPTS, {"advantages": advantages}, tuple(ends), step.context))

    def _round(self, step: StepContext, rows: list[Row]) -> tuple[Future[Any], Future[Any]]:
        """Generates the responses to rows, in segments, and scores them."""
        made: list[Future[Any]] = []
        for number in range(self.schedule.segments):

            def generate(number: int = number) -> None:
                for row in rows:
                    if row.length > number * SEGMENT:
                        row.versions.append((number, self.generator.version))

            tokens = max(min(row.length - number * SEGMENT, SEGMENT) for row in rows)
            made = [self._call(self.generator, GENERATES, step, made, generate, number, max(tokens, 0) / 4)]
        return made[0], self._call(self.reward, "compute_reward", step, made)

    def _train(self, rows: list[Row]) -> None:
        for row in rows:
            row.trained.append(self.actor.version)
        self.actor.version += 1

    def _synced(self, step: StepContext) -> Future[Any]:
        """As `RoleGroup.call_with`: one place on the devices of both services."""

        def arrive() -> None:
            self.generator.version = self.actor.version

        both = Service("sync", self.actor.devices | self.generator.devices)
        return self._call(both, "sync_weights", step, (), arrive, AFTER_UPDATES)

    def _call(
        self,
        service: Service,
        method: str,
        step: StepContext,
        inputs: Sequence[Future[Any]],
        work: Callable[[], None] = lambda: None,
        lateness: int = 0,
        longer_s: float = 0.0,
    ) -> Future[Any]:
        """As `RoleGroup.call` and `GroupCall.run`: enters the order of calls, or is kept by a gate; waits for its
        inputs and its place, and is executed."""
        ready = all_of(list(inputs))

        def begin() -> Future[Any]:
            place, result = self.placement.enter(service.devices, service, 1.0), Promise()
            self._begun_calls += 1
            fails = self._begun_calls == self.schedule.fails

            def go_on(done: Future[Any]) -> None:
                if error := done.exception():
                    self._end(place, result, error)
                    return
                turn = Promise()
                turn.add_done_callback(lambda _: self._send(service, place, execute))
                resolve_after(place.first, turn)

            def execute() -> None:
                start = self.events.now
                self.events.after(self._seconds() + longer_s, lambda: end(start))

            def end(start: float) -> None:
                if not fails:
                    work()
                    now = self.events.now
                    self.executed.append(
                        Executed(service.name, method, step.number, start, now, service.devices)
                    )
                self._end(place, result, RlhfError("struck by lightning") if fails else None)
                service.queue.popleft()
                if service.queue:
                    service.queue[0]()

            ready.add_done_callback(go_on)
            return result

        if service.learns and method != GENERATES:
            lateness = AFTER_UPDATES
        result = _begun(begin, step, max(lateness, lateness_of(inputs)))
        self.calls.append(result)
        return result

    def _send(self, service: Service, place: Place, execute: Callable[[], None]) -> None:
        place.was_sent()
        service.queue.append(execute)
        if len(service.queue) == 1:
            execute()

    def _end(self, place: Place, result: Future[Any], error: BaseException | None) -> None:
        place.leave()
        if error:
            result.set_exception(error)
        else:
            result.set_result(SimpleNamespace(parts=()))

    def _seconds(self) -> float:
        slow = self.schedule.slow
        return self._random.random() + (slow * self._random.paretovariate(1.2) if slow else 0.0)

    def _draw(self) -> list[Row]:
        first = sum(map(len, self.drawn))
        lengths = [1 + int(self._random.paretovariate(1.0)) for _ in range(PROMPTS)]
        self.drawn.append([Row(first + i, min(length, 12)) for i, length in enumerate(lengths)])
        return self.drawn[-1]

    def _evaluate(self, context: StepContext, evaluation: object) -> Any:
        """Greedy responses with the weights of the generator; where the loop has begun it on a thread, a future."""

        def note() -> None:
            self.evaluated[context.number] = self.generator.version

        done, is_on_thread = Promise(), self._is_on_thread
        step = self.session.step_of(context)

        def begin() -> None:
            call = self._call(self.generator, GENERATES, step, (), note)
            pass_on(then(call, lambda _: {}), done)

        if not is_on_thread:
            begin()
            return results([done])[0]
        self.events.after(self._seconds(), begin)
        return done

    def _on_thread(self, work: Callable[[], Any], name: str) -> Future[Any]:
        self._is_on_thread = True
        try:
            return work()
        finally:
            self._is_on_thread = False

    def _end_step(self, step: StepContext) -> None:
        step.has_ended = True
        step.wait(1.0)

    def _saved(self, number: int, metrics: object, state: object, *, is_cut: bool, **others: object) -> None:
        if is_cut:
            self.cuts.append((number, sum(not call.done() for call in self.calls)))

    def _loop(self) -> StepLoop:
        schedule = self.schedule

        def batch() -> tuple[FutureBatch, FutureBatch]:
            self._draw()
            return FutureBatch(PROMPTS, {}), FutureBatch(PROMPTS, {})

        feed = SimpleNamespace(
            next_prompts=batch, next_texts=lambda: FutureBatch(PROMPTS, {}), left_out={}, state=dict
        )
        every = schedule.checkpoint_every
        saver = SimpleNamespace(
            is_due=lambda step, is_last: step > 0 and step % every == 0, after_step=self._saved
        )
        parts: tuple[Any, ...] = (
            SimpleNamespace(
                ahead=schedule.ahead,
                steps=schedule.steps,
                evaluate_every=schedule.evaluate_every,
                rollouts_every=0,
            ),
            SimpleNamespace(segments=schedule.segments, chunks=1),
            SimpleNamespace(session=self.session, end_step=self._end_step, device_use=lambda: None),
            SimpleNamespace(calls=lambda *given: None, step=lambda *given: None, metric_names=()),
            feed,
            SimpleNamespace(of=lambda *given: {}, sources={}),
            SimpleNamespace(evaluate=self._evaluate, has_stalled=False),
            SimpleNamespace(after_step=lambda *given, **named: None, verify=lambda: None),
            SimpleNamespace(
                step=0,
                is_ended=False,
                passed=lambda *given, **named: None,
                to_json=dict,
                kept=SimpleNamespace(state=dict),
            ),
            saver if every else None,
        )
        return StepLoop(*parts)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Has the waits of this thread execute events, and what the loop does on threads become events too."""
        idle = SimpleNamespace(is_idle=True, close=lambda: None)
        with (
            patch.object(waiting, "_counted", self.events),
            patch.object(loop, "Deferral", lambda: idle),
            patch.object(loop, "on_thread", self._on_thread),
        ):
            yield


def check(schedule: Schedule) -> None:
    """Executes a schedule and asserts what has to hold of it."""
    run = PacedRun(schedule)
    try:
        run.execute()
        error = None
    except RlhfError as raised:
        error = raised
    rows = [row for batch in run.drawn for row in batch]
    assert all(call.done() for call in run.calls), "a call is pending for ever"
    check_bound(schedule, rows)
    check_turns(run.executed)
    if error:
        assert schedule.fails, error
        assert "struck by lightning" in str(error)
        assert all(len(row.trained) <= 1 for row in rows), "a row is trained on twice"
        return
    trained = Counter(row.number for row in rows for _ in row.trained)
    assert trained == {row.number: 1 for row in rows}, "prompts trained are not those drawn"
    check_versions(schedule, run)
    updates = [each.step for each in run.executed if each.method == "update_actor"]
    assert updates == list(range(1, schedule.steps + 1)), "updates are not in the order of the steps"
    every = schedule.checkpoint_every
    due = set(range(every, schedule.steps + 1, every)) if every else set()
    assert due <= {step for step, _ in run.cuts}, "a checkpoint that is due is no cut"
    assert all(pending == 0 for _, pending in run.cuts), "a call is under way at a checkpoint"
    for step, version in run.evaluated.items():
        assert version == step, "an evaluation is not of the version of its step"


def check_bound(schedule: Schedule, rows: Sequence[Row]) -> None:
    for row in rows:
        numbers = [number for number, _ in row.versions]
        assert numbers == list(range(len(numbers))), "segments of a response are out of order"
        for version in row.trained:
            assert numbers == list(
                range(-(-min(row.length, schedule.segments * SEGMENT) // SEGMENT)) or [0]
            ), "a response is trained on before it is whole"
            oldest = min(version for _, version in row.versions)
            assert 0 <= version - oldest <= schedule.ahead, "a row beyond the bound is trained on"


def check_turns(executed: Sequence[Executed]) -> None:
    """Calls that share a device never overlap."""
    for device in {device for each in executed for device in each.devices}:
        until = 0.0
        for each in sorted(
            (each for each in executed if device in each.devices), key=lambda each: each.start
        ):
            assert each.start >= until, "two calls are on one device at the same time"
            until = each.end


def check_versions(schedule: Schedule, run: PacedRun) -> None:
    """Where the loop does not wait and no checkpoint stops the overlap, segment s of step n has the weights of update
    n + s - ahead - 1, or of update n - 1 where no step n + s comes."""
    if schedule.waits or schedule.checkpoint_every:
        return
    for step, rows in enumerate(run.drawn, 1):
        for row in rows:
            for number, version in row.versions:
                due = step + number - schedule.ahead - 1 if step + number <= schedule.steps else step - 1
                assert version == min(max(due, 0), step - 1), "a segment has other weights than the loop says"
