"""The parent's view of a fork server and of the processes that it forks; `services.reward.child` is the other end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rlhf.v1 import reward_pb2
from services.reward import child as wire

START_TIMEOUT_S = 60.0
"""Longest time in which the fork server imports what functions need, and in which a process loads its function."""
ANSWER_TIMEOUT_S = 10.0
"""Longest time the fork server takes to fork or end a process."""


class ForkServer:
    """Forks processes that score rows with a function, and ends them.

    Args:
        function: Its name, as `find_function` takes it.
        options: Keyword arguments of every call.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        fd, parent = theirs.fileno(), os.getpid()
        with theirs:
            # What functions print goes to the log, and there is nothing that they could read.
            self._process = subprocess.Popen(
                (*(sys.executable, "-m", "services.reward.child"),
                 *(str(fd), str(parent), function, json.dumps(dict(options)))),
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(fd,), start_new_session=True,
            )  # fmt: skip
        self._is_ready = False
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Ends the server, and with it the processes that have not been ended."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    async def fork(self) -> Child:
        """A process that has loaded its function.

        Raises:
            TimeoutError: It, or the server, was not ready in time.
            EOFError, OSError: It, or the server, has ended.
        """
        async with self._turn:
            if not self._is_ready:
                await self._answer(START_TIMEOUT_S)
                self._is_ready = True
        ours, theirs = socket.socketpair()
        with theirs:
            (pid,) = wire.PID.unpack(await self._ask(wire.FORK.pack(b"f"), [theirs.fileno()]))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = Child(self, pid, reader, writer)
        try:
            await asyncio.wait_for(child.wait_until_loaded(), START_TIMEOUT_S)
        except BaseException:
            await child.end()
            raise
        return child

    async def end(self, pid: int, is_ending: bool) -> tuple[int, bool]:
        """Return code of a process that it ends, and whether that had ended by itself; see `wire.END`."""
        return wire.ENDED.unpack(await self._ask(wire.END.pack(b"e", pid, is_ending)))

    async def _ask(self, command: bytes, fds: tuple[int, ...] | list[int] = ()) -> bytes:
        # A cancelled caller must not leave its answer to the next one.
        return await asyncio.shield(asyncio.ensure_future(self._exchange(command, list(map(os.dup, fds)))))

    async def _exchange(self, command: bytes, fds: list[int]) -> bytes:
        try:
            async with self._turn:
                socket.send_fds(self._control, [command], fds)
                return await self._answer(ANSWER_TIMEOUT_S)
        finally:
            for fd in fds:
                os.close(fd)

    async def _answer(self, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        answer = await asyncio.wait_for(loop.sock_recv(self._control, 64), timeout_s)
        if not answer:
            raise EOFError("the fork server has ended")
        return answer


class Child:
    """A process that scores one row at a time.

    Attributes:
        has_read_truth: Whether it has read the ground truth of the row that it is scoring.
    """

    def __init__(
        self, server: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self.has_read_truth = False

    async def wait_until_loaded(self) -> None:
        """Returns when its function is loaded. Raises EOFError where it has ended."""
        await self._read()

    async def score(self, row: reward_pb2.TextRow) -> tuple[reward_pb2.RowScore, str]:
        """The score of a row, and why the verifier gave up on its response, where it did.

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
        """Ends the process and all that it has started; returns with which code it had ended by itself, negative for a
        signal, None where it had not. Raises as `ForkServer.fork`."""
        is_ending = self._reader.at_eof()
        self._writer.close()
        code, had_ended = await self._server.end(self._pid, is_ending)
        return code if had_ended else None

    async def _read(self) -> tuple[bytes, bytes]:
        header = await self._reader.readexactly(wire.HEADER.size)
        length, kind = wire.HEADER.unpack(header)
        return kind, await self._reader.readexactly(length)


def described(code: int | None) -> str:
    """How a process ended, in words; empty where it had not."""
    if code is None:
        return ""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
