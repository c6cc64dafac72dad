"""The quickstart's PPO iteration without a cluster: the engines, losses and advantages as they are, under plain
torchrun, with no service, no RPC and no tensor store. `benchmarks.overhead` runs it; see there.

Five processes have the ranks of the services: two for the actor, one each for critic, reference and reward; the
last also does what the controller does in the cluster. Each role's ranks form the default process group, as in a
service; rows go from role to role over a second gloo group of all five. Alone, one process does everything in
turn.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

from controller.advantage import ppo_advantage
from controller.config.config import Config, load
from controller.data.prompts import PromptData
from nccl_transfer.refs.columns import Jagged
from services.actor.losses import PolicyLossConfig, policy_loss
from services.compute.heads import Head, Output, PolicyHead, PolicyOutput, value_head
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.critic.losses import value_loss
from services.engines.base import LossFn, OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.models.families import load_causal_lm, load_value_model
from services.models.tokenizers import load_tokenizer
from services.reward.functions import find_function
from services.roles.losses import aggregate
from services.roles.minibatch import deal
from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.model import ModelTable, OptimizerTable
from settings.reference import ReferenceTable
from settings.reward import RewardTable

CPU = torch.device("cpu")
DEADLINE = timedelta(hours=2)
ACTORS, CRITIC, REFERENCE, REWARD = (0, 1), 2, 3, 4
RANKS = 5

Column = Jagged[Tensor]
Arrays = Jagged[np.ndarray]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids of rows."""

    prompts: Column
    responses: Column


class Task:
    """Which rows a step trains on."""

    def __init__(self, config: Config) -> None:
        self.data = PromptData.load(config.data.train, "data.train")
        self._config = config

    def prompts(self, step: int) -> np.ndarray:
        """Which prompt each row of a step's batch has, [rows] int64."""
        config = self._config
        chosen = self.data.rows_of_step(step, config.data.prompts_per_step, config.run.seed)
        return np.repeat(chosen, config.rollout.samples_per_prompt)


class Model:
    """An engine, and what all roles do with theirs."""

    def __init__(self, config: Config, table: ModelTable, engine: TrainEngine) -> None:
        self.config = config
        self.table = table
        self.tokenizer: Any = load_tokenizer(table.model)
        self.engine = engine

    def forward(self, sequences: Sequences, head: Head[Output], read: Callable[[Output], Tensor]) -> Column:
        """One number per response token."""
        micro_batches = self._split(sequences)
        outputs = self.engine.infer(micro_batches, head)
        values = [m.collect(read(output)) for m, output in zip(micro_batches, outputs, strict=True)]
        return assemble([m.rows for m in micro_batches], values, sequences.responses.lengths)

    def update(
        self,
        step: int,
        numbers: np.ndarray,
        sequences: Sequences,
        epochs: int,
        head: Head[Output],
        loss_for: Callable[[int, int], LossFn[Output]],
    ) -> None:
        """All epochs and mini-batches; `numbers` are those of the rows in the whole batch."""
        for epoch in range(epochs):
            key = (self.config.run.seed, step, 0, epoch)
            for mine in deal(numbers, self.config.mini_batches(self.config.rows_per_step), key):
                tokens = int(sequences.responses.lengths[mine].sum())
                totals = torch.tensor([tokens, len(mine)], dtype=torch.float64)
                dist.all_reduce(totals)
                loss = loss_for(int(totals[0]), int(totals[1]))
                self.engine.step(self._split(sequences, mine), head, loss)

    def _split(self, sequences: Sequences, rows: np.ndarray | None = None) -> list[MicroBatch]:
        return split(
            sequences.prompts,
            sequences.responses,
            token_budget=self.table.micro_batch_tokens,
            pad_id=self.tokenizer.pad_token_id or 0,
            rows=rows,
            packed=self.table.packing and self.engine.packs,
        )


