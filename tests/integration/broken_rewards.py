"""Reward servers of somebody else's, each of which breaks one rule of the contract; and one that keeps them all."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rlhf.contract import PLAIN_OPTIONS
from rlhf.v1 import reward_pb2, reward_pb2_grpc, worker_pb2, worker_pb2_grpc

Request = reward_pb2.ComputeRewardRequest
Response = reward_pb2.ComputeRewardResponse
Row = reward_pb2.TextRow
Verdict = reward_pb2.RowScore
LONG = 1000
"""More rows than any request has but those that are to take a while."""


class Good(reward_pb2_grpc.RewardServiceServicer):
    """The length of the response.

    Attributes:
        let_go: Set when the server ends, for threads that are stuck.
    """

    options: ClassVar[Any] = PLAIN_OPTIONS
    health_status: ClassVar[int | None] = health_pb2.HealthCheckResponse.SERVING

    def __init__(self) -> None:
        self.let_go = Event()

    def ComputeReward(self, request: Request, context: Any) -> Response:
        if request.HasField("batch"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send text_rows")
        return Response(scores=[self.verdict(row) for row in request.text_rows])

    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=len(row.response))

    def add_to(self, server: grpc.Server) -> None:
        self.add_reward_to(server)
        if self.health_status is not None:
            servicer = health.HealthServicer()
            servicer.set("", self.health_status)  # type: ignore[arg-type]
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    def add_reward_to(self, server: grpc.Server) -> None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)


class OfTokens(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(token_scores=reward_pb2.TokenScores(scores=map(len, row.response.split())))


class LosesARow(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        response = super().ComputeReward(request, context)
        return Response(scores=response.scores[:-1] if len(response.scores) > 2 else response.scores)


class ScoresNothing(Good):
    """A verdict for a request without rows."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        scores = super().ComputeReward(request, context).scores
        return Response(scores=scores or [Verdict(score=0)])


class SaysNaN(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=len(row.response) or float("nan"))


class SaysInfinityOfAToken(OfTokens):
    def verdict(self, row: Row) -> Verdict:
        if not row.response:
            return Verdict(token_scores=reward_pb2.TokenScores(scores=[0.0, float("inf")]))
        return super().verdict(row)


class SaysNothing(Good):
    def verdict(self, row: Row) -> Verdict:
        return super().verdict(row) if row.response else Verdict()


class FailsWithoutACause(Good):
    def verdict(self, row: Row) -> Verdict:
        return super().verdict(row) if row.response else Verdict(error="")


