"""The service's end of a fork server and of the processes that it forks; `services.reward.child` is the other end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.v1 import reward_pb2
from services.reward import child as wire

START_TIMEOUT_S = 60.0
"""Longest time in which the fork server imports its modules, and in which a process loads its function."""
ANSWER_TIMEOUT_S = 10.0
"""Longest time the fork server takes to fork or end a process."""


class ForkServer:
    """Forks processes that score rows with a function, and ends them.

    Commands and answers carry no numbers, so an answer that is late or missing closes the server for good, and its
    processes end with it.

    Args:
        function: Its name, as `find_function` takes it.
        options: Keyword arguments of every call.

    Attributes:
        is_closed: Whether the server has been closed or has failed: no process of it is alive any more.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        fd, parent = theirs.fileno(), os.getpid()
        with theirs:
            # The output of functions goes to the log, and their standard input is empty.
            self._process = subprocess.Popen(
                (*(sys.executable, "-m", "services.reward.child"),
                 *(str(fd), str(parent), function, json.dumps(dict(options)))),
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(fd,), start_new_session=True,
            )  # fmt: skip
        self._is_ready = False
        self._turn = asyncio.Lock()
        self._discards: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def close(self) -> None:
        """Ends the server, and with it all processes that it has forked."""
        self.is_closed = True
        self._control.close()
        self._process.kill()
        self._process.wait()

    async def fork(self) -> Child:
        """Returns a process that has loaded its function.

        Raises:
            TimeoutError: The process was not ready in time, or the server was not and is closed.
            EOFError, OSError: The process has ended, or the server has.
        """
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        forking = asyncio.ensure_future(self._fork(theirs))
        try:
            child = Child(self, await asyncio.shield(forking), reader, writer)
            await asyncio.wait_for(child.wait_until_loaded(), START_TIMEOUT_S)
            return child
        except BaseException:
            writer.close()
            if forking.done():
                await self._discard(forking)
            else:  # The caller is cancelled, and the process is not there yet.
                discard = asyncio.ensure_future(self._discard(forking))
                self._discards.add(discard)
                discard.add_done_callback(self._discards.discard)
            raise

    async def end(self, pid: int, is_ending: bool) -> tuple[int, bool]:
        """Ends a process; returns its return code and whether it had ended by itself, as `wire.END`.

        Raises:
            TimeoutError, EOFError, OSError: The server does not answer, and is closed.
        """
        # A cancelled caller must not leave its answer to the next one.
        return wire.ENDED.unpack(await asyncio.shield(self._ask(wire.END.pack(b"e", pid, is_ending))))

    async def _fork(self, theirs: socket.socket) -> int:
        with theirs:
            return wire.PID.unpack(await self._ask(wire.FORK.pack(b"f"), [theirs.fileno()]))[0]

    async def _discard(self, forking: asyncio.Task[int]) -> None:
        """Ends a process that its caller no longer needs, once it is forked."""
        with contextlib.suppress(
            EOFError, OSError
        ):  # then the server is closed, and the process has ended with it
            await self.end(await forking, False)

    async def _ask(self, command: bytes, fds: Sequence[int] = ()) -> bytes:
        async with self._turn:
            if self.is_closed:
                raise EOFError("the fork server is closed")
            try:
                if not self._is_ready:
                    await self._answer(START_TIMEOUT_S)
                    self._is_ready = True
                socket.send_fds(self._control, [command], list(fds))
                return await self._answer(ANSWER_TIMEOUT_S)
            except (EOFError, OSError):
                self.close()
                raise

    async def _answer(self, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        answer = await asyncio.wait_for(loop.sock_recv(self._control, 64), timeout_s)
        if not answer:
            raise EOFError("the fork server has ended")
        return answer


class Child:
    """A process that scores one row at a time.

    Attributes:
        has_read_truth: Whether the process has read the ground truth of the row that it is scoring.
    """

    def __init__(
        self, server: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self.has_read_truth = False

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended because its fork server was closed."""
        return self._server.is_closed

    async def wait_until_loaded(self) -> None:
        """Returns when the process has loaded its function. Raises EOFError where it has ended."""
        await self._read()

    async def score(self, row: reward_pb2.TextRow) -> tuple[reward_pb2.RowScore, str]:
        """Returns the score of a row, and the cause where the verifier gave up on its response, else "".

        Raises:
            EOFError, ConnectionError: The process has ended.
        """
        self.has_read_truth = False
        message = row.SerializeToString()
        self._writer.write(wire.HEADER.pack(len(message), wire.SCORE) + message)
        await self._writer.drain()
        kind, answer = await self._read()
        if kind == wire.TRUTH_READ:
            self.has_read_truth = True
            kind, answer = await self._read()
        if kind == wire.GAVE_UP:
            return reward_pb2.RowScore(score=0.0), answer.decode()
        return reward_pb2.RowScore.FromString(answer), ""

    async def end(self) -> int | None:
        """Ends the process and all processes that it has started.

        Returns:
            The code with which the process had ended by itself, negative for a signal; None where it had not. -SIGKILL
            where its fork server is closed: no more is known then, and the response is not the cause.
        """
        is_ending = self._reader.at_eof()
        self._writer.close()
        try:
            code, had_ended = await self._server.end(self._pid, is_ending)
        except (EOFError, OSError):
            return -signal.SIGKILL
        return code if had_ended else None

    async def _read(self) -> tuple[bytes, bytes]:
        header = await self._reader.readexactly(wire.HEADER.size)
        length, kind = wire.HEADER.unpack(header)
        return kind, await self._reader.readexactly(length)


def described(code: int | None) -> str:
    """Returns in words how a process ended; "" where it had not."""
    if code is None:
        return ""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
