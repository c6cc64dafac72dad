"""One exception tree, mapped to gRPC status codes and back at one boundary.

RlhfError                      INTERNAL             something failed that has no better name below
├── InvalidRequest             INVALID_ARGUMENT     the request can never succeed as it is
│   └── ConfigError            INVALID_ARGUMENT     a configuration is wrong; nothing was started
├── Refused                    FAILED_PRECONDITION  right request, wrong moment: epoch, session, role
├── ServiceLost                UNAVAILABLE          a service cannot be reached or died
├── DeadlineExceeded           DEADLINE_EXCEEDED    it took longer than allowed
├── CallCancelled              CANCELLED            somebody asked it to stop
├── PeerFailed                 ABORTED              another rank of the group failed; look there
│   └── OutOfStep              ABORTED              ranks no longer match; the service ends
├── UpdateRejected             DATA_LOSS            an update was not finite; weights are as before
├── RewardFailed               INTERNAL             rows that could not be scored
├── TransferError              OUT_OF_RANGE         a transfer went wrong
│   └── OutOfSpace             RESOURCE_EXHAUSTED   an arena is full
└── TooManyCalls               RESOURCE_EXHAUSTED   a rank has as many calls waiting as it admits
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "rlhf-cluster"
STATUS_KEY = "grpc-status-details-bin"
MAX_MESSAGE = 1000
MAX_TRACEBACK = 4000
MAX_DETAIL = 300
"""Characters of an error's parts that cross the wire; gRPC drops statuses of more than about 8 KiB."""


class RlhfError(Exception):
    """Base class of all errors of the cluster; `str()` is one line that names the cause."""

    code = grpc.StatusCode.INTERNAL
    remote_traceback: str = ""
    """Traceback on the rank that raised it, as in its log."""
    service: str = ""
    """Name of the service that raised it."""


class InvalidRequest(RlhfError):
    """A request that can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ConfigError(InvalidRequest):
    """The configuration, or a file that it names, is invalid; raised before anything starts."""


class Refused(RlhfError):
    """Wrong epoch, superseded session, wrong role, released rows: the state does not allow it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ServiceLost(RlhfError):
    """A service cannot be reached, or died in the middle of a call."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(RlhfError):
    """A call or a wait took longer than allowed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelled(RlhfError):
    """The call was asked to stop."""

    code = grpc.StatusCode.CANCELLED


class PeerFailed(RlhfError):
    """Another rank of the group failed, so this one stopped or did not start; the cause is in that rank's error."""

    code = grpc.StatusCode.ABORTED


class OutOfStep(PeerFailed):
    """Collectives of the ranks no longer match: a rank is at another call, did not come, failed alone, or died. No
    later collective could be trusted, so a rank that raises this exits."""


class UpdateRejected(RlhfError):
    """An update was not finite; every rank is back on the previous policy version."""

    code = grpc.StatusCode.DATA_LOSS


class RewardFailed(RlhfError):
    """Rows that could not be scored; never a zero."""


class TransferError(RlhfError):
    """A transfer of bytes between two ranks failed."""

    code = grpc.StatusCode.OUT_OF_RANGE


class OutOfSpace(TransferError):
    """An arena has no room; the message gives its size and what was asked."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooManyCalls(RlhfError):
    """A rank has as many calls waiting as it admits."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


def _tree(base: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield base
    for sub in base.__subclasses__():
        yield from _tree(sub)


def to_status(error: BaseException, where: Mapping[str, str]) -> status_pb2.Status:
    """google.rpc.Status of an error, with ErrorInfo (class, and `where`: service, rank, method, call id) and DebugInfo
    (the traceback)."""
    reason = type(error).__name__
    if isinstance(error, RlhfError):
        code, message = error.code, str(error)
    else:
        code, message = grpc.StatusCode.INTERNAL, f"{reason}: {error}"
    message = shortened(message.replace("\n", " "))
    trace = full_traceback(error)[-MAX_TRACEBACK:]
    shown = {key: value[:MAX_DETAIL] for key, value in where.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=shown)
    debug = error_details_pb2.DebugInfo(stack_entries=[trace])
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in (info, debug):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def shortened(text: str) -> str:
    """The first MAX_MESSAGE characters of a text, and its length where that is more."""
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}... ({len(text)} characters)"


def full_traceback(error: BaseException) -> str:
    """The traceback of an error and of its causes, also after `drop_frames`."""
    return _kept_tracebacks(error) or "".join(traceback.format_exception(error))


def drop_frames(error: BaseException) -> None:
    """Replaces the frames of an error and of its causes by the traceback as text: frames would keep their local
    variables alive for as long as the error is remembered."""
    if not _kept_tracebacks(error):
        error.__dict__["kept_traceback"] = full_traceback(error)
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__


def _kept_tracebacks(error: BaseException) -> str:
    return error.__dict__.get("kept_traceback", "")


def from_rpc_error(error: grpc.RpcError, where: str) -> RlhfError:
    """The error of a failed call; `where` names role, rank, address and method.

    Its class is the one that status details of our servers name, or else follows from the status code.
    """
    call: Any = error  # the error is a grpc.Call too, which grpc's types omit
    code, message = call.code(), call.details()
    details = _Details()
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_KEY:
            details = _Details.of(status_pb2.Status.FromString(value))
    if code is grpc.StatusCode.UNAVAILABLE and not details.reason:
        message = f"cannot be reached or died: {message}"
    return _error(code, details, f"{where}: {message}")


def from_status(status: status_pb2.Status, where: str) -> RlhfError:
    """The error that `to_status` made a status of; `where` names the rank that sent it."""
    code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    return _error(code, _Details.of(status), f"{where}: {status.message}")


@dataclass(frozen=True)
class _Details:
    """Details that our servers add to a status: class of the error, service, traceback."""

    reason: str = ""
    service: str = ""
    traceback: str = ""

    @staticmethod
    def of(status: status_pb2.Status) -> _Details:
        info, debug = error_details_pb2.ErrorInfo(), error_details_pb2.DebugInfo()
        for detail in status.details:
            # Unpack returns False for another type.
            _ = detail.Unpack(info) or detail.Unpack(debug)
        ours = info.domain == DOMAIN
        return _Details(
            info.reason if ours else "",
            info.metadata["service"] if ours and "service" in info.metadata else "",
            "".join(debug.stack_entries),
        )


def _error(code: grpc.StatusCode | None, details: _Details, message: str) -> RlhfError:
    by_name = {cls.__name__: cls for cls in _tree(RlhfError)}
    by_code = {cls.code: cls for cls in reversed(list(_tree(RlhfError)))}
    cls = by_name.get(details.reason) or by_code.get(code, RlhfError)  # type: ignore[arg-type]
    raised = cls(message)
    raised.remote_traceback, raised.service = details.traceback, details.service
    return raised