class Reverses(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        return Response(scores=reversed(super().ComputeReward(request, context).scores))


class ComparesRows(Good):
    """A row's score depends on the others in its request."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        scores = super().ComputeReward(request, context).scores
        return Response(scores=[Verdict(score=score.score - len(scores)) for score in scores])


class NormalisesItsBatch(Good):
    """Shifts the scores of a request to mean 0 and scales them to variance 1; of a lone row only 0 is left."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        scores = [score.score for score in super().ComputeReward(request, context).scores]
        mean, deviation = statistics.fmean(scores or [0.0]), statistics.pstdev(scores or [0.0])
        return Response(scores=[Verdict(score=(score - mean) / (deviation or 1.0)) for score in scores])


class WantsRows(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        if not (request.text_rows or request.HasField("batch")):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no rows")
        return super().ComputeReward(request, context)


class WantsResponses(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=ord(row.response[0]))


class WantsAscii(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=len(row.response.encode("ascii")))


class WantsNumbers(Good):
    """Takes every field of the metadata for a number."""

    def verdict(self, row: Row) -> Verdict:
        if any(not isinstance(value, float | str) for value in dict(row.metadata).values()):
            raise TypeError("not a number")
        return super().verdict(row)


class WantsFewRows(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        if len(request.text_rows) > LONG:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many rows")
        return super().ComputeReward(request, context)


class ShufflesLargeCalls(Good):
    """Scores large calls in parts, and puts these together as they come."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        scores = list(super().ComputeReward(request, context).scores)
        half = len(scores) // 2 + 1 if len(scores) > LONG else 0
        return Response(scores=scores[half:] + scores[:half])


class FailsOnLargeMessages(Good):
    def verdict(self, row: Row) -> Verdict:
        if len(row.response) > 3 << 20:
            raise MemoryError
        return super().verdict(row)


class HasDefaultLimits(Good):
    options = (("grpc.enable_http_proxy", 0),)


class SharesRows(Good):
    """Keeps the rows of a call where the next call puts its own."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        self.rows = request.text_rows
        time.sleep(0.02)
        shared = Request(text_rows=self.rows)
        return super().ComputeReward(request if request.HasField("batch") else shared, context)


class AnswersAnything(Good):
    def add_to(self, server: grpc.Server) -> None:
        super().add_to(server)
        handlers = {"NoSuchMethod": grpc.unary_unary_rpc_method_handler(lambda request, context: b"")}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rlhf.v1.RewardService", handlers),)
        )


class ForbidsUnknownMethods(Good):
    """Refuses a method that it does not serve for the class of the token, as a service with tokens does."""

    def add_to(self, server: grpc.Server) -> None:
        super().add_to(server)

        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "requires a token of class administer")

        handlers = {"NoSuchMethod": grpc.unary_unary_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rlhf.v1.RewardService", handlers),)
        )


class IgnoresTheBatch(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        return Response(scores=[self.verdict(row) for row in request.text_rows])


class ReadsGarbage(Good):
    """Takes bytes that it cannot parse for an empty request."""

    def add_reward_to(self, server: grpc.Server) -> None:
        handlers = {
            "ComputeReward": grpc.unary_unary_rpc_method_handler(
                self.ComputeReward,
                request_deserializer=self._read,
                response_serializer=Response.SerializeToString,
            )
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rlhf.v1.RewardService", handlers),)
        )

    def _read(self, message: bytes) -> Request:
        with contextlib.suppress(Exception):
            return Request.FromString(message)
        return Request()


class FailsWhenHurried(Good):
    def ComputeReward(self, request: Request, context: Any) -> Response:
        if context.time_remaining() < 0.1:
            context.abort(grpc.StatusCode.INTERNAL, "not enough time")
        return super().ComputeReward(request, context)


class Stuck(Good):
    """Is stuck, with all calls after, as soon as nobody waits for a long call any more."""

    seen: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = False

    def ComputeReward(self, request: Request, context: Any) -> Response:
        if len(request.text_rows) > LONG:
            time.sleep(0.15)
            ran_out = context.time_remaining() < 0.1
            self.is_stuck |= not context.is_active() and (self.seen == "deadline") == ran_out
        if self.is_stuck:
            self.let_go.wait()
        return super().ComputeReward(request, context)


class StuckAfterDeadline(Stuck):
    seen = "deadline"


class StuckAfterCancellation(Stuck):
    seen = "cancellation"


class RemembersCancellation(StuckAfterCancellation):
    """Scores otherwise after a call was cancelled."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        self.let_go.set()
        return super().ComputeReward(request, context)

    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=super().verdict(row).score + self.is_stuck)


class AnswersInJson(Good):
    def add_reward_to(self, server: grpc.Server) -> None:
        handlers = {
            "ComputeReward": grpc.unary_unary_rpc_method_handler(
                lambda request, context: b'{"scores": [1]}', request_deserializer=Request.FromString
            )
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rlhf.v1.RewardService", handlers),)
        )


class ScoresNoRow(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(error="the model is not there")


class FailsToSayItsHealth(Good):
    health_status = None

    def add_to(self, server: grpc.Server) -> None:
        super().add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(FailingHealth(), server)


class FailingHealth(health_pb2_grpc.HealthServicer):
    def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        raise RuntimeError("not ready")


class IsNotServing(Good):
    health_status = health_pb2.HealthCheckResponse.NOT_SERVING


class HasNoHealth(Good):
    health_status = None


class Describes(Good, worker_pb2_grpc.WorkerServiceServicer):
    """Has a WorkerService, which it should not."""

    def add_to(self, server: grpc.Server) -> None:
        super().add_to(server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)


class IsAnActor(Describes):
    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(role="actor")


class FailsToDescribe(Describes):
    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        raise RuntimeError("not ready")


class OfGroups(Describes):
    """The length of the response relative to the longest of its group."""

    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(role="reward", scores_groups=True)

    def ComputeReward(self, request: Request, context: Any) -> Response:
        if request.HasField("batch"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send text_rows")
        longest: dict[float, int] = {}
        for row in request.text_rows:
            longest[self.key(row)] = max(longest.get(self.key(row), 1), len(row.response))
        scores = [len(row.response) / longest[self.key(row)] + len(row.response) for row in request.text_rows]
        return Response(scores=[Verdict(score=score) for score in scores])

    def key(self, row: Row) -> float:
        return row.group


class RoundsGroups(OfGroups):
    """Holds the number of a group in a double."""

    def key(self, row: Row) -> float:
        return float(row.group)


class ComparesGroups(OfGroups):
    """The score of a row depends on the number of groups in its request."""

    def ComputeReward(self, request: Request, context: Any) -> Response:
        scores = super().ComputeReward(request, context).scores
        groups = len({row.group for row in request.text_rows})
        return Response(scores=[Verdict(score=score.score - groups) for score in scores])


class Wavers(Good):
    """Never gives the same score twice."""

    def __init__(self) -> None:
        super().__init__()
        self._noise = itertools.count()

    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=len(row.response) + next(self._noise))


class IsIndifferent(Good):
    def verdict(self, row: Row) -> Verdict:
        return Verdict(score=1.0)


@contextlib.contextmanager
def served(reward: Good) -> Iterator[str]:
    """The address at which a reward is served."""
    options = [*reward.options, ("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(32), options=options)
    reward.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        reward.let_go.set()
        server.stop(None).wait()
