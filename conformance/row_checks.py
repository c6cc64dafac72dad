"""Checks of rows: none, odd, many and large ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from conformance.findings import Caution, Violation
from conformance.target import RewardTarget, Row, Status, are_equal, described, status_of

MIB = 1 << 20
DEFAULT_MESSAGE_BYTES = 4 * MIB
"""Largest message that gRPC takes by default."""


def check_no_rows(target: RewardTarget) -> str:
    """Checks that a request without rows gets an answer without verdicts."""
    target.score([])
    return "a request without rows got an answer without verdicts"


def check_empty_strings(target: RewardTarget) -> str:
    """Checks that rows with empty texts get a valid verdict each."""
    rows = [Row(), Row(prompt="1+1="), Row(response="2"), Row(ground_truth="2")]
    target.score(rows)
    return f"{len(rows)} rows with empty texts got a verdict each"


def check_unicode(target: RewardTarget) -> str:
    """Checks that rows with rare characters in texts and metadata get a valid verdict each."""
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
    """Checks that rows with metadata of every JSON type get a valid verdict each."""
    row = Row(prompt="1+1=", response="2", ground_truth="2")
    row.metadata.update(
        {"null": None, "flag": True, "number": 1e300, "list": [1, "a", None, []], "deep": {"a": {"b": []}}}
    )
    target.score([row, row])
    return "metadata of every JSON type is read"


def check_many_rows(target: RewardTarget) -> str:
    """Checks that a call with at least `target.num_rows` rows, the probe rows in turn, gets a valid verdict for each,
    equal to the one it got alone where `target.alone` has it. Sets `target.long_rows` to the rows of the call."""
    probes, units, num_rows = target.units, [], 0
    while num_rows < target.num_rows:
        units.append(probes[len(units) % len(probes)])
        num_rows += len(units[-1])
    request, started = target.request_of(units), time.monotonic()
    verdicts = target.unit_verdicts(target.start(request), units)
    took_s = time.monotonic() - started
    alone = target.alone or verdicts
    mixed = [i for i, each in enumerate(verdicts) if not are_equal(each, alone[i % len(alone)])]
    if mixed:
        one = "group" if target.scores_groups else "row"
        raise Violation(
            f"{len(mixed)} of {len(units)} {one}s got different verdicts in one call than alone, first {one} "
            f"{mixed[0]}",
            "Give verdict i to row i in large calls too: look at how they are split and put together.",
        )
    target.long_rows = list(request.text_rows)
    return f"{num_rows} rows in one call took {took_s:.2f} s"


def check_large_messages(target: RewardTarget) -> str:
    """Checks that messages of up to `target.max_bytes` bytes are answered. Raises Caution if the server takes less."""
    largest = 0
    for size in _sizes(target.max_bytes):
        try:
            target.score([Row(response="x" * size)])
        except Violation as violation:
            cause = violation.__cause__
            if not isinstance(cause, grpc.RpcError):
                raise
            if status_of(cause) is not Status.RESOURCE_EXHAUSTED:
                raise Violation(
                    f"a message of {_mib(size)} ended with {described(cause)}", violation.advice
                ) from cause
            raise Caution(
                f"the largest message it takes is between {_mib(largest)} and {_mib(size)}",
                "All rows of a step come in one message: raise grpc.max_receive_message_length.",
            ) from cause
        largest = size
    return f"a message of {_mib(largest)} was answered; larger ones were not tried"


def _sizes(largest: int) -> Iterator[int]:
    """Yields message sizes in bytes: half of gRPC's default limit, each next one four times as large, and at last
    `largest`."""
    size = DEFAULT_MESSAGE_BYTES // 2
    while size < largest:
        yield size
        size *= 4
    yield largest


def _mib(size: int) -> str:
    return f"{size / MIB:g} MiB"
