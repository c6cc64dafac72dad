"""The quickstart's PPO iteration without a cluster: the same engines, losses and advantages under plain torchrun, with
no service, no RPC and no tensor store. `benchmarks.overhead` runs it; see there.

Five processes have the ranks of the services: two for the actor, one each for critic, reference and reward; the
last also does what the controller does in the cluster. Each role's ranks form the default process group, as in a
service; rows go from role to role over a second gloo group of all five. Alone, one process does everything in
turn.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from benchmarks.overhead_roles import (
    Column,
    PlainActor,
    PlainCritic,
    PlainReference,
    PlainReward,
    Sequences,
    Task,
)
from controller.config.config import Config, load
from nccl_transfer.refs.columns import Jagged
from services.compute import matmul

DEADLINE = timedelta(hours=2)
ACTORS, CRITIC, REFERENCE, REWARD = (0, 1), 2, 3, 4
RANKS = 5


class World:
    """All five ranks, and the rows that roles send each other."""

    def __init__(self, store: Store, rank: int) -> None:
        self._group: Any = ProcessGroupGloo(PrefixStore("world", store), rank, RANKS, DEADLINE)

    def barrier(self) -> None:
        self._group.barrier().wait()

    def send(self, column: Column, *ranks: int) -> None:
        sizes = torch.tensor([len(column.lengths), len(column.values)])
        for rank in ranks:
            for tensor in (sizes, torch.from_numpy(column.lengths), column.values.contiguous()):
                self._group.send([tensor], rank, 0).wait()

    def receive(self, rank: int, dtype: torch.dtype) -> Column:
        num_rows, num_values = self._receive(torch.empty(2, dtype=torch.int64), rank).tolist()
        lengths = self._receive(torch.empty(num_rows, dtype=torch.int64), rank).numpy()
        return Jagged(self._receive(torch.empty(num_values, dtype=dtype), rank), lengths)

    def receive_all(self, ranks: tuple[int, ...], dtype: torch.dtype) -> Column:
        """The rows of several ranks, end to end."""
        parts = [self.receive(rank, dtype) for rank in ranks]
        return Jagged(torch.cat([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))

    def send_texts(self, texts: list[str], rank: int) -> None:
        rows = [text.encode() for text in texts]
        lengths = np.asarray([len(row) for row in rows], np.int64)
        self.send(Jagged(torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8), lengths), rank)

    def receive_texts(self, ranks: tuple[int, ...]) -> list[str]:
        column = self.receive_all(ranks, torch.uint8)
        return [bytes(row.numpy()).decode() for row in column.values.split(column.lengths.tolist())]

    def _receive(self, tensor: Tensor, rank: int) -> Tensor:
        self._group.recv([tensor], rank, 0).wait()
        return tensor


class ComputeIntervals:
    """Times in which this process computed, and did not send rows or wait."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        started = time.time()
        yield
        self.intervals.append((started, time.time()))


Iteration = Callable[[int], None]


def actor_iteration(
    actor: PlainActor, task: Task, world: World, rank: int, work: ComputeIntervals
) -> Iteration:
    def run(step: int) -> None:
        prompts = task.prompts(step)
        numbers = np.array_split(np.arange(len(prompts)), len(ACTORS))[rank]
        texts = [task.data[prompt].text for prompt in prompts[numbers]]
        with work.computing():
            sequences, responses = actor.generate(step, numbers, texts)
        for other in (CRITIC, REFERENCE):
            world.send(sequences.prompts, other)
            world.send(sequences.responses, other)
        world.send_texts(responses, REWARD)
        with work.computing():
            log_probs = actor.log_probs(sequences)
        world.send(log_probs, REWARD)
        advantages = world.receive(REWARD, torch.float32)
        with work.computing():
            actor.learn(step, numbers, sequences, log_probs, advantages)

    return run


def _receive_sequences(world: World) -> Sequences:
    parts = [(world.receive(rank, torch.int64), world.receive(rank, torch.int64)) for rank in ACTORS]
    columns = [
        Jagged(torch.cat([c.values for c in of_ranks]), np.concatenate([c.lengths for c in of_ranks]))
        for of_ranks in zip(*parts, strict=True)
    ]
    return Sequences(*columns)


def critic_iteration(critic: PlainCritic, world: World, work: ComputeIntervals) -> Iteration:
    def run(step: int) -> None:
        sequences = _receive_sequences(world)
        with work.computing():
            values = critic.values(sequences)
        world.send(values, REWARD)
        returns = world.receive(REWARD, torch.float32)
        with work.computing():
            critic.learn(step, np.arange(values.rows), sequences, values, returns)

    return run


def reference_iteration(reference: PlainReference, world: World, work: ComputeIntervals) -> Iteration:
    def run(step: int) -> None:
        sequences = _receive_sequences(world)
        with work.computing():
            log_probs = reference.log_probs(sequences)
        world.send(log_probs, REWARD)

    return run


