"""The processes of a ProcessScorer: a fork server, `python -m services.reward.child CONTROL PARENT FUNCTION` with the
function's options as JSON on its standard input, and its children, each of which scores one row at a time.

The fork server imports the modules of built-in functions before the first fork, so that a killed child is replaced
within milliseconds. A user's module is imported by each child, after the fork, since it may start threads, which a
fork does not copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import logging
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

from rlhf.parent import ends_with
from rlhf.v1 import common_pb2, reward_pb2
from services.reward.functions import RewardFunction, truth_reader, warm_up
from services.reward.loaded import LoadedFunction, Scored
from services.reward.scorers.base import GaveUp

HEADER = struct.Struct("<Ic")
"""Header of each message between the service and a child: length of the content in bytes, and kind."""
READY, TRUTH_READ, SCORE, GAVE_UP = b"r", b"t", b"s", b"g"
"""Kinds of message. READY: the function is loaded. TRUTH_READ: the row's ground truth is read, so that the response
is the cause of any later failure. SCORE: a ComputeRewardRequest with the row, or the rows of the group, to score, or
the ComputeRewardResponse, whose outcome has the metrics of these rows. GAVE_UP: the cause for which the verifier gave
up on the response."""

FORK, END = struct.Struct("<c"), struct.Struct("<cI?")
"""Commands to the fork server. FORK, "f" and the child's socket: forks a child; the answer is PID. END, "e", the PID
of a child, and whether the child has closed its socket, so that it is about to end by itself: ends the child; the
answer is ENDED."""
PID, ENDED = struct.Struct("<I"), struct.Struct("<i?")
"""Answers of the fork server. PID: PID of the new child. ENDED: return code of the child, negative for a signal, and
whether it had ended by itself."""
END_S = 1.0
"""Maximum seconds in which a child that has closed its socket ends by itself, before it is killed."""

MEMORY_BYTES = 4 << 30
"""Maximum address space of a child in bytes; a function that needs more gets a MemoryError."""
VERIFIER_MEMORY_BYTES = 1 << 30
"""Maximum address space in bytes of a child that runs a verifier, of which there are many."""
RESPONSE_CPU_S = 2
"""Maximum CPU seconds of a verifier for one response, after which the kernel ends the child."""


def main(control_fd: int, parent: int, name: str, options: str) -> None:
    """Runs the fork server: forks and ends children until the service closes the control socket.

    Args:
        control_fd: Descriptor of the control socket, from which commands are read.
        parent: PID of the service.
        name: Function, as taken by `find_function`.
        options: JSON of the keyword arguments of every call.
    """
    if not ends_with(parent):
        return
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} in process %(process)d: %(message)s")
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
    """Waits up to `wait_s` seconds for the end of a child, then kills it and all processes that it has started;
    returns the fields of ENDED."""
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
        if ends_with(server):
            score_rows(socket.socket(fileno=fd), name, options)
        code = 0
    except BaseException:  # noqa: BLE001 - printed, and shown by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def score_rows(link: socket.socket, name: str, options: str) -> None:
    """Runs a child: loads the function, then scores the rows that arrive on `link` until the service closes it."""
    stream = link.makefile("rwb")
    read_truth = truth_reader(name)
    memory = VERIFIER_MEMORY_BYTES if read_truth else MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    function = LoadedFunction.load(name, json.loads(options))
    if read_truth:
        function = dataclasses.replace(
            function, function=functools.partial(_verify, function.function, read_truth, stream)
        )
    score = _awaiting(function) if function.is_async else function.score
    _write(stream, READY)
    while header := stream.read(HEADER.size):
        length, _ = HEADER.unpack(header)
        rows = reward_pb2.ComputeRewardRequest.FromString(stream.read(length)).text_rows
        scored = score(rows)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stream, GAVE_UP, scored.cause.encode()) if scored.cause else _write_scores(stream, scored)


def _awaiting(function: LoadedFunction) -> Callable[[Any], Scored]:
    """Returns a function that scores the rows of a unit on an event loop, the same for all units."""
    loop = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    return lambda rows: loop.run(function.score_async(rows))


def _verify(
    function: RewardFunction, read_truth: Callable[[str], object], stream: BufferedRWPair, *row: Any
) -> Any:
    """Reads the ground truth, whose errors are raised as they are, sends TRUTH_READ, and calls the verifier. Any
    exception of the verifier other than GaveUp becomes GaveUp("failed")."""
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


def _write_scores(stream: BufferedRWPair, scored: Scored) -> None:
    means = {name: common_pb2.Mean(sum=total, count=count) for name, (total, count) in scored.metrics.items()}
    outcome = common_pb2.Outcome(metrics=means)
    answer = reward_pb2.ComputeRewardResponse(outcome=outcome, scores=scored.scores)
    _write(stream, SCORE, answer.SerializeToString())


def _write(stream: BufferedRWPair, kind: bytes, message: bytes = b"") -> None:
    stream.write(HEADER.pack(len(message), kind) + message)
    stream.flush()


if __name__ == "__main__":
    given = sys.stdin.read()
    with open(os.devnull) as nothing:  # for functions to read
        os.dup2(nothing.fileno(), 0)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], given)
