"""The order of calls on a rank, as plain data."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.errors import Refused, TooManyCalls
from services.runtime.turns import MAX_WAITING, Ticket, TurnOrder


@pytest.fixture
def turns() -> TurnOrder:
    turns = TurnOrder()
    turns.begin_session("run")
    return turns


def run(turns: TurnOrder, ticket: Ticket) -> None:
    assert next(turns.ready) is ticket
    turns.begin(ticket)
    turns.end(ticket)


def test_ordered_calls_run_by_number_and_unordered_ones_by_arrival(turns: TurnOrder) -> None:
    third, unordered, second, first = (turns.join("run", number) for number in (3, 0, 2, 1))
    for ticket in (unordered, first, second, third):
        run(turns, ticket)
    assert not list(turns.ready)


def test_one_call_runs_at_a_time(turns: TurnOrder) -> None:
    first, second, unordered = turns.join("run", 1), turns.join("run", 2), turns.join("", 0)
    turns.begin(first)
    assert not list(turns.ready)
    assert not turns.missing
    assert not any(turns.may_begin(ticket) for ticket in (second, unordered))
    turns.end(first)
    assert turns.may_begin(second)
    assert turns.may_begin(unordered)


def test_a_number_is_missing_while_later_ones_wait_on_an_idle_rank(turns: TurnOrder) -> None:
    unordered, third = turns.join("run", 0), turns.join("run", 3)
    assert turns.missing == {"run": 1}
    turns.begin(unordered)
    assert not turns.missing
    turns.end(unordered)
    turns.abandon("run", 1)
    assert turns.missing == {"run": 2}
    turns.pass_over_missing("run")
    assert not turns.missing
    run(turns, third)
    with pytest.raises(Refused, match="sequence 2 of session 'run', but 4 is next"):
        turns.join("run", 2)


def test_nothing_is_passed_over_while_a_call_runs_or_the_next_one_is_here(turns: TurnOrder) -> None:
    first = turns.join("run", 1)
    turns.join("run", 3)
    turns.pass_over_missing("run")
    assert turns.next_of("run") == 1
    turns.begin(first)
    turns.pass_over_missing("run")
    assert turns.next_of("run") == 1


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
    assert turns.next_of("run") == 1
    turns.end(first)
    run(turns, second)


def test_numbers_that_are_kept_are_bounded(turns: TurnOrder) -> None:
    run(turns, turns.join("run", 1))
    for number in (0, 1, 2 + MAX_WAITING, 1 << 62):
        turns.abandon("run", number)
    assert not turns._sessions["run"].abandoned
    with pytest.raises(TooManyCalls, match=f"but 2 is next; at most {MAX_WAITING} calls may wait"):
        turns.join("run", 2 + MAX_WAITING)
    turns.join("run", 1 + MAX_WAITING)


def test_a_call_that_gives_up_leaves_its_number_to_nobody(turns: TurnOrder) -> None:
    first, second, unordered = turns.join("run", 1), turns.join("run", 2), turns.join("run", 0)
    turns.give_up(first)
    turns.give_up(unordered)
    run(turns, second)
    assert not list(turns.ready)


def test_a_session_begins_at_one_and_calls_of_one_that_has_ended_have_no_turn(turns: TurnOrder) -> None:
    running, old = turns.join("run", 1), turns.join("run", 2)
    turns.begin(running)
    turns.abandon("run", 3)
    turns.end_session("run")
    turns.begin_session("next")
    first = turns.join("next", 1)
    turns.give_up(old)
    turns.end(running)
    assert (turns.next_of("next"), turns.next_of("run")) == (1, 0)
    assert not turns.may_begin(old)
    run(turns, first)
    with pytest.raises(Refused, match="sequence 3 of session 'run', but there is no such session here"):
        turns.join("run", 3)


@pytest.mark.parametrize("number", [1, 7])
def test_a_call_of_a_session_that_has_ended_counts_for_no_other_one_of_its_name(
    turns: TurnOrder, number: int
) -> None:
    """A controller begins its session again on ranks that did not answer for a time, perhaps in a call."""
    for each in range(1, number):
        run(turns, turns.join("run", each))
    running = turns.join("run", number)
    turns.begin(running)
    turns.end_session("run")
    turns.begin_session("run")
    first = turns.join("run", 1)
    turns.end(running)
    assert turns.next_of("run") == 1
    run(turns, first)
    run(turns, turns.join("run", 2))


def test_a_call_of_a_session_that_has_ended_gives_way_for_good_also_where_another_one_has_its_name(
    turns: TurnOrder,
) -> None:
    turns.begin_session("other")
    mine, theirs = turns.join("run", 1), turns.join("other", 1)
    turns.begin(mine)
    turns.await_peers(mine)
    turns.end_session("run")
    turns.begin_session("run")
    turns.give_way(mine, theirs)
    run(turns, theirs)
    assert not turns.may_begin(mine)
    run(turns, turns.join("run", 1))


def test_a_call_of_a_session_that_has_ended_gives_up_no_number_of_another_one_of_its_name(
    turns: TurnOrder,
) -> None:
    """It has waited until its deadline, as after `give_way`."""
    for each in range(1, 3):
        run(turns, turns.join("run", each))
    old = turns.join("run", 3)
    turns.end_session("run")
    turns.begin_session("run")
    run(turns, turns.join("run", 1))
    turns.give_up(old)
    run(turns, turns.join("run", 2))
    run(turns, turns.join("run", 3))


def test_calls_of_two_sessions_run_by_arrival_and_each_session_by_its_numbers(turns: TurnOrder) -> None:
    turns.begin_session("other")
    second = turns.join("run", 2)
    theirs, unordered, first = turns.join("other", 1), turns.join("", 0), turns.join("run", 1)
    assert turns.missing == {}
    for ticket in (theirs, unordered, first, second):
        run(turns, ticket)
    assert not list(turns.ready)


def test_a_missing_number_of_a_session_holds_up_no_other_and_is_passed_over_while_another_one_s_call_runs(
    turns: TurnOrder,
) -> None:
    turns.begin_session("other")
    second, theirs = turns.join("run", 2), turns.join("other", 1)
    assert turns.missing == {"run": 1}
    turns.begin(theirs)
    assert turns.missing == {"run": 1}
    turns.pass_over_missing("run")
    turns.end(theirs)
    run(turns, second)


def test_a_call_that_gives_way_to_one_of_another_session_runs_after_it(turns: TurnOrder) -> None:
    turns.begin_session("other")
    mine, third, theirs = turns.join("run", 1), turns.join("", 0), turns.join("other", 1)
    turns.begin(mine)
    turns.await_peers(mine)
    turns.give_way(mine, theirs)
    assert list(turns.ready) == [theirs]
    assert not turns.may_begin(mine)
    assert not turns.may_begin(third)
    for ticket in (theirs, mine, third):
        run(turns, ticket)


@pytest.mark.parametrize(
    "leave", [TurnOrder.give_up, lambda turns, ticket: turns.end_session(ticket.session)]
)
def test_a_call_that_gives_way_to_one_that_leaves_runs_next(turns: TurnOrder, leave: Any) -> None:
    """Before or after it gives way."""
    for is_late in (True, False):
        turns.begin_session("other")
        mine, theirs = turns.join("run", turns.next_of("run")), turns.join("other", 1)
        turns.begin(mine)
        if not is_late:
            leave(turns, theirs)
        turns.await_peers(mine)
        turns.give_way(mine, theirs)
        if is_late:
            leave(turns, theirs)
        run(turns, mine)


def test_while_a_call_waits_for_the_other_ranks_only_calls_that_meet_nobody_run(turns: TurnOrder) -> None:
    turns.begin_session("other")
    mine, next_one = turns.join("run", 1, meets=True), turns.join("run", 2)
    alone, theirs = turns.join("other", 1), turns.join("other", 2, meets=True)
    turns.begin(mine)
    turns.await_peers(mine)
    assert list(turns.ready) == [alone]
    turns.begin(alone)
    turns.resume(mine)
    assert not list(turns.ready)
    turns.end(alone)
    assert turns.may_begin(mine)
    turns.end_session("run")  # the other ranks begin the call all the same
    turns.begin(mine)
    assert turns.missing == {}
    turns.end(mine)
    assert not turns.may_begin(next_one)
    run(turns, theirs)


def test_a_call_whose_session_has_ended_gives_way_for_good(turns: TurnOrder) -> None:
    turns.begin_session("other")
    mine, theirs = turns.join("run", 1), turns.join("other", 1)
    turns.begin(mine)
    turns.end_session("run")
    turns.await_peers(mine)
    turns.give_way(mine, theirs)
    run(turns, theirs)
    assert not turns.may_begin(mine)
    assert not list(turns.ready)


def test_calls_that_wait_are_bounded_and_strangers_take_no_place_of_the_session(turns: TurnOrder) -> None:
    waiting = [turns.join("", 0) for _ in range(MAX_WAITING)]
    with pytest.raises(TooManyCalls, match=f"{MAX_WAITING} calls without a sequence wait already"):
        turns.join("", 0)
    first = turns.join("run", 1)
    run(turns, waiting[0])
    turns.join("", 0)
    assert turns.may_begin(first)
