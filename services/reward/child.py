"""The other end of a ProcessScorer: a fork server, `python -m services.reward.child CONTROL PARENT FUNCTION OPTIONS`,
and the processes forked from it, each of which scores rows one at a time.

What built-in functions need is imported once, before the first fork, so that a process that was killed is replaced
within milliseconds. A user's module is imported after the fork: it may start threads, which forks do not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

from rlhf.v1 import reward_pb2
from services.reward.functions import RewardFunction, find_function, score_row, truth_reader, warm_up
from services.reward.scorers.base import GaveUp

HEADER = struct.Struct("<Ic")
"""Before each message of a process: its length and kind."""
READY, TRUTH_READ, SCORE, GAVE_UP = b"r", b"t", b"s", b"g"
"""Kinds of message: the function is loaded; the row's ground truth was read, so what happens from here on is the
response's doing; the RowScore; the verifier gave up on the response, for this cause."""

FORK, END = struct.Struct("<c"), struct.Struct("<cI?")
"""Commands to the fork server: "f" with the process's socket, answered with its PID; "e", a PID, and whether that
process has closed its socket and is about to end by itself, answered with ENDED."""
PID, ENDED = struct.Struct("<I"), struct.Struct("<i?")
"""ENDED: return code, negative for a signal; whether the process had ended by itself."""
END_S = 1.0
"""How long a process that has closed its socket may take to end."""

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 << 30
"""Address space: a function that asks for more fails with a MemoryError, instead of taking the host along."""
VERIFIER_MEMORY_BYTES = 1 << 30
"""The same for functions that read the ground truth by themselves, which many processes run."""
RESPONSE_CPU_S = 2
"""CPU time for one response, for these functions: then the kernel ends the process, whatever it computes."""


def main(control_fd: int, parent: int, name: str, options: str) -> None:
    """Forks processes, and ends them, until the parent has gone."""
    if not _ends_with(parent):
        return
    control = socket.socket(fileno=control_fd)
    warm_up(name)
    gc.freeze()
    control.send(READY)
    living: set[int] = set()
    while True:
        command, fds, *_ = socket.recv_fds(control, END.size, 1)
        if not command:
            break
        if len(command) == FORK.size:
            server = os.getpid()
            pid = os.fork()
            if not pid:
                control.close()
                _be_child(fds[0], server, name, options)
            os.close(fds[0])
            living.add(pid)
            control.send(PID.pack(pid))
        else:
            _, pid, is_ending = END.unpack(command)
            living.discard(pid)
            control.send(ENDED.pack(*_end(pid, END_S if is_ending else 0.0)))
    for pid in living:
        _end(pid, 0.0)


def _end(pid: int, wait_s: float) -> tuple[int, bool]:
    """Ends a process and all that it has started; see ENDED."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        has_ended = bool(poll.poll(wait_s * 1000))
    finally:
        os.close(pidfd)
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), has_ended


def _be_child(fd: int, server: int, name: str, options: str) -> None:
    code = 1
    try:
        os.setsid()
        if _ends_with(server):
            score_rows(socket.socket(fileno=fd), name, options)
        code = 0
    except BaseException:  # noqa: BLE001 - printed, and told by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def score_rows(link: socket.socket, name: str, options: str) -> None:
    """Scores rows until the parent closes the socket."""
    stream = link.makefile("rwb")
    read_truth = truth_reader(name)
    memory = VERIFIER_MEMORY_BYTES if read_truth else MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    function = find_function(name, json.loads(options))
    _write(stream, READY)
    while header := stream.read(HEADER.size):
        length, _ = HEADER.unpack(header)
        row = reward_pb2.TextRow.FromString(stream.read(length))
        scored = functools.partial(_verify, function, read_truth, stream) if read_truth else function
        score, cause = score_row(name, scored, row)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stream, GAVE_UP, cause.encode()) if cause else _write(stream, SCORE, score.SerializeToString())


def _verify(
    function: RewardFunction, read_truth: Callable[[str], object], stream: BufferedRWPair, *row: Any
) -> Any:
    """Calls a verifier once it has read the ground truth: what it raises from then on is the response's doing."""
    _, _, ground_truth, _ = row
    read_truth(ground_truth)
    _write(stream, TRUTH_READ)
    signal.setitimer(signal.ITIMER_PROF, RESPONSE_CPU_S)
    try:
        return function(*row)
    except GaveUp:
        raise
    except Exception as error:
        traceback.print_exc()
        raise GaveUp("failed") from error


def _write(stream: BufferedRWPair, kind: bytes, message: bytes = b"") -> None:
    stream.write(HEADER.pack(len(message), kind) + message)
    stream.flush()


def _ends_with(parent: int) -> bool:
    """Has the kernel end this process with its parent; False where that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
