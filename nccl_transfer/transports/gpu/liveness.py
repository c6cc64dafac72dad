"""gRPC streams by which a reader and a source detect that the other has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from rlhf.channels import open_channel
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import DeadlineExceeded, Refused, RlhfError, ServiceLost, from_rpc_error

CLOSED = "the transport was closed"
"""Error message of waits that end because the transport of this process was closed."""

NO_ANSWER = "no answer by the deadline"
"""Error message of waits whose deadline has passed, whether this process or gRPC notes it first."""

GRPC_DEADLINE = "Deadline Exceeded"
"""gRPC's own message of a call whose deadline has passed on this side."""

POLLING_S = 1e-3
"""First seconds of a wait, in which it polls without pauses: a GPU copies 64 MiB in less time than the shortest sleep
of a Linux thread takes, about 60 microseconds."""

LONGEST_PAUSE_S = 1e-3
"""Longest pause between two polls of a wait, in seconds."""

PAUSE_OF_WAIT = 1 / 8
"""Pause between two later polls, as a share of the wait so far."""


def liveness_channel(address: str) -> grpc.Channel:
    """Opens a channel that shares no connection with other channels, and whose streams are read in the background."""
    return open_channel(address, (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


class LivenessStream:
    """The reader's side of a stream that yields one message and then stays open while both processes live. When it
    ends, either side knows that the other has closed it or died, and frees the resources of the connection.

    Args:
        stream: The gRPC call, just started.
        closed: Event that ends all waits of this object with Refused; set when the transport is closed.
    """

    def __init__(self, stream: Any, closed: threading.Event) -> None:
        self._stream = stream
        self._closed = closed
        self._first: Future[Any] = Future()
        self._ended = threading.Event()
        threading.Thread(target=self._read, name="liveness", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the stream is open."""
        return not self._ended.is_set()

    def first(self, deadline: float, where: str) -> Any:
        """Blocks until the stream's message has arrived and returns it. Raises as `wait` does."""
        self.wait(self._first.done, deadline, where)
        return self._first.result()

    def wait(self, done: Callable[[], bool], deadline: float, where: str) -> None:
        """Blocks until `done()` is true.

        Args:
            done: Called repeatedly; must not block.
            deadline: Time on the clock of `time.monotonic`, in seconds.
            where: Prefix of error messages: the source and the operation.

        Raises:
            DeadlineExceeded: The deadline has passed.
            ServiceLost: The source has ended.
            Refused: The transport of this process was closed.
            RlhfError: The source ended the stream with this error.
        """
        started = time.monotonic()
        while True:
            if self._closed.is_set():
                raise Refused(f"{where}: {CLOSED}")
            if done():
                return
            if self._ended.is_set() and not done():
                raise self._why_ended(where)
            now = time.monotonic()
            if now > deadline:
                raise DeadlineExceeded(f"{where}: {NO_ANSWER}")
            waited = now - started
            # A sleep of 0 lets other threads run.
            time.sleep(0 if waited < POLLING_S else min(PAUSE_OF_WAIT * waited, LONGEST_PAUSE_S))

    def end_cause(self, where: str, within_s: float) -> RlhfError | None:
        """Blocks for up to `within_s` seconds until the stream has ended; returns the error of its end, ServiceLost if
        the source ended it without one, or None if it is still open."""
        return self._why_ended(where) if self._ended.wait(within_s) else None

    def _why_ended(self, where: str) -> RlhfError:
        if self._stream.code() is grpc.StatusCode.OK:
            return ServiceLost(f"{where}: the source gave up")
        return from_rpc_error(self._stream, where)

    def cancel(self) -> None:
        """Cancels the stream, upon which the source frees the resources of the connection."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._first.set_result(message)
        except grpc.RpcError:
            pass  # `end_cause` reads the error from the stream
        finally:
            self._ended.set()


def wait_for_answer(call: Any, liveness: LivenessStream, deadline: float, where: str) -> None:
    """Blocks until a gRPC call to the source of `liveness` has its response, which it leaves to the caller. Cancels the
    call if it is not done by the deadline.

    Raises:
        RlhfError: The error of the call, or an error of `LivenessStream.wait`: DeadlineExceeded, ServiceLost, Refused.
    """
    try:
        liveness.wait(call.done, deadline, where)
        call.result()
    except grpc.RpcError as error:
        if error.details() == GRPC_DEADLINE:
            raise DeadlineExceeded(f"{where}: {NO_ANSWER}") from error
        raise from_rpc_error(error, where) from error
    finally:
        call.cancel()