def reward_iteration(reward: PlainReward, task: Task, world: World, work: ComputeIntervals) -> Iteration:
    def run(step: int) -> None:
        prompts = task.prompts(step)
        responses = world.receive_texts(ACTORS)
        with work.computing():
            scores = reward.scores(task.data, prompts, responses)
        log_probs = world.receive_all(ACTORS, torch.float32)
        ref_log_probs, values = world.receive(REFERENCE, torch.float32), world.receive(CRITIC, torch.float32)
        with work.computing():
            advantages, returns = reward.advantages(log_probs, ref_log_probs, values, scores)
        world.send(returns, CRITIC)
        begin = 0
        for rank, numbers in zip(ACTORS, np.array_split(np.arange(len(prompts)), len(ACTORS)), strict=True):
            lengths = advantages.lengths[numbers]
            world.send(Jagged(advantages.values[begin : begin + lengths.sum()], lengths), rank)
            begin += lengths.sum()

    return run


def lone_iteration(config: Config, actor: PlainActor, task: Task, work: ComputeIntervals) -> Iteration:
    critic, reference, reward = PlainCritic(config), PlainReference(config), PlainReward(config)

    def run(step: int) -> None:
        prompts = task.prompts(step)
        numbers = np.arange(len(prompts))
        with work.computing():
            sequences, responses = actor.generate(step, numbers, [task.data[p].text for p in prompts])
            log_probs, values = actor.log_probs(sequences), critic.values(sequences)
            ref_log_probs = reference.log_probs(sequences)
            scores = reward.scores(task.data, prompts, responses)
            advantages, returns = reward.advantages(log_probs, ref_log_probs, values, scores)
            critic.learn(step, numbers, sequences, values, returns)
            actor.learn(step, numbers, sequences, log_probs, advantages)

    return run


def _join(store: Store, role: str, rank: int, size: int) -> None:
    """Makes the ranks of one role the default process group, which their engine uses."""
    dist.init_process_group("gloo", store=PrefixStore(role, store), rank=rank, world_size=size)


def _prepare(
    config: Config, store: Store, rank: int, work: ComputeIntervals
) -> tuple[Iteration, PlainActor | None, World]:
    world = World(store, rank)
    if rank in ACTORS:
        _join(store, "actor", rank, len(ACTORS))
        actor = PlainActor(config)
        return actor_iteration(actor, Task(config), world, rank, work), actor, world
    _join(store, str(rank), 0, 1)
    if rank == CRITIC:
        return critic_iteration(PlainCritic(config), world, work), None, world
    if rank == REFERENCE:
        return reference_iteration(PlainReference(config), world, work), None, world
    return reward_iteration(PlainReward(config), Task(config), world, work), None, world


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", required=True, type=click.Path(path_type=Path), help="Config of the run.")
@click.option("--pace", required=True, metavar="HOST:PORT", help="Store that says when to do how many steps.")
@click.option("--name", required=True, help="Prefix of the keys in that store.")
@click.option("--threads", default=1, show_default=True, help="Threads each process computes with.")
def main(path: Path, pace: str, name: str, threads: int) -> None:
    """Run iterations on request, and report their times."""
    config = load(path)
    rank, alone = int(os.environ["RANK"]), os.environ["WORLD_SIZE"] == "1"
    torch.set_num_threads(threads)
    if (library := config.services["actor"].matmul) != "auto":
        matmul.use(library)
    store, _, _ = next(iter(rendezvous("env://", timeout=DEADLINE)))
    work = ComputeIntervals()
    world: World | None = None
    if alone:
        _join(store, "alone", 0, 1)
        actor = PlainActor(config)
        iterate = lone_iteration(config, actor, Task(config), work)
    else:
        iterate, actor, world = _prepare(config, store, rank, work)
    host, _, port = pace.rpartition(":")
    follow(PrefixStore(name, TCPStore(host, int(port), timeout=DEADLINE)), rank, iterate, actor, world, work)
    dist.destroy_process_group()


def follow(
    pace: Store,
    rank: int,
    iterate: Iteration,
    actor: PlainActor | None,
    world: World | None,
    work: ComputeIntervals,
) -> None:
    """Runs the steps of each turn until a turn has none; then publishes the hash of the actor."""
    step, turn = 0, 0
    pace.set(f"ready/{rank}", "")
    while count := int(pace.get(f"steps/{turn}")):
        seconds = []
        for _ in range(count):
            started, step = time.perf_counter(), step + 1
            iterate(step)
            if world is not None:
                world.barrier()
            seconds.append(time.perf_counter() - started)
        pace.set(f"seconds/{turn}/{rank}", json.dumps(seconds))
        pace.set(f"work/{turn}/{rank}", json.dumps(work.intervals))
        work.intervals.clear()
        turn += 1
    if actor is not None:
        pace.set(f"sha256/{rank}", actor.sha256())


if __name__ == "__main__":
    main()
