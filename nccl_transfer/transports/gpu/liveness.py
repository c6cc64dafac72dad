"""Streams by which the two sides of a connection detect each other's end."""

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
"""Error text of waits that end because this side was closed."""

LONGEST_PAUSE_S = 1e-3
"""Longest pause between two polls of a wait; the first pauses are shorter."""


def liveness_channel(address: str) -> grpc.Channel:
    """A channel on a connection of its own, whose streams are read in the background."""
    return open_channel(address, (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


class LivenessStream:
    """A stream from a source that yields one message and then stays open while both sides live. Its end tells either
    side that the other closed it or died, and to free its memory.

    Args:
        stream: The call, just started.
        closed: Set to end the waits of this side.
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
        """Waits for the message. Errors as in `wait`, and those by which the source refused."""
        self.wait(self._first.done, deadline, where)
        return self._first.result()

    def wait(self, done: Callable[[], bool], deadline: float, where: str) -> None:
        """Waits until `done()` is true.

        Raises:
            DeadlineExceeded: The deadline, as of `time.monotonic`, has passed.
            ServiceLost: The other side has ended.
            Refused: This side was closed.
        """
        pause = LONGEST_PAUSE_S / 64
        while True:
            if self._closed.is_set():
                raise Refused(f"{where}: {CLOSED}")
            if done():
                return
            if self._ended.is_set() and not done():
                raise self._why_ended(where)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{where}: no answer by the deadline")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def end_cause(self, where: str, within_s: float) -> RlhfError | None:
        """Why the other side has ended; None if it is alive after `within_s` seconds."""
        return self._why_ended(where) if self._ended.wait(within_s) else None

    def _why_ended(self, where: str) -> RlhfError:
        if self._stream.code() is grpc.StatusCode.OK:
            return ServiceLost(f"{where}: the source gave up")
        return from_rpc_error(self._stream, where)

    def cancel(self) -> None:
        """Ends the stream."""
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
    """Waits for the answer to a call.

    Raises:
        RlhfError: The call failed, the source has ended, or it did not answer in time.
    """
    try:
        liveness.wait(call.done, deadline, where)
        call.result()
    except grpc.RpcError as error:
        raise from_rpc_error(error, where) from error
    finally:
        call.cancel()
