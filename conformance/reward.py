"""The rules of a reward server: one check each, run in order from the harmless to the rude."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from conformance.findings import Caution, Finding, RuleResult, Undecided, Unmet, Violation
from conformance.target import (
    COMPUTE_REWARD,
    COUNT,
    VERDICTS,
    RewardTarget,
    Row,
    Status,
    are_equal,
    decoded,
    described,
    has_score,
)
from rlhf.contract import SERVICES
from rlhf.v1 import common_pb2, reward_pb2, worker_pb2

Check = Callable[[RewardTarget], str]
"""Returns a sentence where the rule holds, and raises Unmet where not."""

CALLS_IN_FLIGHT = 32
SHORT_DEADLINES_S = (0.05, 0.01, 0.001)
CANCEL_AFTER_S = (0.0, 0.02)
SETTLE_S = 0.4
MIB = 1 << 20
DEFAULT_MESSAGE_BYTES = 4 * MIB
GARBAGE = b"\xff\xff\xff\xff\xff"
UNKNOWN_METHOD = "/rlhf.v1.RewardService/NoSuchMethod"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"


def check_reachable(target: RewardTarget) -> str:
    started = time.monotonic()
    try:
        grpc.channel_ready_future(target.channel).result(target.deadline_s)
    except grpc.FutureTimeoutError:
        raise Violation(
            f"nothing answers at {target.address} within {target.deadline_s:g} s",
            "Start the server, or look at host and port; it has to speak gRPC without TLS.",
        ) from None
    target.score(target.rows[:1])
    return f"it scored a row within {time.monotonic() - started:.2f} s"


def check_health(target: RewardTarget) -> str:
    request = health_pb2.HealthCheckRequest().SerializeToString()
    try:
        answer = target.method(HEALTH_CHECK)(request, timeout=target.deadline_s)
    except grpc.RpcError as error:
        seen = f"grpc.health.v1.Health/Check ended with {described(error)}"
        if _code(error) is not Status.UNIMPLEMENTED:
            raise Violation(
                seen, "Set the health of service '' to SERVING, or leave the health service out."
            ) from error
        raise Caution(
            seen,
            "A run works without, but `rlhf-deploy status` cannot see that it serves: add the health service.",
        ) from error
    status = decoded(health_pb2.HealthCheckResponse, answer).status
    if status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
        raise Violation(
            f"it scores rows, but its health is {name}", "Set the health of service '' to SERVING."
        )
    return "grpc.health.v1 says SERVING"


def check_describe(target: RewardTarget) -> str:
    describe = SERVICES["worker"]["Describe"]
    request = worker_pb2.DescribeRequest().SerializeToString()
    try:
        answer = target.method(describe.path)(request, timeout=target.deadline_s)
    except grpc.RpcError as error:
        if _code(error) is Status.UNIMPLEMENTED:
            return "it has no WorkerService, so it is taken for a reward that reads text"
        raise Violation(
            f"WorkerService/Describe ended with {described(error)}, not UNIMPLEMENTED",
            "Leave WorkerService out: the controller tells by UNIMPLEMENTED that this is a reward of another make.",
        ) from error
    description = decoded(worker_pb2.DescribeResponse, answer)
    if description.role != "reward":
        raise Violation(
            f"Describe says that its role is {description.role!r}",
            "Look at the address: this is no reward. A reward of another make leaves WorkerService out.",
        )
    if description.input_form == worker_pb2.INPUT_FORM_TENSOR or len(description.ranks) > 1:
        raise Undecided(
            f"it has {len(description.ranks)} ranks and reads {worker_pb2.InputForm.Name(description.input_form)}",
            "These checks are for rewards of one rank that read text.",
        )
    return f"Describe says reward, text, {description.engine or 'engine not told'}"


def check_invariants(target: RewardTarget) -> str:
    target.score(target.rows)
    return "in every answer"


def check_scores(target: RewardTarget) -> str:
    verdicts = target.score(target.rows)
    scored = sum(map(has_score, verdicts))
    if not scored:
        raise Violation(
            f"none of the {len(verdicts)} probe rows got a score; the first: {verdicts[0].error[:120]}",
            "Give rows that your reward can score: --rows FILE. If these should be: look at the error.",
        )
    return f"{scored} of {len(verdicts)} probe rows got a score"


def check_repeatable(target: RewardTarget) -> str:
    target.is_repeatable = are_equal(target.score(target.rows), target.score(target.rows))
    if not target.is_repeatable:
        raise Caution(
            "the same rows got other verdicts the second time",
            "Runs of one seed will differ. Where that is not meant, take away the randomness.",
        )
    return "the same rows got the same verdicts twice"


def check_order(target: RewardTarget) -> str:
    if not target.is_repeatable:
        raise Undecided("verdicts do not repeat, so they cannot be compared", "")
    alone = [target.score([row])[0] for row in target.rows]
    together, reverse = target.score(target.rows), target.score(target.rows[::-1])
    if not any(map(has_score, (*alone, *together))):
        raise Undecided("no probe row got a score, so there is nothing to compare", "")
    if not are_equal(reverse, together[::-1]):
        raise Violation(
            "a row's verdict depends on where in the request it stands",
            "Give verdict i to row i, and score each row by itself.",
        )
    if not are_equal(together, alone):
        raise Violation(
            "a row's verdict depends on the other rows of the request",
            "Score each row by itself: runs send rows in other batches, and normalise rewards themselves.",
        )
    if all(are_equal(alone[:1], [verdict]) for verdict in alone):
        raise Caution(
            f"all {len(alone)} probe rows got the same verdict, so their order cannot be told",
            "Give rows that your reward tells apart: --rows FILE.",
        )
    target.alone = alone
    return f"{len(alone)} rows got the same verdicts alone, together and in reverse"


def check_no_rows(target: RewardTarget) -> str:
    target.score([])
    return "a request without rows got an answer without verdicts"


def check_empty_strings(target: RewardTarget) -> str:
    rows = [Row(), Row(prompt="1+1="), Row(response="2"), Row(ground_truth="2")]
    target.score(rows)
    return f"{len(rows)} rows with empty texts got a verdict each"


def check_unicode(target: RewardTarget) -> str:
    texts = (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f600",
        "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eabc\u202c",
        "a\0b",
        "\u00e9 e\u0301 \u0130 \u00df",
        "\u6f22\u5b57\u2028\U0001d518",
        "\ufffe\ufeff",
    )
    rows = [Row(prompt=text, response=text, ground_truth=text) for text in texts]
    for row in rows:
        row.metadata.update({text: text for text in texts})
    target.score(rows)
    return "emoji, right-to-left, NUL, combining and rare characters got a verdict each"


def check_metadata(target: RewardTarget) -> str:
    row = Row(prompt="1+1=", response="2", ground_truth="2")
    row.metadata.update(
        {"null": None, "flag": True, "number": 1e300, "list": [1, "a", None, []], "deep": {"a": {"b": []}}}
    )
    target.score([row, row])
    return "metadata of every JSON type is read"


def check_many_rows(target: RewardTarget) -> str:
    started = time.monotonic()
    rows = [target.rows[i % len(target.rows)] for i in range(target.num_rows)]
    verdicts = target.score(rows)
    took_s = time.monotonic() - started
    alone = target.alone or verdicts
    mixed = [i for i, verdict in enumerate(verdicts) if not are_equal([verdict], [alone[i % len(alone)]])]
    if mixed:
        raise Violation(
            f"{len(mixed)} of {len(rows)} rows in one call got other verdicts than alone, first row {mixed[0]}",
            "Give verdict i to row i in large calls too: look at how they are split and put together.",
        )
    target.long_rows = rows
    return f"{target.num_rows} rows in one call took {took_s:.2f} s"


def check_large_messages(target: RewardTarget) -> str:
    largest = 0
    for size in _sizes(target.max_bytes):
        try:
            target.score([Row(response="x" * size)])
        except Violation as violation:
            cause = violation.__cause__
            if not isinstance(cause, grpc.RpcError):
                raise
            if _code(cause) is not Status.RESOURCE_EXHAUSTED:
                raise Violation(
                    f"a message of {_mib(size)} ended with {described(cause)}", violation.advice
                ) from cause
            raise Caution(
                f"the largest message it takes is between {_mib(largest)} and {_mib(size)}",
                "All rows of a step come in one message: raise grpc.max_receive_message_length.",
            ) from cause
        largest = size
    return f"a message of {_mib(largest)} was answered; larger ones were not tried"


def check_concurrency(target: RewardTarget) -> str:
    turned = [_turn(target.rows, i) for i in range(CALLS_IN_FLIGHT)]
    calls = [target.start(reward_pb2.ComputeRewardRequest(text_rows=rows)) for rows in turned]
    answers = [target.verdicts(call, len(target.rows)) for call in calls]
    if not target.alone:
        return f"{CALLS_IN_FLIGHT} calls in flight were answered; whether each with its own verdicts cannot be told"
    mixed = [i for i, answer in enumerate(answers) if not are_equal(answer, _turn(target.alone, i))]
    if mixed:
        raise Violation(
            f"{len(mixed)} of {CALLS_IN_FLIGHT} calls in flight got other verdicts than alone",
            "Keep nothing of a call outside of it: calls run at the same time.",
        )
    return f"{CALLS_IN_FLIGHT} calls in flight got the verdicts they get alone"


def check_deadline(target: RewardTarget) -> str:
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
    request = reward_pb2.ComputeRewardRequest(text_rows=target.long_rows)
    for after_s in CANCEL_AFTER_S:
        call = target.start(request)
        time.sleep(after_s)
        call.cancel()
    _require_life(target, "calls that were cancelled")
    return "after calls that were cancelled the next one is answered"


def check_unknown_method(target: RewardTarget) -> str:
    code = _outcome(target.method(UNKNOWN_METHOD).future(b"", timeout=target.deadline_s), target.deadline_s)
    if code is not Status.UNIMPLEMENTED:
        raise Violation(
            f"a method that does not exist ended with {code.name}",
            "Answer UNIMPLEMENTED, as gRPC servers do by themselves: look at interceptors and proxies.",
        )
    return "a method that does not exist is UNIMPLEMENTED"


def check_malformed(target: RewardTarget) -> str:
    batch = common_pb2.Batch(rows=1)
    requests = {
        "both text rows and a batch": reward_pb2.ComputeRewardRequest(text_rows=target.rows[:1], batch=batch),
        "a batch, which a reward of text cannot read,": reward_pb2.ComputeRewardRequest(batch=batch),
    }
    for what, request in requests.items():
        code = _outcome(target.start(request), target.deadline_s)
        if code is not Status.INVALID_ARGUMENT:
            raise Violation(
                f"a request with {what} ended with {code.name}",
                "Refuse with INVALID_ARGUMENT every request that has `batch` set.",
            )
    return "a request with a batch is INVALID_ARGUMENT, also beside text rows"


def check_garbage(target: RewardTarget) -> str:
    call = target.method(COMPUTE_REWARD.path).future(GARBAGE, timeout=target.deadline_s)
    code = _outcome(call, target.deadline_s)
    if code in (Status.OK, Status.DEADLINE_EXCEEDED):
        raise Violation(
            f"bytes that are no message ended with {code.name}",
            "Refuse what cannot be parsed: INTERNAL or INVALID_ARGUMENT.",
        )
    return f"bytes that are no message are {code.name}"


def check_goes_on(target: RewardTarget) -> str:
    verdicts = target.score(target.rows)
    if not target.alone:
        return "after all that it still scores rows"
    if not are_equal(verdicts, target.alone):
        raise Violation("after all that the same rows get other verdicts", "Keep no state between calls.")
    return "after all that the same rows get the same verdicts"


RULES: dict[str, Check] = {
    "reachable": check_reachable,
    "describe": check_describe,
    "health": check_health,
    COUNT: check_invariants,
    VERDICTS: check_invariants,
    "scores": check_scores,
    "repeatable": check_repeatable,
    "row order": check_order,
    "no rows": check_no_rows,
    "empty strings": check_empty_strings,
    "unicode": check_unicode,
    "metadata": check_metadata,
    "many rows": check_many_rows,
    "large messages": check_large_messages,
    "concurrency": check_concurrency,
    "unknown method": check_unknown_method,
    "malformed request": check_malformed,
    "garbage": check_garbage,
    "deadline": check_deadline,
    "cancellation": check_cancellation,
    "goes on": check_goes_on,
}
"""Checks by name of their rule."""
STOPS = ("reachable", "describe")
"""Rules without which the others mean nothing."""


def check_rules(target: RewardTarget) -> list[Finding]:
    """A finding per rule, in order. A rule whose check breaks another one - a verdict too few - is not checked; and
    when the server is gone, no later rule is."""
    found: dict[str, Finding] = {}
    stopped = ""
    for rule, check in RULES.items():
        if stopped:
            found.setdefault(rule, Finding(rule, RuleResult.SKIP, f"not checked: see {stopped!r}"))
            continue
        try:
            found.setdefault(rule, Finding(rule, RuleResult.PASS, check(target)))
        except Unmet as unmet:
            broken = unmet.rule or rule
            found[broken] = Finding(broken, unmet.result, unmet.seen, unmet.advice)
            found.setdefault(rule, Finding(rule, RuleResult.SKIP, f"not checked: see {broken!r}"))
            is_over = rule in STOPS or not target.is_alive()
            stopped = rule if is_over and unmet.result is not RuleResult.WARN else ""
    return [found[rule] for rule in RULES]


def _turn(values: Sequence[Any], by: int) -> list[Any]:
    by %= len(values)
    return [*values[by:], *values[:by]]


def _require_life(target: RewardTarget, after: str) -> None:
    """A server may get stuck only when it comes to notice; so it is asked for a while."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        if not target.is_alive():
            raise Violation(
                f"after {after} it scores no row within {target.deadline_s:g} s",
                "Let go of a call that nobody waits for: free its thread and its locks.",
            )
        time.sleep(SETTLE_S / 10)


def _outcome(call: Any, timeout_s: float) -> grpc.StatusCode:
    error = call.exception(timeout_s * 2)
    return Status.OK if error is None else _code(error)


def _code(error: Any) -> grpc.StatusCode:
    return error.code()


def _sizes(largest: int) -> Iterator[int]:
    """Message sizes: below and above gRPC's default, and then fourfold up to the largest."""
    size = DEFAULT_MESSAGE_BYTES // 2
    while size < largest:
        yield size
        size *= 4
    yield largest


def _mib(size: int) -> str:
    return f"{size / MIB:g} MiB"
