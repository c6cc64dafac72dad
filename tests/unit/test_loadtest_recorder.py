"""Calls that count in a step's figures."""

import math

import pytest

from loadtest.caller import OK, Reply
from loadtest.recorder import UNFINISHED, StepRecorder, Window
from rlhf.v1.common_pb2 import Timing


def recorder() -> StepRecorder:
    """Measures from 10 to 20 s."""
    return StepRecorder(Window(10.0, 20.0), 1.0)


def one_call(into: StepRecorder, due_s: float, sent_s: float, ended_s: float, reply: Reply) -> None:
    into.begin(due_s, sent_s)
    into.end(due_s, sent_s, ended_s, reply)


def test_latency_counts_from_when_a_call_was_due() -> None:
    measured = recorder()
    one_call(measured, 12.0, 12.3, 12.4, Reply(OK))
    assert round(measured.latency.mean_s, 6) == 0.4
    assert round(measured.lag.mean_s, 6) == 0.3


def test_calls_of_the_warm_up_count_only_as_answers() -> None:
    measured = recorder()
    one_call(measured, 9.9, 9.9, 10.1, Reply(OK))
    one_call(measured, 9.0, 9.0, 9.5, Reply(OK))
    assert (measured.sent, measured.latency.count, measured.answered) == (0, 0, 1)


def test_answers_after_the_window_are_latency_but_not_throughput() -> None:
    measured = recorder()
    one_call(measured, 19.9, 19.9, 20.4, Reply(OK))
    assert (measured.sent, measured.latency.count, measured.answered) == (1, 1, 0)


def test_a_call_that_never_ended_counts_with_its_waiting_even_from_the_warm_up() -> None:
    measured = recorder()
    one_call(measured, 9.0, 9.0, 25.0, Reply(UNFINISHED))
    assert measured.codes == {UNFINISHED: 1}
    assert measured.latency.percentile_s(50) == 16.0


def test_a_refusal_is_an_error_and_no_latency() -> None:
    measured = recorder()
    one_call(measured, 11.0, 11.0, 11.1, Reply("UNAVAILABLE"))
    assert (measured.codes, measured.latency.count) == ({"UNAVAILABLE": 1}, 0)


def test_of_several_ranks_the_slowest_counts() -> None:
    measured = recorder()
    timings = [Timing(queue_s=0.1, compute_s=0.2), Timing(queue_s=0.3, compute_s=0.1)]
    one_call(measured, 11.0, 11.0, 12.0, Reply(OK, timings))
    means = {part: round(histogram.mean_s, 6) for part, histogram in measured.server.items()}
    assert means == {"queue": 0.3, "fetch": 0, "compute": 0.2, "store": 0}
    assert round(measured.rest.mean_s, 6) == 0.5


def constant_rate(into: StepRecorder, per_s: int, latency_s: float, capacity: float = math.inf) -> None:
    """Calls due from 9 s on, each answered after its latency, and not before those ahead of it."""
    answered_s = 0.0
    for due_s in (9 + number / per_s for number in range(11 * per_s)):
        answered_s = max(due_s + latency_s, answered_s + 1 / capacity)
        one_call(into, due_s, due_s, answered_s, Reply(OK))


@pytest.mark.parametrize("latency_s", [0.01, 0.9, 3.0, 9.0])
def test_a_service_that_takes_its_time_keeps_up(latency_s: float) -> None:
    measured = recorder()
    constant_rate(measured, 20, latency_s)
    assert measured.kept_up == pytest.approx(measured.sent, rel=0.01)


@pytest.mark.parametrize("latency_s", [0.01, 0.9, 3.0])
def test_a_service_does_not_keep_up_with_more_than_it_can_do(latency_s: float) -> None:
    measured = recorder()
    constant_rate(measured, 20, latency_s, capacity=18)
    assert measured.kept_up == pytest.approx(0.9 * measured.sent, rel=0.01)


def test_a_window_that_is_cut_ends_then() -> None:
    measured = recorder()
    measured.cut(15.0)
    one_call(measured, 16.0, 16.0, 16.1, Reply(OK))
    assert (measured.window.length_s, measured.sent, measured.answered) == (5.0, 0, 0)


def test_the_timeline_has_calls_where_they_were_due_and_answers_where_they_came() -> None:
    measured = recorder()
    one_call(measured, 11.5, 11.5, 13.5, Reply(OK))
    rows = {row["start_s"]: row for row in measured.timeline()}
    assert round(rows[1.0]["p50_s"], 2) == 2.0
    assert rows[1.0]["answered_per_s"] == 0
    assert rows[3.0]["answered_per_s"] == 1
    assert rows[3.0]["p50_s"] is None
