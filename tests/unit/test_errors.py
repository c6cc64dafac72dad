"""Errors cross the wire as what they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import DebugInfo, ErrorInfo

from rlhf import errors
from rlhf.errors import (
    STATUS_KEY,
    InvalidRequest,
    Refused,
    RlhfError,
    drop_frames,
    from_rpc_error,
    from_status,
    to_status,
)

WHERE = {"service": "actor", "rank": "1", "method": "UpdateActor", "call_id": "c"}


def tree(base: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield base
    for sub in base.__subclasses__():
        yield from tree(sub)


class Failed(grpc.RpcError):
    """Error of a channel, with the status another process sent."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes | None) -> None:
        self._code, self._message, self._details = code, message, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [] if self._details is None else [(STATUS_KEY, self._details)]


def over_the_wire(error: Exception) -> Failed:
    status = to_status(error, WHERE)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return Failed(code, status.message, status.SerializeToString())


@pytest.mark.parametrize("kind", list(tree(RlhfError)), ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_its_own_class_with_its_place_and_traceback(kind: type[RlhfError]) -> None:
    try:
        raise kind("what happened")
    except RlhfError as error:
        arrived = from_rpc_error(over_the_wire(error), "actor rank 1 (host:1) UpdateActor")
    assert type(arrived) is kind
    assert str(arrived) == "actor rank 1 (host:1) UpdateActor: what happened"
    assert "test_errors.py" in arrived.remote_traceback


def test_an_unforeseen_error_arrives_with_its_name() -> None:
    arrived = from_rpc_error(over_the_wire(KeyError("x\ny")), "here")
    assert type(arrived) is RlhfError
    assert str(arrived) == "here: KeyError: 'x\\ny'"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, errors.ServiceLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.RlhfError),
        (grpc.StatusCode.UNKNOWN, errors.RlhfError),
        (grpc.StatusCode.INTERNAL, errors.RlhfError),
        (grpc.StatusCode.OUT_OF_RANGE, errors.TransferError),
    ],
)
def test_a_foreign_server_is_understood_by_its_code(code: grpc.StatusCode, kind: type[RlhfError]) -> None:
    assert type(from_rpc_error(Failed(code, "text", None), "here")) is kind


def test_details_that_cannot_be_read_do_not_hide_the_error() -> None:
    arrived = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "text", b"\xff"), "here")
    assert type(arrived) is errors.ServiceLost
    assert str(arrived) == "here: cannot be reached or died: text"


def test_what_a_server_says_is_bounded_and_moves_no_cursor() -> None:
    info, debug = ErrorInfo(domain=errors.DOMAIN, reason="Refused"), DebugInfo()
    info.metadata["service"] = "reward\x1b[2J" + "x" * 10**6
    debug.stack_entries.append("x" * 10**6 + "\n\tline 2\x1b[2J")
    status = status_pb2.Status(code=grpc.StatusCode.FAILED_PRECONDITION.value[0])
    status.message = "no\nok\x1b]0;title\x07 \x9b2J" + "x" * 10**6
    for detail in (info, debug):
        status.details.add().Pack(detail)
    arrived = from_status(status, "here")
    assert str(arrived).startswith(r"here: no ok\x1b]0;title\x07 \x9b2Jxxx")
    assert arrived.remote_traceback.endswith("xxx\n\tline 2\\x1b[2J")
    texts = (str(arrived), arrived.remote_traceback, arrived.service)
    assert all(len(text) < 5_000 and "\x1b" not in text for text in texts)


def test_no_two_branches_share_a_code() -> None:
    own = [kind.code for kind in RlhfError.__subclasses__() if "code" in vars(kind)]
    assert len(own) == len(set(own))


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    ours = [kind.__name__ for kind in tree(RlhfError) if kind.__module__ == errors.__name__]
    missing = [name for name in ours if name not in errors.__doc__]
    assert missing == []


def test_an_error_that_is_remembered_keeps_its_traceback_as_text_and_none_of_its_frames():
    class Rows:
        pass

    def work(rows: Rows) -> None:
        raise Refused("no")

    rows = Rows()
    gone = weakref.ref(rows)
    with pytest.raises(Refused) as caught:
        work(rows)
    error = caught.value
    del caught, rows
    drop_frames(error)
    assert gone() is None
    debug = DebugInfo()
    assert any(detail.Unpack(debug) for detail in to_status(error, {}).details)
    assert "in work" in debug.stack_entries[0]


@pytest.mark.parametrize("letter", ["x", "\ud800"])
def test_a_status_has_a_bounded_size_whatever_is_in_it(letter: str):
    status = to_status(InvalidRequest(letter * 10**6), {"call_id": letter * 10**6, "rank": "0"})
    assert len(status.SerializeToString()) < 8_000


def test_half_a_surrogate_pair_is_escaped():
    try:
        raise ValueError("\ud83d")
    except ValueError as error:
        status = to_status(error, {"method": "\ud83d"})
    debug, info = DebugInfo(), ErrorInfo()
    assert all(detail.Unpack(debug) or detail.Unpack(info) for detail in status.details)
    assert status.message == r"ValueError: \ud83d"
    assert info.metadata["method"] == r"\ud83d"
    assert r"ValueError: \ud83d" in debug.stack_entries[0]
