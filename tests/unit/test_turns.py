"""The order of calls on a rank, as plain data."""

from __future__ import annotations

import pytest

from rlhf.errors import Refused, TooManyCalls
from services.runtime.turns import MAX_WAITING, Ticket, TurnOrder


@pytest.fixture
def turns() -> TurnOrder:
    turns = TurnOrder()
    turns.begin_session("run")
    return turns


def run(turns: TurnOrder, ticket: Ticket) -> None:
    assert turns.ready is ticket
    turns.begin(ticket)
    turns.end(ticket)


def test_ordered_calls_run_by_number_and_unordered_ones_by_arrival(turns: TurnOrder) -> None:
    third, unordered, second, first = (turns.join("run", number) for number in (3, 0, 2, 1))
    for ticket in (unordered, first, second, third):
        run(turns, ticket)
    assert turns.ready is None


def test_one_call_runs_at_a_time(turns: TurnOrder) -> None:
    first, second, unordered = turns.join("run", 1), turns.join("run", 2), turns.join("", 0)
    turns.begin(first)
    assert turns.ready is None
    assert turns.missing is None
    assert not any(turns.may_begin(ticket) for ticket in (second, unordered))
    turns.end(first)
    assert turns.may_begin(second)
    assert turns.may_begin(unordered)


def test_a_number_is_missing_while_later_ones_wait_on_an_idle_rank(turns: TurnOrder) -> None:
    unordered, third = turns.join("run", 0), turns.join("run", 3)
    assert turns.missing == 1
    turns.begin(unordered)
    assert turns.missing is None
    turns.end(unordered)
    turns.abandon("run", 1)
    assert turns.missing == 2
    turns.pass_over_missing()
    assert turns.missing is None
    run(turns, third)
    with pytest.raises(Refused, match="sequence 2 of session 'run', but 4 is next"):
        turns.join("run", 2)


def test_nothing_is_passed_over_while_a_call_runs_or_the_next_one_is_here(turns: TurnOrder) -> None:
    first = turns.join("run", 1)
    turns.join("run", 3)
    turns.pass_over_missing()
    assert turns.next == 1
    turns.begin(first)
    turns.pass_over_missing()
    assert turns.next == 1


def test_a_number_is_one_call_s_until_that_ends(turns: TurnOrder) -> None:
    first, second = turns.join("run", 1), turns.join("run", 2)
    turns.begin(first)
    for number in (1, 2):
        with pytest.raises(Refused, match=f"sequence {number} of session 'run' is another call's"):
            turns.join("run", number)
    turns.end(first)
    with pytest.raises(Refused, match="sequence 1 of session 'run', but 2 is next"):
        turns.join("run", 1)
    run(turns, second)


def test_an_abandoned_number_holds_up_no_call_and_a_call_may_come_by_it_before_its_turn(
    turns: TurnOrder,
) -> None:
    for number in (2, 3):
        turns.abandon("run", number)
    fourth, third = turns.join("run", 4), turns.join("run", 3)
    run(turns, turns.join("run", 1))
    run(turns, third)
    run(turns, fourth)


def test_a_number_of_a_call_that_is_here_is_not_abandoned(turns: TurnOrder) -> None:
    first, second = turns.join("run", 1), turns.join("run", 2)
    turns.begin(first)
    for number in (1, 2):
        turns.abandon("run", number)
    assert turns.next == 1
    turns.end(first)
    run(turns, second)


def test_numbers_that_are_kept_are_bounded(turns: TurnOrder) -> None:
    run(turns, turns.join("run", 1))
    for number in (0, 1, 2 + MAX_WAITING, 1 << 62):
        turns.abandon("run", number)
    assert not turns._abandoned
    with pytest.raises(TooManyCalls, match=f"but 2 is next; at most {MAX_WAITING} calls may wait"):
        turns.join("run", 2 + MAX_WAITING)
    turns.join("run", 1 + MAX_WAITING)


def test_a_call_that_gives_up_leaves_its_number_to_nobody(turns: TurnOrder) -> None:
    first, second, unordered = turns.join("run", 1), turns.join("run", 2), turns.join("run", 0)
    turns.give_up(first)
    turns.give_up(unordered)
    run(turns, second)
    assert turns.ready is None


def test_a_session_begins_at_one_and_calls_of_the_one_before_have_no_turn(turns: TurnOrder) -> None:
    running, old = turns.join("run", 1), turns.join("run", 2)
    turns.begin(running)
    turns.abandon("run", 3)
    turns.begin_session("next")
    first = turns.join("next", 1)
    turns.give_up(old)
    turns.end(running)
    assert turns.next == 1
    assert not turns.may_begin(old)
    run(turns, first)
    with pytest.raises(Refused, match="the current session is 'next'"):
        turns.join("run", 3)


def test_calls_that_wait_are_bounded_and_strangers_take_no_place_of_the_session(turns: TurnOrder) -> None:
    waiting = [turns.join("", 0) for _ in range(MAX_WAITING)]
    with pytest.raises(TooManyCalls, match=f"{MAX_WAITING} calls without a sequence wait already"):
        turns.join("", 0)
    first = turns.join("run", 1)
    run(turns, waiting[0])
    turns.join("", 0)
    assert turns.may_begin(first)
