"""Checks of calls: many at a time, invalid, past their deadline, and cancelled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from conformance.findings import Violation
from conformance.target import COMPUTE_REWARD, RewardTarget, Status, are_equal_by_unit, status_of
from rlhf.security import current
from rlhf.v1 import common_pb2, reward_pb2

CALLS_IN_FLIGHT = 32
SHORT_DEADLINES_S = (0.05, 0.01, 0.001)
CANCEL_AFTER_S = (0.0, 0.02)
SETTLE_S = 0.4
"""Time in which a server gets stuck, if it does."""
GARBAGE = b"\xff\xff\xff\xff\xff"
UNKNOWN_METHOD = "/rlhf.v1.RewardService/NoSuchMethod"


def check_concurrency(target: RewardTarget) -> str:
    """Checks that calls that are in flight at the same time get the verdicts that their rows get alone."""
    turned = [_turn(target.units, i) for i in range(CALLS_IN_FLIGHT)]
    calls = [target.start(target.request_of(units)) for units in turned]
    answers = [target.unit_verdicts(call, units) for call, units in zip(calls, turned, strict=True)]
    if not target.alone:
        return (
            f"{CALLS_IN_FLIGHT} concurrent calls were answered; there are no verdicts to compare theirs with"
        )
    mixed = [i for i, answer in enumerate(answers) if not are_equal_by_unit(answer, _turn(target.alone, i))]
    if mixed:
        raise Violation(
            f"{len(mixed)} of {CALLS_IN_FLIGHT} concurrent calls got different verdicts than the same rows in one call",
            "Keep no state outside of a call: calls are executed concurrently.",
        )
    return f"{CALLS_IN_FLIGHT} concurrent calls got the same verdicts as single calls"


def check_unknown_method(target: RewardTarget) -> str:
    """Checks that a call of a method that does not exist ends with UNIMPLEMENTED, or with PERMISSION_DENIED where a
    token was sent, whose class may be too low for a method that the server does not know."""
    code = _outcome(target.method(UNKNOWN_METHOD).future(b"", timeout=target.deadline_s), target.deadline_s)
    if code is Status.PERMISSION_DENIED and (current().token or current().tokens):
        return "a method that does not exist is PERMISSION_DENIED to this token"
    if code is not Status.UNIMPLEMENTED:
        raise Violation(
            f"a method that does not exist ended with {code.name}",
            "Answer UNIMPLEMENTED, as gRPC servers do by themselves: look at interceptors and proxies.",
        )
    return "a method that does not exist is UNIMPLEMENTED"


def check_malformed(target: RewardTarget) -> str:
    """Checks that a request with a batch, with or without text rows, ends with INVALID_ARGUMENT."""
    batch = common_pb2.Batch(rows=1)
    requests = {
        "both text rows and a batch": reward_pb2.ComputeRewardRequest(text_rows=target.rows[:1], batch=batch),
        "a batch, which a reward of text cannot read,": reward_pb2.ComputeRewardRequest(batch=batch),
    }
    for content, request in requests.items():
        code = _outcome(target.start(request), target.deadline_s)
        if code is not Status.INVALID_ARGUMENT:
            raise Violation(
                f"a request with {content} ended with {code.name}",
                "Refuse with INVALID_ARGUMENT every request that has `batch` set.",
            )
    return "a request with a batch is INVALID_ARGUMENT, also beside text rows"


def check_garbage(target: RewardTarget) -> str:
    """Checks that a request that is no protobuf message ends with an error in time."""
    call = target.method(COMPUTE_REWARD.path).future(GARBAGE, timeout=target.deadline_s)
    code = _outcome(call, target.deadline_s)
    if code in (Status.OK, Status.DEADLINE_EXCEEDED):
        raise Violation(
            f"bytes that are no message ended with {code.name}",
            "Refuse a message that cannot be parsed: INTERNAL or INVALID_ARGUMENT.",
        )
    return f"bytes that are no message are {code.name}"


def check_deadline(target: RewardTarget) -> str:
    """Checks that calls with short deadlines end with OK or DEADLINE_EXCEEDED, and that a later call is answered."""
    request = reward_pb2.ComputeRewardRequest(text_rows=target.long_rows)
    for timeout_s in SHORT_DEADLINES_S:
        call = target.start(request, timeout_s)
        code = _outcome(call, target.deadline_s)
        if code not in (Status.OK, Status.DEADLINE_EXCEEDED):
            raise Violation(
                f"a call with a deadline of {timeout_s * 1000:g} ms ended with {code.name}",
                "End a call that runs out of time with DEADLINE_EXCEEDED.",
            )
    _require_life(target, "calls that ran out of time")
    return "calls that run out of time end with DEADLINE_EXCEEDED, and the next one is answered"


def check_cancellation(target: RewardTarget) -> str:
    """Checks that the server still scores rows after calls that were cancelled."""
    request = reward_pb2.ComputeRewardRequest(text_rows=target.long_rows)
    for after_s in CANCEL_AFTER_S:
        call = target.start(request)
        time.sleep(after_s)
        call.cancel()
    _require_life(target, "calls that were cancelled")
    return "after calls that were cancelled the next one is answered"


def check_goes_on(target: RewardTarget) -> str:
    """Checks that the server still gives rows the same verdicts after all other checks."""
    verdicts = target.score_units(target.units)
    if not target.alone:
        return "the server still scores rows after all other checks"
    if not are_equal_by_unit(verdicts, target.alone):
        raise Violation(
            "the same rows get different verdicts after all other checks", "Keep no state between calls."
        )
    return "the same rows get the same verdicts after all other checks"


def _turn(values: Sequence[Any], by: int) -> list[Any]:
    by %= len(values)
    return [*values[by:], *values[:by]]


def _require_life(target: RewardTarget, after: str) -> None:
    """Requests a score again and again for `SETTLE_S` seconds, since a server may get stuck only some time after the
    call. Raises Violation where a request is not answered."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        if not target.is_alive():
            raise Violation(
                f"after {after} it scores no row within {target.deadline_s:g} s",
                "Stop a call that has ended for its client: free its thread and its locks.",
            )
        time.sleep(SETTLE_S / 10)


def _outcome(call: Any, timeout_s: float) -> Status:
    error = call.exception(timeout_s * 2)
    return Status.OK if error is None else status_of(error)