class Actor(Model):
    def __init__(self, config: Config) -> None:
        table = config.services["actor"]
        assert isinstance(table, ActorTable)
        super().__init__(config, table, _engine(load_causal_lm(table.model), table.optimizer))
        self._rollout = HFRollout(load_causal_lm(table.model), token_budget=table.rollout_tokens)
        self._head = PolicyHead(config.rollout.temperature)

    def generate(self, step: int, numbers: np.ndarray, prompts: list[str]) -> tuple[Sequences, list[str]]:
        """Responses as ids and as text."""
        rollout = self.config.rollout
        if step > 1:
            self._rollout.load_weights(self.engine.full_tensors())
        options = SamplingOptions(
            max_new_tokens=rollout.max_response_tokens,
            eos_ids=(self.tokenizer.eos_token_id,),
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
        )
        ids = self.tokenizer(prompts)["input_ids"]
        seeds = row_seeds(self.config.run.seed, step, "generate/0", numbers)
        responses = self._rollout.generate(ids, options, seeds).responses
        rows = [row.tolist() for row in responses.values.split(responses.lengths.tolist())]
        return Sequences(_jagged(ids), responses), self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def log_probs(self, sequences: Sequences) -> Column:
        return self.forward(sequences, self._head, lambda output: output.log_probs_BR)

    def learn(
        self, step: int, numbers: np.ndarray, sequences: Sequences, old: Column, advantages: Column
    ) -> None:
        algorithm = self.config.algorithm
        loss_config = PolicyLossConfig(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip or None,
            entropy_coef=algorithm.entropy_coefficient,
            aggregation=algorithm.aggregation,
            max_length=self.config.rollout.max_response_tokens,
        )

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                return policy_loss(
                    output.log_probs_BR,
                    micro_batch.spread(old),
                    micro_batch.spread(advantages),
                    micro_batch.response_mask_BR,
                    loss_config,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    entropy_BT=output.entropy_BR,
                )

            return loss

        self.update(step, numbers, sequences, algorithm.epochs, self._head, loss_for)

    def sha256(self) -> str:
        """Of the weights, as in a run's summary."""
        with tempfile.TemporaryDirectory() as directory:
            return self.engine.export(Path(directory, "actor"), self.tokenizer)


