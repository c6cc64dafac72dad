"""Checks of the server itself: that it is there, healthy, and a reward that reads text."""

from __future__ import annotations

import time

import grpc
from grpc_health.v1 import health_pb2

from conformance.findings import Caution, Undecided, Violation
from conformance.target import RewardTarget, Status, decoded, described, status_of
from rlhf.contract import SERVICES
from rlhf.v1 import worker_pb2

HEALTH_CHECK = "/grpc.health.v1.Health/Check"


def check_reachable(target: RewardTarget) -> str:
    """Checks that a gRPC server is at the target's address and scores a row."""
    started = time.monotonic()
    try:
        grpc.channel_ready_future(target.channel).result(target.deadline_s)
    except grpc.FutureTimeoutError:
        raise Violation(
            f"nothing answers at {target.address} within {target.deadline_s:g} s",
            "Start the server, or look at host and port; it has to speak gRPC, without TLS unless --security is given.",
        ) from None
    target.score(target.rows[:1])
    return f"it scored a row within {time.monotonic() - started:.2f} s"


def check_health(target: RewardTarget) -> str:
    """Checks that the server's gRPC health is SERVING. Raises Caution where it has no health service."""
    request = health_pb2.HealthCheckRequest().SerializeToString()
    try:
        answer = target.method(HEALTH_CHECK)(request, timeout=target.deadline_s)
    except grpc.RpcError as error:
        seen = f"grpc.health.v1.Health/Check ended with {described(error)}"
        if status_of(error) is not Status.UNIMPLEMENTED:
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
    """Checks that Describe, if the server has it, says that it is a reward that reads text. Sets
    `target.scores_groups`."""
    describe = SERVICES["worker"]["Describe"]
    request = worker_pb2.DescribeRequest().SerializeToString()
    try:
        answer = target.method(describe.path)(request, timeout=target.deadline_s)
    except grpc.RpcError as error:
        if status_of(error) is Status.UNIMPLEMENTED:
            return "it has no WorkerService, so it is taken for a reward that reads text"
        raise Violation(
            f"WorkerService/Describe ended with {described(error)}, not UNIMPLEMENTED",
            "Leave WorkerService out: UNIMPLEMENTED shows the controller that this server is not one of the package.",
        ) from error
    description = decoded(worker_pb2.DescribeResponse, answer)
    if description.role != "reward":
        raise Violation(
            f"Describe says that its role is {description.role!r}",
            'Check the address: this is no reward. A reward of your own says "reward", or leaves WorkerService out.',
        )
    target.scores_groups = description.scores_groups
    if description.input_form == worker_pb2.INPUT_FORM_TENSOR or len(description.ranks) > 1:
        raise Undecided(
            f"it has {len(description.ranks)} ranks and reads {worker_pb2.InputForm.Name(description.input_form)}",
            "These checks are for rewards of one rank that read text.",
        )
    scored = "groups" if description.scores_groups else "rows"
    return f"Describe says reward, text, {scored}, {description.engine or 'engine unknown'}"
