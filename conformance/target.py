"""The server under test: one channel, and answers checked against the rules that hold for all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from conformance.findings import Violation
from rlhf.channels import open_channel
from rlhf.contract import SERVICES
from rlhf.errors import one_line
from rlhf.v1 import reward_pb2

COMPUTE_REWARD = SERVICES["reward"]["ComputeReward"]
COUNT, VERDICTS = "one verdict per row", "finite verdicts"
"""Rules for every answer, whatever the request."""

M = TypeVar("M", bound=Message)
Row = reward_pb2.TextRow
Verdict = reward_pb2.RowScore
Status = grpc.StatusCode


class RewardTarget:
    """Client of the reward server under test, with the probe rows and the findings of earlier checks.

    Args:
        address: host:port of the server.
        deadline_s: Deadline of calls, in seconds, except of those that test deadlines.
        rows: Probe rows, at least two.
        num_rows: Rows of the largest call.
        max_bytes: Size of the largest message, in bytes.

    Attributes:
        scores_groups: Whether Describe says that the server scores groups.
        is_repeatable: Whether the same rows got the same verdicts twice.
        alone: Verdicts on the rows of each of `units` sent alone; empty where other answers cannot be compared with
            them.
        long_rows: Rows of a long call, which the server has answered before.
    """

    def __init__(
        self, address: str, deadline_s: float, rows: Sequence[Row], num_rows: int, max_bytes: int
    ) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self.rows = list(rows)
        self.num_rows = num_rows
        self.max_bytes = max_bytes
        self.scores_groups = False
        self.is_repeatable = False
        self.alone: list[list[Verdict]] = []
        self.long_rows = self.rows
        self.channel = open_channel(address)

    def close(self) -> None:
        self.channel.close()

    @property
    def units(self) -> list[list[Row]]:
        """Lists of rows that are scored together, one list per probe row. It has that row alone or, for a server that
        scores groups, makes a group: i + 1 copies of probe row i, with the responses of probe rows i, i + 1, ...."""
        if not self.scores_groups:
            return [[row] for row in self.rows]
        return [
            [_with_response(row, self.rows[(i + k) % len(self.rows)].response) for k in range(i + 1)]
            for i, row in enumerate(self.rows)
        ]

    def start(self, request: reward_pb2.ComputeRewardRequest, timeout_s: float | None = None) -> Any:
        """Sends a ComputeReward request and returns, without waiting, its gRPC call, a future of the serialized
        response. For a server that scores groups, each row of `request` without a group gets a group of its own.
        The deadline is `timeout_s` seconds; by default that of the target."""
        if self.scores_groups:
            for number, row in enumerate(request.text_rows):
                row.group = row.group if row.HasField("group") else number
        return self.method(COMPUTE_REWARD.path).future(
            request.SerializeToString(), timeout=timeout_s or self.deadline_s
        )

    def method(self, path: str) -> grpc.UnaryUnaryMultiCallable:
        """Returns the callable of the unary method at `path`; its requests and responses are bytes."""
        return self.channel.unary_unary(path)

    def score(self, rows: Sequence[Row], timeout_s: float | None = None) -> list[Verdict]:
        """Sends rows to ComputeReward, waits for the response and returns the verdict on each row, in order.

        Raises:
            Violation: The call failed, or its answer breaks a rule for every answer.
        """
        request = reward_pb2.ComputeRewardRequest(text_rows=rows)
        return self.verdicts(self.start(request, timeout_s), len(rows))

    def score_units(self, units: Sequence[Sequence[Row]]) -> list[list[Verdict]]:
        """Sends units in one request, as groups for a server that scores groups, and returns the verdicts on each.
        Raises the errors of `score`."""
        call = self.start(self.request_of(units))
        return self.unit_verdicts(call, units)

    def request_of(
        self, units: Sequence[Sequence[Row]], first_group: int = 0
    ) -> reward_pb2.ComputeRewardRequest:
        """Makes the request with the rows of all units; for a server that scores groups, the rows of a unit get one
        group number.

        Args:
            units: Lists of rows, such as those of the property `units`.
            first_group: Number of the first group.
        """
        rows = []
        for number, unit in enumerate(units, first_group):
            for row in unit:
                rows.append(Row())
                rows[-1].CopyFrom(row)
                if self.scores_groups:
                    rows[-1].group = number
        return reward_pb2.ComputeRewardRequest(text_rows=rows)

    def unit_verdicts(self, call: Any, units: Sequence[Sequence[Row]]) -> list[list[Verdict]]:
        """Waits for a call that was started with `units` and returns the verdicts on each. Raises the errors of
        `score`."""
        verdicts = iter(self.verdicts(call, sum(map(len, units))))
        return [list(itertools.islice(verdicts, len(unit))) for unit in units]

    def verdicts(self, call: Any, num_rows: int) -> list[Verdict]:
        """Waits for a call that was started with `num_rows` rows and returns its verdicts. Raises the errors of
        `score`."""
        try:
            answer = decoded(reward_pb2.ComputeRewardResponse, call.result())
        except grpc.RpcError as error:
            raise Violation(
                f"a call with {num_rows} rows ended with {described(error)}",
                "Answer every request for text rows; a row that cannot be scored carries `error`.",
            ) from error
        if len(answer.scores) != num_rows:
            raise Violation(
                f"{len(answer.scores)} verdicts for {num_rows} rows",
                "Give exactly one RowScore per row, in row order.",
                rule=COUNT,
            )
        for row, verdict in enumerate(answer.scores):
            if fault := verdict_fault(verdict):
                raise Violation(
                    f"row {row} of {num_rows}: {fault}",
                    "Give a finite `score`, finite `token_scores`, or an `error` that says why there is none.",
                    rule=VERDICTS,
                )
        return list(answer.scores)

    def is_alive(self) -> bool:
        """Whether the server answers a request of one row within the deadline, be it with too few verdicts or with
        invalid ones. Sends the request, and waits for its end."""
        try:
            self.score(self.rows[:1])
        except Violation as violation:
            return violation.rule in (COUNT, VERDICTS)
        return True


def _with_response(row: Row, response: str) -> Row:
    changed = Row()
    changed.CopyFrom(row)
    changed.response = response
    return changed


def decoded(kind: type[M], answer: bytes) -> M:
    """Decodes an answer as a message of this kind.

    Raises:
        Violation: The answer is not a message of this kind.
    """
    try:
        return kind.FromString(answer)
    except DecodeError as error:
        raise Violation(
            f"an answer of {len(answer)} bytes is no {kind.DESCRIPTOR.full_name}",
            "Answer with the message of rlhf/v1, in protobuf's binary form.",
        ) from error


def has_score(verdict: Verdict) -> bool:
    """Whether a valid verdict is a score, or scores of tokens, rather than an error."""
    return verdict.WhichOneof("verdict") != "error"


def verdict_fault(verdict: Verdict) -> str:
    """Returns the fault of a verdict as text; empty for a valid one."""
    match verdict.WhichOneof("verdict"):
        case None:
            return "no verdict is set"
        case "error":
            return "" if verdict.error.strip() else "an error without a text"
        case "score":
            values = [verdict.score]
        case _:
            values = list(verdict.token_scores.scores)
    bad = [value for value in values if not math.isfinite(value)]
    return f"score {bad[0]:g} is not finite" if bad else ""


def are_equal(left: Sequence[Verdict], right: Sequence[Verdict]) -> bool:
    """Whether two lists have as many verdicts, and these are of the same kind and equal, one by one. Scores may differ
    by a relative 1e-3 or by 1e-4, as a model's do in another batch; any two errors are equal."""
    return len(left) == len(right) and all(map(_is_equal, left, right))


def are_equal_by_unit(left: Sequence[Sequence[Verdict]], right: Sequence[Sequence[Verdict]]) -> bool:
    """Whether there are as many units on both sides, whose verdicts are equal by `are_equal`."""
    return len(left) == len(right) and all(map(are_equal, left, right))


def _is_equal(left: Verdict, right: Verdict) -> bool:
    if left.WhichOneof("verdict") != right.WhichOneof("verdict"):
        return False
    ours, theirs = _values(left), _values(right)
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(ours, theirs, strict=True)
    )


def _values(verdict: Verdict) -> list[float]:
    return [*verdict.token_scores.scores, *([verdict.score] if verdict.HasField("score") else [])]


def described(error: grpc.RpcError) -> str:
    """Returns the status of a failed call as text: `CODE (details)`."""
    call: Any = error
    details = excerpt(call.details() or "")
    return f"{call.code().name} ({details})" if details else call.code().name


def excerpt(said: str) -> str:
    """Returns the beginning of a server's text as one line, with its control characters escaped."""
    return one_line(" ".join(said.split())[:120])


def status_of(error: Any) -> grpc.StatusCode:
    """Returns the status code of a failed call."""
    return error.code()
