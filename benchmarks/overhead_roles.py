"""The roles of the quickstart without a cluster: each an engine or a function, called in its own process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from controller.advantage import ppo_advantage
from controller.config.config import Config
from controller.data.loader import Loader
from controller.data.prompts import PromptData
from controller.training.losses import policy_loss as policy_loss_message
from nccl_transfer.refs.columns import Jagged
from services.actor.losses import policy_loss, surrogate_of
from services.compute.heads import Head, Output, PolicyHead, PolicyOutput, value_head
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.critic.losses import clipped_squared_error
from services.engines.base import LossFn, OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.models.families import load_causal_lm, load_value_model
from services.models.tokenizers import load_tokenizer
from services.reward.functions import find_function
from services.roles.loss_options import PolicyLossOptions, read_knobs
from services.roles.losses import aggregate
from services.roles.minibatch import deal
from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.losses import ValueClipOptions
from settings.model import ModelTable, OptimizerTable
from settings.reference import ReferenceTable
from settings.reward import RewardTable

CPU = torch.device("cpu")

Column = Jagged[Tensor]
Arrays = Jagged[np.ndarray]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids of rows."""

    prompts: Column
    responses: Column


class Task:
    """The rows that a step trains on."""

    def __init__(self, config: Config) -> None:
        self.data = PromptData.load(config.data.train, "data.train")
        self._config = config

    def prompts(self, step: int) -> np.ndarray:
        """Number of the prompt of each row of a step's batch, [rows] int64."""
        config = self._config
        count = config.data.prompts_per_step
        chosen = Loader(self.data.sizes, [1.0], config.run.seed).take(step * count)[-count:]
        return np.repeat(chosen, config.rollout.samples_per_prompt)


class Model:
    """An engine with the passes that all roles share."""

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


class PlainActor(Model):
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
        options = read_knobs(PolicyLossOptions, policy_loss_message(self.config, with_texts=False), ())
        surrogate = surrogate_of(options)

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[PolicyOutput]:
            def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                return policy_loss(
                    output.log_probs_BR,
                    micro_batch.spread(old),
                    micro_batch.spread(advantages),
                    micro_batch.response_mask_BR,
                    surrogate,
                    options,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    entropy_BT=output.entropy_BR,
                )

            return loss

        self.update(step, numbers, sequences, algorithm.epochs, self._head, loss_for)

    def sha256(self) -> str:
        """SHA-256 of the weights, as in a run's summary."""
        with tempfile.TemporaryDirectory() as directory:
            return self.engine.export(Path(directory, "actor"), self.tokenizer)


class PlainCritic(Model):
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
        options = ValueClipOptions(value_clip=algorithm.value_clip)

        def loss_for(num_tokens: int, num_rows: int) -> LossFn[Tensor]:
            def loss(values_BR: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
                old_BR, returns_BR = micro_batch.spread(old), micro_batch.spread(returns)
                mask_BR = micro_batch.response_mask_BR
                loss_BR, stats = clipped_squared_error(values_BR, old_BR, returns_BR, mask_BR, options)
                total = aggregate(
                    loss_BR,
                    mask_BR,
                    algorithm.aggregation,
                    num_tokens=num_tokens,
                    num_sequences=num_rows,
                    max_response_tokens=self.config.rollout.max_response_tokens,
                )
                return total, stats

            return loss

        self.update(step, numbers, sequences, algorithm.critic_epochs, value_head, loss_for)


class PlainReference(Model):
    def __init__(self, config: Config) -> None:
        table = config.services["reference"]
        assert isinstance(table, ReferenceTable)
        super().__init__(config, table, _engine(load_causal_lm(table.model), None))
        self._head = PolicyHead(config.rollout.temperature)

    def log_probs(self, sequences: Sequences) -> Column:
        return self.forward(sequences, self._head, lambda output: output.log_probs_BR)


class PlainReward:
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


def _engine(model: Any, optimizer: OptimizerTable | None) -> FSDPEngine:
    options = None
    if optimizer is not None:
        options = OptimizerOptions(
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            warmup_steps=optimizer.num_warmup_steps,
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
