"""The requests of a load test, serialised before the first is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import payloads
from loadtest.payloads import IDS, TEXTS, Shape
from loadtest.target import Target
from nccl_transfer.refs import wire
from nccl_transfer.refs.protocols import get_protocol
from rlhf.contract import Method, role_methods
from rlhf.errors import ConfigError
from rlhf.v1 import actor_pb2

TEMPERATURE = 1.0


def make_requests(target: Target, method: Method, shape: Shape, data: Path | None) -> list[list[bytes]]:
    """Makes serialized requests without headers: a list per call, which calls cycle through, with a request per rank.
    For a method that is not the role's own, such as Describe, there is one list, of empty requests.

    Raises:
        ConfigError: The rows do not fit the service or the method.
    """
    if method.name not in role_methods(target.role):
        return [[b""] * (target.num_ranks if method.spec else 1)]
    as_text = method.name == "ComputeReward" and target.wants_text
    columns = _columns(method, as_text)
    _check_lengths(target, shape, columns)
    batches = payloads.make_batches(columns, shape, data)
    return [_of_ranks(target, method, rows, columns, shape, as_text) for rows in batches]


def _columns(method: Method, as_text: bool) -> Sequence[str]:
    if method.name == "ComputeReward":
        return TEXTS if as_text else IDS
    return method.inputs


def _check_lengths(target: Target, shape: Shape, columns: Sequence[str]) -> None:
    longest = shape.prompt.most + shape.response.most
    most = target.description.max_tokens if target.description else 0
    if set(columns) == set(IDS) and most and longest > most:
        raise ConfigError(f"rows reach {longest} tokens, and the service takes at most {most}")


def _of_ranks(
    target: Target,
    method: Method,
    rows: list[dict[str, Any]],
    columns: Sequence[str],
    shape: Shape,
    as_text: bool,
) -> list[bytes]:
    protocol = get_protocol(method.spec.transfer_protocol)  # type: ignore[union-attr]
    requests = []
    for numbers in protocol.distribute(len(rows), target.mesh):
        part = [rows[number] for number in numbers]
        content: dict[str, Any] = (
            {"text_rows": payloads.to_text_rows(part)}
            if as_text
            else {"batch": wire.to_proto(payloads.to_batch(part, columns), numbers)}
        )
        request: Any = method.request(**content, **_options(method, shape))
        requests.append(request.SerializeToString())
    return requests


def _options(method: Method, shape: Shape) -> dict[str, Any]:
    """Returns the fields that a method's request requires in addition to the rows, by name."""
    if method.name == "GenerateSequences":
        longest = max(shape.response.most, 1)
        return {"sampling": actor_pb2.Sampling(temperature=TEMPERATURE, max_new_tokens=longest)}
    if method.name in ("ComputeLogProb", "ComputeRefLogProb"):
        return {"temperature": TEMPERATURE}
    return {}
