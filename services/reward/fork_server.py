"""The service's side of a fork server and of the processes that it forks, which run `services.reward.child`."""

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

from rlhf.signals import name_of
from rlhf.v1 import reward_pb2
from services.reward import child as wire
from services.reward.loaded import Scored

START_TIMEOUT_S = 60.0
"""Maximum seconds in which the fork server imports its modules, and in which a process loads its function."""
ANSWER_TIMEOUT_S = 10.0
"""Maximum seconds in which the fork server forks or ends a process."""


class ForkServer:
    """Client of a fork server, a process that is started with this object: has it fork processes that score rows with
    a function, and end them.

    Answers are matched to commands by their order alone, so a late or missing answer closes the server for good, and
    its processes end with it.

    Args:
        function: Name of the function, as taken by `find_function`.
        options: Keyword arguments of every call of the function.

    Attributes:
        is_closed: Whether the server was closed or has failed; if so, all its processes have ended.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        fd, parent = theirs.fileno(), os.getpid()
        # In memory: every user of the host can read the arguments of a process, and options may be secrets.
        with theirs, open(os.memfd_create("rlhf-options"), "w+b") as given:
            given.write(json.dumps(dict(options)).encode())
            given.seek(0)
            # The output of functions goes to the log.
            self._process = subprocess.Popen(
                (sys.executable, "-m", "services.reward.child", str(fd), str(parent), function),
                stdin=given, stdout=2, pass_fds=(fd,), start_new_session=True,
            )  # fmt: skip
        self._is_ready = False
        self._turn = asyncio.Lock()
        self._discards: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def close(self) -> None:
        """Ends the fork server and all processes that it has forked."""
        self.is_closed = True
        self._control.close()
        self._process.kill()
        self._process.wait()

    async def fork(self) -> Child:
        """Forks a process and returns it once it has loaded the function.

        Raises:
            TimeoutError: The process did not load the function in time, or the server did not answer in time; in the
                second case the server is now closed.
            EOFError, OSError: The process or the server has ended.
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
        """Ends a process that was forked, and all processes that it has started.

        Args:
            pid: PID of the process.
            is_ending: Whether the process has closed its socket, so that it is about to end by itself.

        Returns:
            The return code of the process, negative for a signal, and whether it had ended by itself.

        Raises:
            TimeoutError, EOFError, OSError: The server does not answer, and is now closed.
        """
        # A cancelled caller must not leave its answer to the next one.
        return wire.ENDED.unpack(await asyncio.shield(self._ask(wire.END.pack(b"e", pid, is_ending))))

    async def _fork(self, theirs: socket.socket) -> int:
        with theirs:
            return wire.PID.unpack(await self._ask(wire.FORK.pack(b"f"), [theirs.fileno()]))[0]

    async def _discard(self, forking: asyncio.Task[int]) -> None:
        """Waits until a process is forked, and ends it, since the caller of `fork` was cancelled or has failed."""
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
    """Client of a process that a ForkServer has forked, which scores one row, or one group of rows, at a time.

    Attributes:
        has_read_truth: Whether the process has read the ground truth of the current or last row.
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
        """Waits until the process has loaded its function.

        Raises:
            EOFError: The process has ended.
        """
        await self._read()

    async def score(self, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        """Scores a row, or the rows of a group.

        Raises:
            EOFError, ConnectionError: The process has ended.
        """
        self.has_read_truth = False
        message = reward_pb2.ComputeRewardRequest(text_rows=rows).SerializeToString()
        self._writer.write(wire.HEADER.pack(len(message), wire.SCORE) + message)
        await self._writer.drain()
        kind, answer = await self._read()
        if kind == wire.TRUTH_READ:
            self.has_read_truth = True
            kind, answer = await self._read()
        if kind == wire.GAVE_UP:
            return Scored([reward_pb2.RowScore(score=0.0)], answer.decode())
        response = reward_pb2.ComputeRewardResponse.FromString(answer)
        metrics = {name: (mean.sum, mean.count) for name, mean in response.outcome.metrics.items()}
        return Scored(list(response.scores), metrics=metrics)

    async def end(self) -> int | None:
        """Ends the process and all processes that it has started.

        Returns:
            The return code if the process had ended by itself, negative for a signal; None if it was running.
            -SIGKILL if its fork server is closed: the process has ended with it, so the response is not the cause.
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
    """Describes the return code of a process, such as "exit code 1" or "killed by SIGSEGV"; "" for None."""
    if code is None:
        return ""
    return f"killed by {name_of(-code)}" if code < 0 else f"exit code {code}"
