"""Receivers and sources of weights that are killed or stopped at a random moment: the other side ends with one error
that names them, no bucket stays, and what the source does next is as before."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from chaos.weight_processes import hold, read, tensor

from contract.weight_source import WeightSource, fetcher_by, read_all, receiver_of, whole
from integration.ranks import server_context
from nccl_transfer.refs.weight_plans import RankWeights, WeightTransfer
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from nccl_transfer.refs.wire_weights import transfer_to_proto
from rlhf.errors import DeadlineExceeded
from rlhf.v1 import common_pb2
from services.storage.checkpoint import WeightShard

SEED = int(os.environ.get("DEATHS_SEED", 20261123))
PAUSE_S = 0.03
"""Pause of a receiver after each of some 4 pieces."""
WITHIN_S = 2.0
"""Deadline of a transfer whose receiver dies."""
READY_S = 60.0

ROUNDS = [
    pytest.param(4, marks=pytest.mark.slow),
    pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(900)]),
]


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process with a pipe; it does not outlive the block."""
    context = server_context()
    ours, theirs = context.Pipe()
    started = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    started.start()
    theirs.close()
    try:
        yield started, ours
    finally:
        if started.is_alive():
            os.kill(started.pid, signal.SIGKILL)
        started.join(10)
        ours.close()


def transfer_of(source: RankWeights, receivers: int, number: int) -> WeightTransfer:
    wanted = [receiver_of(each, [whole("weight", tensor())]) for each in range(receivers)]
    return WeightTransfer(f"t{number}", 0, 4096, (source,), tuple(wanted))


def hit(pid: int, chance: random.Random) -> int:
    """Kills or stops a process; returns the signal."""
    number = chance.choice((signal.SIGKILL, signal.SIGSTOP))
    os.kill(pid, number)
    return number


WAYS = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "packed"])


@WAYS
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_source_outlives_receivers_that_die_while_they_read(rounds: int, in_place: bool) -> None:
    print(f"DEATHS_SEED={SEED}")
    chance = random.Random(SEED)
    source = WeightSource([("weight", WeightShard.of_whole(tensor()))])
    ended = {"whole": 0, "named": 0}
    for number in range(rounds):
        moved = transfer_of(source.weights, 2, number)
        message = transfer_to_proto(moved).SerializeToString()
        with (
            process(read, message, 0, PAUSE_S, READY_S, in_place) as (victim, first),
            process(read, message, 1, PAUSE_S, READY_S, in_place) as (_, second),
        ):
            assert (first.poll(READY_S), first.recv()) == (True, "ready")
            assert (second.poll(READY_S), second.recv()) == (True, "ready")
            sent, _ = source.send(moved, within_s=WITHIN_S)
            time.sleep(chance.uniform(0, 0.12))
            hit(victim.pid, chance)
            error = sent.exception(WITHIN_S + 10)
            late = rf"transfer t{number}: bucket \d of \d was not read by the deadline by .*rollout rank 0 at 127"
            assert error is None or (type(error) is DeadlineExceeded and re.match(late, str(error))), error
            ended["named" if error else "whole"] += 1
            assert source.store.stat().used_bytes == 0
            assert second.poll(READY_S)
            said = second.recv()
            assert said == "done" or (error and "rollout rank 0 at" in said), said
    print(ended)
    assert ended["named"]
    after = transfer_of(source.weights, 1, rounds)
    sent, _ = source.send(after)
    assert read_all(after, 0, fetcher_by(["memfd"]))[1] == tensor().nbytes
    sent.result(10)
    source.close()


@WAYS
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_receiver_names_a_source_that_dies_while_it_sends(rounds: int, in_place: bool) -> None:
    print(f"DEATHS_SEED={SEED}")
    chance = random.Random(SEED)
    ended = {"whole": 0, "named": 0}
    for number in range(rounds):
        with process(hold) as (victim, pipe):
            assert pipe.poll(READY_S)
            endpoint = endpoint_from_proto(common_pb2.Endpoint.FromString(pipe.recv()))
            held = RankWeights(endpoint, (whole("weight", tensor()),))
            moved = transfer_of(held, 1, number)
            message = transfer_to_proto(moved).SerializeToString()
            with process(read, message, 0, PAUSE_S, WITHIN_S, in_place) as (_, reader):
                assert (reader.poll(READY_S), reader.recv()) == (True, "ready")
                pipe.send(message)
                time.sleep(chance.uniform(0, 0.12))
                hit(victim.pid, chance)
                assert reader.poll(WITHIN_S + 10)
                said = reader.recv()
            if said == "done":
                ended["whole"] += 1
            else:
                ended["named"] += 1
                kind, _, text = said.partition(": ")
                assert kind in ("DeadlineExceeded", "ServiceLost"), said
                assert endpoint.address in text
    print(ended)
    assert ended["named"]
