"""The exceptions of the cluster, and their conversion to gRPC statuses and back.

RlhfError                      INTERNAL             any failure that no class below describes
├── InvalidRequest             INVALID_ARGUMENT     the request can never succeed as it is
│   └── ConfigError            INVALID_ARGUMENT     a configuration is invalid; nothing was started
├── Refused                    FAILED_PRECONDITION  a valid request that the current state does not allow
│   ├── Restarted              FAILED_PRECONDITION  a service was restarted: it has not what the request names
│   └── UnknownCall            FAILED_PRECONDITION  a rank is asked for the outcome of a call that it does not know
├── NotAuthenticated           UNAUTHENTICATED      a client has no token, or an unknown one
├── NotAllowed                 PERMISSION_DENIED    a client's token does not allow the method
├── ServiceLost                UNAVAILABLE          a service cannot be reached or died
│   └── ShuttingDown           UNAVAILABLE          a rank refuses calls: its process is about to end
├── DeadlineExceeded           DEADLINE_EXCEEDED    a call or a wait took longer than allowed
├── CallCancelled              CANCELLED            a call was asked to stop
├── PeerFailed                 ABORTED              another rank of the service failed and has the cause
│   └── OutOfStep              ABORTED              ranks no longer match; the service ends
├── UpdateRejected             DATA_LOSS            a gradient was not finite or too large; the update was rolled back
├── CorruptWeights             INTERNAL             weights in memory are not what they were, or replicas differ
├── RewardFailed               INTERNAL             rows could not be scored
├── TransferError              OUT_OF_RANGE         a transfer between ranks failed
│   ├── AttachFailed           OUT_OF_RANGE         a transport could not be set up between two ranks
│   └── OutOfSpace             RESOURCE_EXHAUSTED   an arena or a GPU has too little free memory
└── TooManyCalls               RESOURCE_EXHAUSTED   the maximum number of calls waits at a rank
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "rlhf-cluster"
STATUS_KEY = "grpc-status-details-bin"
MAX_MESSAGE = 1000
MAX_TRACEBACK = 4000
MAX_DETAIL = 300
"""Maximum number of characters of an entry of ErrorInfo. This limit, MAX_MESSAGE and MAX_TRACEBACK keep a status
below about 8 KiB, beyond which gRPC drops it."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a line or that a terminal acts on."""
_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal acts on, except tabs and ends of lines."""


class RlhfError(Exception):
    """Base class of all errors of the cluster; `str()` is one line that names the cause."""

    code = grpc.StatusCode.INTERNAL
    remote_traceback: str = ""
    """Traceback on the rank that raised the error; empty for errors raised in this process."""
    service: str = ""
    """Name of the service that raised the error; empty for errors raised in this process."""
    called: str = ""
    """Name, in the config, of the service that a failed call was sent to; empty for errors of no call of a client."""

    def of_call(self, service: str) -> Self:
        """Sets `called`, and returns this error."""
        self.called = service
        return self


class InvalidRequest(RlhfError):
    """A request that can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ConfigError(InvalidRequest):
    """The configuration, or a file that it names, is invalid; raised before anything starts."""


class Refused(RlhfError):
    """A valid request that the current state does not allow: another epoch, a superseded session, another role,
    released rows."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Restarted(Refused):
    """A request that names the state of a process of a service that has ended: the service was restarted since."""


class UnknownCall(Refused):
    """A rank is asked for the outcome of a call that it has not received, or no longer remembers."""


class NotAuthenticated(RlhfError):
    """A client has sent no token to a service that asks for one, or a token that it does not know."""

    code = grpc.StatusCode.UNAUTHENTICATED


class NotAllowed(RlhfError):
    """The token of a client does not allow the method."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ServiceLost(RlhfError):
    """A service cannot be reached, or died in the middle of a call."""

    code = grpc.StatusCode.UNAVAILABLE


class ShuttingDown(ServiceLost):
    """A rank refuses calls, since its process is about to end."""


class DeadlineExceeded(RlhfError):
    """A call or a wait took longer than allowed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelled(RlhfError):
    """A call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class PeerFailed(RlhfError):
    """Another rank of the service failed, so this rank stopped or did not start; that rank's error has the cause."""

    code = grpc.StatusCode.ABORTED


class OutOfStep(PeerFailed):
    """The ranks of a service no longer run the same collectives: one is at another call, did not arrive, failed
    alone, or died. Later collectives could not be trusted, so a rank that raises this error exits."""


class UpdateRejected(RlhfError):
    """A gradient of an update was not finite or too large, so the update was rolled back: every rank has the weights of
    the previous policy version."""

    code = grpc.StatusCode.DATA_LOSS


class CorruptWeights(RlhfError):
    """Tensors in the memory of a service are not what they were, or replicas of a tensor differ. The service may not be
    trained further; its state has to be loaded again."""


class RewardFailed(RlhfError):
    """Rows could not be scored. Raised instead of giving such rows a score of 0."""


class TransferError(RlhfError):
    """A transfer of bytes between two ranks failed."""

    code = grpc.StatusCode.OUT_OF_RANGE


class AttachFailed(TransferError):
    """A transport that both ranks have could not be set up between them, so that no byte was read; another transport
    may reach the same rank."""


