"""Reward functions in processes of their own, because what they call may hang or crash: then the process is killed, its
row carries the cause, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.v1 import reward_pb2
from services.reward.functions import find_function
from services.reward.scorer import Scorer
from services.reward.side_by_side import score_side_by_side
from services.worker import CallContext

LENGTH = struct.Struct("<I")
"""Goes before each message between a process and its child: a TextRow there, a RowScore back."""

READY = b"ready"
START_TIMEOUT_S = 60.0
END_S = 1.0
"""How long a process that has closed its pipe may take to end."""


class Child:
    """A process that scores one row at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    async def start(function: str, options: Mapping[str, Any]) -> Child:
        """Starts one, and returns when it has loaded its function.

        Raises:
            TimeoutError, EOFError: It has not, or it has ended.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.reward.child", function, json.dumps(dict(options))),
            *(str(os.getpid()),),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        child = Child(process)
        try:
            if await asyncio.wait_for(child._read(), START_TIMEOUT_S) != READY:
                raise EOFError("it did not say that it is ready")
        except BaseException:
            await child.kill()
            raise
        return child

    async def score(self, row: reward_pb2.TextRow) -> reward_pb2.RowScore:
        """The verdict on a row. Raises EOFError or ConnectionError when the process ends meanwhile."""
        stdin = self._process.stdin
        assert stdin is not None
        message = row.SerializeToString()
        stdin.write(LENGTH.pack(len(message)) + message)
        await stdin.drain()
        return reward_pb2.RowScore.FromString(await self._read())

    async def kill(self) -> str:
        """Ends the process and all that it has started; returns how it had ended by itself, empty where it had not."""
        if self._has_closed():
            # It is about to end, and its own exit code tells why.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_S)
        code = self._process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if code is None:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _has_closed(self) -> bool:
        return self._process.stdout is not None and self._process.stdout.at_eof()

    async def _read(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return await stdout.readexactly(length)


class ProcessScorer(Scorer):
    """Calls a function once per row, in child processes.

    Args:
        name: Function, as `find_function` takes it.
        options: Keyword arguments of every call.
        processes: Children, started at the first call.
        row_timeout_s: Longest time a row may take.
    """

    def __init__(self, name: str, options: Mapping[str, Any], processes: int, row_timeout_s: float) -> None:
        find_function(name, options)
        self._name = name
        self._options = options
        self._row_timeout_s = row_timeout_s
        self._children: list[Child | None] = [None] * processes
        self._loop = asyncio.new_event_loop()

    def kind(self) -> str:
        return f"function {self._name}, {len(self._children)} processes"

    def close(self) -> None:
        """Ends the children. They end with this process too, however it ends."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._drop_all())
            self._loop.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        scoring = score_side_by_side(rows, call, len(self._children), self._score)
        return self._loop.run_until_complete(scoring)

    async def _score(self, slot: int, row: reward_pb2.TextRow) -> reward_pb2.RowScore:
        child = self._children[slot]
        try:
            if child is None:
                child = self._children[slot] = await Child.start(self._name, self._options)
            return await asyncio.wait_for(child.score(row), self._row_timeout_s)
        except TimeoutError:
            cause = f"took longer than {self._row_timeout_s:g} s" if child else "did not start"
        except (EOFError, ConnectionError):
            cause = "ended" if child else "ended before it was ready; the service's log has its last words"
        except asyncio.CancelledError:
            await self._drop(slot)
            raise
        ended = await self._drop(slot)
        return reward_pb2.RowScore(error=f"{self._name}: its process {cause}{f' ({ended})' if ended else ''}")

    async def _drop_all(self) -> None:
        for slot in range(len(self._children)):
            await self._drop(slot)

    async def _drop(self, slot: int) -> str:
        """Kills a child whose answer nobody waits for; the next row gets a new one."""
        child, self._children[slot] = self._children[slot], None
        return await child.kill() if child else ""
