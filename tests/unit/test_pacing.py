"""Pacing and admission of calls in random schedules: stragglers, long tails and failed calls, as pure code in virtual
time. Each invariant is shown to catch a planted bug."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from unit.paced_steps import Deadlock, PacedRun, Row, Schedule, check

from client.gate import Gate
from controller.role_groups.placement import Placement
from controller.training.loop import OpenStep, StepLoop

pytestmark = pytest.mark.timeout(600)


def test_random_schedules_train_each_row_once_within_the_bound() -> None:
    check_all(map(Schedule.drawn, range(300)))


@pytest.mark.full
def test_many_random_schedules_train_each_row_once_within_the_bound() -> None:
    check_all(map(Schedule.drawn, range(1000, 11000)))


def test_schedules_reach_what_they_are_about() -> None:
    """Rows as old as the bound, unfinished long responses, evaluations and checkpoints within overlap, failures."""
    drawn = [Schedule.drawn(seed) for seed in range(200)]
    runs = [PacedRun(each).execute() for each in drawn if not each.fails]
    ages = {
        (run.schedule.ahead, version - min(of for _, of in row.versions))
        for run in runs
        for batch in run.drawn
        for row in batch
        for version in row.trained
    }
    assert {(ahead, ahead) for ahead in range(4)} <= ages
    mixed = [
        row for run in runs for batch in run.drawn for row in batch if len({v for _, v in row.versions}) > 1
    ]
    assert len(mixed) > 50
    assert sum(len(run.evaluated) for run in runs) > 100
    assert sum(len(run.cuts) for run in runs) > 50
    assert sum(bool(each.fails) for each in drawn) > 30
    spans = [{device for pool in each.pools for device in pool} for each in drawn]
    assert {len(span) for span in spans} == {1, 2, 3}


def keep_at_once(gate: Gate, begin: Callable[[], None], result: Any) -> None:
    gate.reached(needs_kept=False)
    begin()


def flush_backwards(gate: Gate) -> None:
    while gate._kept:
        gate._kept.pop()[0]()


def flush_all_but_one(gate: Gate) -> None:
    while len(gate._kept) > 1:
        gate._kept.popleft()[0]()


def drop_silently(gate: Gate, error: Exception) -> None:
    gate._kept.clear()
    gate.is_open = True


def overlap_by_one_more(loop: StepLoop, number: int) -> int:
    return loop._table.ahead + 1


def enter_without_order(placement: Placement, devices: frozenset[str], queue: object, time_s: float) -> Any:
    return ENTER(placement, frozenset({f"{id(queue)}"}), queue, time_s)


def reach_late(loop: StepLoop, number: int, evaluation: Any, needs_kept: bool) -> None:
    REACHED(loop, number - 1, evaluation, needs_kept)


def reach_without_evaluation(loop: StepLoop, *given: Any) -> None:
    vars(loop)["_finish_evaluation"] = lambda: None
    REACHED(loop, *given)
    del vars(loop)["_finish_evaluation"]


def check_all(schedules: Iterable[Schedule]) -> None:
    for schedule in schedules:
        check(schedule)


def train_the_short(run: PacedRun, rows: list[Row]) -> None:
    TRAIN(run, [row for row in rows if row.length < 8])


def train_again(run: PacedRun, rows: list[Row]) -> None:
    TRAIN(run, [*rows, *run.drawn[0]])


ENTER, REACHED, TRAIN = Placement.enter, StepLoop._reached, PacedRun._train
PLANTED = {
    "a gate keeps nothing": (Gate, "keep", keep_at_once, "other weights|on one device|version of its step"),
    "a gate begins its calls backwards": (
        Gate,
        "flush",
        flush_backwards,
        "other weights|deadlock|no call is under",
    ),
    "a gate loses a call": (Gate, "flush", flush_all_but_one, "no call is under way|pending for ever"),
    "a gate that is dropped leaves its calls": (Gate, "drop", drop_silently, "pending for ever"),
    "segments are not generated when they are due": (
        StepLoop,
        "_generate_due",
        lambda *_: None,
        "other weights|no call is under way",
    ),
    "a step does not generate the rest": (OpenStep, "generate", lambda *_: None, "no call is under way"),
    "calls do not take turns on devices": (
        Placement,
        "enter",
        enter_without_order,
        "on one device|other weights",
    ),
    "an evaluation is not waited for": (
        StepLoop,
        "_reached",
        reach_without_evaluation,
        "version of its step",
    ),
    "a checkpoint does not end the overlap": (
        StepLoop,
        "_overlap",
        lambda loop, _: loop._table.ahead,
        "checkpoint",
    ),
    "long responses are thrown away": (PacedRun, "_train", train_the_short, "not those drawn"),
    "rows are trained on again": (
        PacedRun,
        "_train",
        train_again,
        "not those drawn|beyond the bound|trained on twice",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, said = PLANTED[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match=said):
        check_all(map(Schedule.drawn, range(500)))


def test_rows_beyond_the_bound_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLoop, "_overlap", overlap_by_one_more)
    monkeypatch.setattr(StepLoop, "_reached", reach_late)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_all(replace(Schedule.drawn(seed), waits="rewards", segments=1) for seed in range(500))


def test_a_deadlock_is_caught() -> None:
    run = PacedRun(Schedule.drawn(0))
    with run._patched(), pytest.raises(Deadlock):
        run.events.wait(
            run._call(run.reward, "x", run.session.newest, [__import__("concurrent").futures.Future()])
        )