class OutOfSpace(TransferError):
    """An arena, a GPU or the host has too little free memory; the message gives the size that was asked for."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooManyCalls(RlhfError):
    """A rank refuses a call because the maximum number of calls is waiting."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


def _tree(base: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield base
    for sub in base.__subclasses__():
        yield from _tree(sub)


def to_status(error: BaseException, where: Mapping[str, str]) -> status_pb2.Status:
    """Converts an error to a google.rpc.Status with ErrorInfo (the error's class, and `where`) and DebugInfo (the
    traceback).

    Args:
        error: Any exception; one that is not an RlhfError becomes INTERNAL.
        where: Place of the error by key, as a rule service, rank, method and call id. Values, message and traceback
            are cut to the maximum lengths above.
    """
    reason = type(error).__name__
    if isinstance(error, RlhfError):
        code, message = error.code, str(error)
    else:
        code, message = grpc.StatusCode.INTERNAL, f"{reason}: {error}"
    message = shortened(encodable(message.replace("\n", " ")))
    trace = encodable(full_traceback(error))[-MAX_TRACEBACK:]
    shown = {key: encodable(value)[:MAX_DETAIL] for key, value in where.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=shown)
    debug = error_details_pb2.DebugInfo(stack_entries=[trace])
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in (info, debug):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def encodable(text: str) -> str:
    """Returns a text that UTF-8, and so a message, can hold: halves of surrogate pairs are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str) -> str:
    """Returns the first MAX_MESSAGE characters of a text, followed by the length of the whole text; a text that is not
    longer is returned unchanged."""
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}... ({len(text)} characters)"


def one_line(text: str, most: int = MAX_MESSAGE) -> str:
    """Returns a text that came from outside as one line for a log, of at most `most` of its characters: it can
    neither fill the log nor pass for further lines of it. Control characters are escaped."""
    line = _CONTROL.sub(_escaped, text[:most])
    return encodable(line if len(text) <= most else f"{line}... ({len(text)} characters)")


def printable(text: str) -> str:
    """Returns a text of several lines, such as a traceback, with the control characters escaped that a terminal acts
    on, except tabs and ends of lines."""
    return encodable(_TERMINAL.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def full_traceback(error: BaseException) -> str:
    """Returns the traceback of an error and of its causes as text, also after `drop_frames`."""
    return _kept_tracebacks(error) or "".join(traceback.format_exception(error))


def drop_frames(error: BaseException) -> None:
    """Sets `__traceback__` of an error and of its causes to None, in place, since frames would keep their local
    variables alive as long as the error is referenced. `full_traceback` still returns the text."""
    if not _kept_tracebacks(error):
        error.__dict__["kept_traceback"] = full_traceback(error)
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__


def _kept_tracebacks(error: BaseException) -> str:
    """Returns the traceback that `drop_frames` kept; empty if it was not called with `error`."""
    return error.__dict__.get("kept_traceback", "")


def from_rpc_error(error: grpc.RpcError, where: str) -> RlhfError:
    """Converts the error of a failed gRPC call to an RlhfError, and returns it. Its class is the one that the server's
    status details name, or else the one of the status code, or else RlhfError. Sets `remote_traceback` and `service`.
    What the server says is shortened, and made printable.

    Args:
        error: Error of the call.
        where: Prefix of the message, as a rule role, rank, address and method.
    """
    call: Any = error  # the error is a grpc.Call too, which grpc's types omit
    code, message = call.code(), call.details()
    details = _Details()
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_KEY:
            with contextlib.suppress(DecodeError):  # of a server that is not ours
                details = _Details.of(status_pb2.Status.FromString(value))
    if code is grpc.StatusCode.UNAVAILABLE and not details.reason:
        message = f"cannot be reached or died: {message}"
    return _error(code, details, where, message or "")


def from_status(status: status_pb2.Status, where: str) -> RlhfError:
    """Converts the result of `to_status` back to an error of the same class, or to a plain RlhfError where the class
    was no RlhfError, and returns it. `where` becomes the prefix of its message, which is one line as `from_rpc_error`
    makes it."""
    code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    return _error(code, _Details.of(status), where, status.message)


@dataclass(frozen=True)
class _Details:
    """Details that servers of the cluster add to a status: name of the error's class, name of the service, traceback.
    Each is empty where the status lacks it."""

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
            one_line(info.metadata["service"], MAX_DETAIL) if ours and "service" in info.metadata else "",
            printable("".join(debug.stack_entries)[-MAX_TRACEBACK:]),
        )


def _error(code: grpc.StatusCode | None, details: _Details, where: str, message: str) -> RlhfError:
    by_name = {cls.__name__: cls for cls in _tree(RlhfError)}
    by_code = {cls.code: cls for cls in reversed(list(_tree(RlhfError)))}
    cls = by_name.get(details.reason) or by_code.get(code, RlhfError)  # type: ignore[arg-type]
    # Of our servers, a message is already shortened to MAX_MESSAGE and the length that it had.
    told = one_line(message.replace("\n", " "), 2 * MAX_MESSAGE)
    raised = cls(f"{where}: {told}")
    raised.remote_traceback, raised.service = details.traceback, details.service
    return raised
