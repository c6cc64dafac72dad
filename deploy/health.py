"""Health checks of services over gRPC health v1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlhf.access import Access
from rlhf.channels import open_channel, why_not_connected
from rlhf.errors import one_line
from rlhf.v1 import worker_pb2, worker_pb2_grpc

ANSWER_TIMEOUT_S = 3.0
"""Timeout of a health check, and of Describe, in seconds."""
# Services are on this host or named by address: never behind the proxy of the environment. The short back-off
# finds a service soon after it starts to listen.
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
SERVING = "serving"
NOT_SERVING = "not serving"
NOT_REACHABLE = "not reachable"
REFUSED = "refused"
_STATES = {
    grpc.StatusCode.UNAVAILABLE: NOT_REACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: NOT_REACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
}


class Probe:
    """Polls the health of the service at an address without blocking.

    Attributes:
        reason: Message of the last health check that failed, such as that of a certificate, as one line; empty: none
            has.
    """

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, CHANNEL_OPTIONS, Access.READ)
        self._check = _check(self._channel)
        self._question: Any = None
        self.reason = ""

    def serving(self) -> bool:
        """Whether the health check that an earlier call started has been answered with SERVING; False while it is
        under way, or where it failed. Starts a check where none is under way; never blocks."""
        if self._question is None:
            self._question = self._check.future(health_pb2.HealthCheckRequest(), timeout=ANSWER_TIMEOUT_S)
        if not self._question.done():
            return False
        question, self._question = self._question, None
        if question.exception() is not None:
            self.reason = one_line(question.details() or "")
            return False
        return _serves(question.result())

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


@dataclass(frozen=True)
class HealthAnswer:
    """Answer of a service to a health check."""

    state: str
    """State of the service: SERVING, NOT_SERVING, NOT_REACHABLE or REFUSED."""
    ranks: int | None = None
    """Number of ranks; None where the service does not serve Describe or is not reachable."""
    epoch: int | None = None
    """Epoch of the service; None where the service does not serve Describe or is not reachable."""
    why: str = ""
    """Error of the health check as one line; empty where it was answered."""


def ask(address: str) -> HealthAnswer:
    """Calls the health check and Describe of the service at an address, each with a timeout of `ANSWER_TIMEOUT_S`,
    and returns the answers. Does not raise: a health check that is not answered gives `NOT_REACHABLE`, one that this
    process's token does not allow `REFUSED`, one that ends with another error `NOT_SERVING`."""
    with open_channel(address, CHANNEL_OPTIONS, Access.READ) as channel:
        try:
            reply = _check(channel)(health_pb2.HealthCheckRequest(), timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            call: Any = error  # the error is a grpc.Call too, which grpc's types omit
            is_late = call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            late = f"no answer within {ANSWER_TIMEOUT_S:g} s"
            why = late if is_late else why_not_connected(call.details() or "")
            return HealthAnswer(_STATES.get(call.code(), NOT_SERVING), why=why)
        state = SERVING if _serves(reply) else NOT_SERVING
        try:
            described = worker_pb2_grpc.WorkerServiceStub(channel).Describe(
                worker_pb2.DescribeRequest(), timeout=ANSWER_TIMEOUT_S
            )
        except grpc.RpcError:
            # A reward server of the user's own need not know WorkerService.
            return HealthAnswer(state)
        return HealthAnswer(state, len(described.ranks), described.epoch)


def _check(channel: grpc.Channel) -> Any:
    """Returns the callable of grpc.health.v1.Health/Check on a channel; its generated stub has no types."""
    return health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]


def _serves(reply: health_pb2.HealthCheckResponse) -> bool:
    return reply.status == health_pb2.HealthCheckResponse.SERVING