class Critic(Model):
    def __init__(self, config: Config) -> None:
        table = config.services["critic"]
        assert isinstance(table, CriticTable)
        super().__init__(config, table, _engine(load_value_model(table.model), table.optimizer))

    def values(self, sequences: Sequences) -> Column:
        return self.forward(sequences, value_head, lambda values_BR: values_BR)

    def learn(
        self, step: int, numbers: np.ndarray, sequences: Sequences, old: Column, returns: Column
    ) -> None:
        algorithm = self.config.algorithm

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[Tensor]:
            def loss(values_BR: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                old_BR, returns_BR = micro_batch.spread(old), micro_batch.spread(returns)
                mask_BR = micro_batch.response_mask_BR
                loss_BR, stats = value_loss(
                    values_BR, old_BR, returns_BR, mask_BR, clip=algorithm.value_clip or None
                )
                total = aggregate(
                    loss_BR,
                    mask_BR,
                    algorithm.aggregation,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    max_length=self.config.rollout.max_response_tokens,
                )
                return total, stats

            return loss

        self.update(step, numbers, sequences, algorithm.critic_epochs, value_head, loss_for)


class Reference(Model):
    def __init__(self, config: Config) -> None:
        table = config.services["reference"]
        assert isinstance(table, ReferenceTable)
        super().__init__(config, table, _engine(load_causal_lm(table.model), None))
        self._head = PolicyHead(config.rollout.temperature)

    def log_probs(self, sequences: Sequences) -> Column:
        return self.forward(sequences, self._head, lambda output: output.log_probs_BR)


class Reward:
    """The reward function, and `compute_advantage`."""

    def __init__(self, config: Config) -> None:
        table = config.services["reward"]
        assert isinstance(table, RewardTable)
        self._config = config
        self._function = find_function(table.function)

    def scores(self, data: PromptData, prompts: np.ndarray, responses: list[str]) -> np.ndarray:
        rows = zip(prompts.tolist(), responses, strict=True)
        return np.asarray(
            [
                self._function(data[p].text, text, data[p].ground_truth, json.loads(data[p].metadata))
                for p, text in rows
            ]
        )

    def advantages(
        self, log_probs: Column, ref_log_probs: Column, values: Column, scores: np.ndarray
    ) -> tuple[Column, Column]:
        """Advantages and returns."""
        algorithm = self._config.algorithm
        result = ppo_advantage(
            _to_numpy(log_probs),
            _to_numpy(ref_log_probs),
            _to_numpy(values),
            scores,
            beta=algorithm.kl_reward_coefficient,
            kl_kind=algorithm.kl_reward_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten_advantages=algorithm.whiten_advantages,
        )
        sent = result.columns
        return _to_torch(sent["advantages"]), _to_torch(sent["returns"])


class World:
    """All five ranks: what goes from role to role."""

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


class Work:
    """When this process computed, and when it only handed over rows or waited for others."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        started = time.time()
        yield
        self.intervals.append((started, time.time()))


Iteration = Callable[[int], None]


def actor_iteration(actor: Actor, task: Task, world: World, rank: int, work: Work) -> Iteration:
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


def critic_iteration(critic: Critic, world: World, work: Work) -> Iteration:
    def run(step: int) -> None:
        sequences = _receive_sequences(world)
        with work.computing():
            values = critic.values(sequences)
        world.send(values, REWARD)
        returns = world.receive(REWARD, torch.float32)
        with work.computing():
            critic.learn(step, np.arange(values.rows), sequences, values, returns)

    return run


def reference_iteration(reference: Reference, world: World, work: Work) -> Iteration:
    def run(step: int) -> None:
        sequences = _receive_sequences(world)
        with work.computing():
            log_probs = reference.log_probs(sequences)
        world.send(log_probs, REWARD)

    return run


def reward_iteration(reward: Reward, task: Task, world: World, work: Work) -> Iteration:
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


def lone_iteration(config: Config, actor: Actor, task: Task, work: Work) -> Iteration:
    critic, reference, reward = Critic(config), Reference(config), Reward(config)

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


def _engine(model: Any, optimizer: OptimizerTable | None) -> FSDPEngine:
    options = None
    if optimizer is not None:
        options = OptimizerOptions(
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            warmup_steps=optimizer.warmup_steps,
        )
    return FSDPEngine(model, CPU, optimizer=options, compute_dtype=torch.float32)


def _jagged(rows: list[list[int]]) -> Column:
    lengths = np.asarray([len(row) for row in rows], np.int64)
    return Jagged(torch.tensor([token for row in rows for token in row], dtype=torch.int64), lengths)


def _to_numpy(column: Column) -> Arrays:
    return Jagged(column.values.numpy(), column.lengths)


def _to_torch(column: Arrays | np.ndarray) -> Column:
    assert isinstance(column, Jagged), "PPO has a number for each token"
    return Jagged(torch.from_numpy(column.values), column.lengths)


def _join(store: Store, role: str, rank: int, size: int) -> None:
    """The ranks of one role form the default group, with which its engine works."""
    dist.init_process_group("gloo", store=PrefixStore(role, store), rank=rank, world_size=size)


def _prepare(config: Config, store: Store, rank: int, work: Work) -> tuple[Iteration, Actor | None, World]:
    world = World(store, rank)
    if rank in ACTORS:
        _join(store, "actor", rank, len(ACTORS))
        actor = Actor(config)
        return actor_iteration(actor, Task(config), world, rank, work), actor, world
    _join(store, str(rank), 0, 1)
    if rank == CRITIC:
        return critic_iteration(Critic(config), world, work), None, world
    if rank == REFERENCE:
        return reference_iteration(Reference(config), world, work), None, world
    return reward_iteration(Reward(config), Task(config), world, work), None, world


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", required=True, type=click.Path(path_type=Path), help="Config of the run.")
@click.option("--pace", required=True, metavar="HOST:PORT", help="Store that says when to do how many steps.")
@click.option("--name", required=True, help="Prefix of the keys in that store.")
@click.option("--threads", default=1, show_default=True, help="Threads each process computes with.")
def main(path: Path, pace: str, name: str, threads: int) -> None:
    """Do iterations when told to, and tell how long they took."""
    config = load(path)
    rank, alone = int(os.environ["RANK"]), os.environ["WORLD_SIZE"] == "1"
    torch.set_num_threads(threads)
    store, _, _ = next(iter(rendezvous("env://", timeout=DEADLINE)))
    work = Work()
    world: World | None = None
    if alone:
        _join(store, "alone", 0, 1)
        actor = Actor(config)
        iterate = lone_iteration(config, actor, Task(config), work)
    else:
        iterate, actor, world = _prepare(config, store, rank, work)
    host, _, port = pace.rpartition(":")
    follow(PrefixStore(name, TCPStore(host, int(port), timeout=DEADLINE)), rank, iterate, actor, world, work)
    dist.destroy_process_group()


def follow(
    pace: Store, rank: int, iterate: Iteration, actor: Actor | None, world: World | None, work: Work
) -> None:
    """Does the steps of turn after turn, until one has none; then says what the actor has become."""
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
