"""A child of a ProcessScorer: `python -m services.reward.child FUNCTION OPTIONS PARENT` scores rows from its stdin."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from typing import BinaryIO

from rlhf.v1 import reward_pb2
from services.reward.functions import find_function, required_module, score_row
from services.reward.processes import LENGTH, READY

PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 4 << 30
"""Address space: a function that asks for more fails with a MemoryError, instead of taking the host along."""


def main(name: str, options: str, parent: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    rows, answers = _take_over_stdio()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    function = find_function(name, json.loads(options))
    if module := required_module(name):
        importlib.import_module(module)
    _write(answers, READY)
    while header := rows.read(LENGTH.size):
        row = reward_pb2.TextRow.FromString(rows.read(*LENGTH.unpack(header)))
        _write(answers, score_row(name, function, row).SerializeToString())


def _take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent; what the function reads is empty, and what it prints goes to the log."""
    rows, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return rows, answers


def _write(answers: BinaryIO, message: bytes) -> None:
    answers.write(LENGTH.pack(len(message)) + message)
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
