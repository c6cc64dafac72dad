"""Rows on which the contract of training engines trains, and their results in plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions, Snapshot, TrainEngine
from services.models.families import load_causal_lm
from services.rollout.base import Generation, RolloutEngine, SamplingOptions
from services.rollout.sampling import row_seeds

TEMPERATURE = 1.3
HEAD = PolicyHead(temperature=TEMPERATURE)
OPTIONS = OptimizerOptions(lr=1e-3, max_grad_norm=float("inf"))
NUM_NEW_TOKENS = 8


@dataclass(frozen=True)
class Expected:
    """Results of plain transformers in float32, computed row by row without padding.

    Attributes:
        loss: Mean of -advantage * log-probability over all response tokens.
        log_probs: Log-probabilities of the response tokens, row after row, [tokens], in nats.
        gradients: Gradients of the loss, by the tensors' names in the checkpoint.
    """

    loss: float
    log_probs: Tensor
    gradients: dict[str, Tensor]


class Task:
    """Nine random rows (prompt, response, advantage of each response token) of unequal lengths, one with an empty
    response, for the model in the Hugging Face directory `directory`, which has `vocabulary` token ids."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        self.directory = directory
        generator = np.random.default_rng(1)
        lengths = generator.integers(1, 24, (2, 9)).astype(np.int64)
        lengths[1, 2] = 0
        self.prompts, self.responses = (
            Jagged(torch.from_numpy(generator.integers(0, vocabulary, counts.sum())), counts)
            for counts in lengths
        )
        self.advantages = Jagged(
            torch.from_numpy(generator.normal(size=lengths[1].sum())).float(), lengths[1]
        )

    @cached_property
    def expected(self) -> Expected:
        """Results of plain transformers for these rows; computed at the first read."""
        model, rows = load_causal_lm(self.directory), []
        for row in range(self.prompts.rows):
            prompt, response = self.prompts.row(row), self.responses.row(row)
            logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
            log_p = (logits[: len(response)] / TEMPERATURE).log_softmax(dim=-1)
            rows.append(log_p.gather(1, response[:, None])[:, 0])
        log_probs = torch.cat(rows)
        loss = -(self.advantages.values * log_probs).mean()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return Expected(float(loss.detach()), log_probs.detach(), gradients)

    def micro_batches(self, engine: TrainEngine) -> list[MicroBatch]:
        """Returns the rows as micro-batches of at most 96 tokens, packed if the engine can."""
        return split(self.prompts, self.responses, token_budget=96, pad_id=0, packed=engine.packs)

    def loss(self, output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's share of the loss of `Expected.loss`, and no statistics."""
        device = output.log_probs_BR.device
        advantages = Jagged(self.advantages.values.to(device), self.advantages.lengths)
        per_token_BR = micro_batch.spread(advantages) * output.log_probs_BR
        return -per_token_BR[micro_batch.response_mask_BR].sum() / len(self.responses.values), {}

    def step(self, engine: TrainEngine) -> float:
        """Makes one optimizer step on all rows; returns the loss under the weights before the step."""
        return engine.step(self.micro_batches(engine), HEAD, self.loss).loss

    def log_probs(self, engine: TrainEngine) -> Tensor:
        """Returns the engine's log-probabilities of the rows' response tokens, row after row, [tokens], in host
        memory."""
        return log_probs(engine, self.micro_batches(engine), self.responses.lengths)


def log_probs(engine: TrainEngine, micro_batches: list[MicroBatch], lengths: np.ndarray) -> Tensor:
    """Returns an engine's log-probabilities of response tokens, row after row, [tokens], in host memory; `lengths`
    has the response tokens per row, [rows] int64."""
    outputs = engine.infer(micro_batches, HEAD)
    values = [m.collect(o.log_probs_BR.cpu()) for m, o in zip(micro_batches, outputs, strict=True)]
    return assemble([m.rows for m in micro_batches], values, lengths).values


def generate(rollout: RolloutEngine, engine: TrainEngine, prompts: Jagged[Tensor]) -> Generation:
    """Loads the engine's current weights into `rollout`, and samples NUM_NEW_TOKENS tokens for each prompt."""
    rollout.load_weights(engine.rollout_weights())
    rows = prompts.tolist()
    options = SamplingOptions(max_new_tokens=NUM_NEW_TOKENS, temperature=TEMPERATURE)
    return rollout.generate(rows, options, row_seeds(0, 1, "generate/0", np.arange(len(rows))))


def same_bits(a: Snapshot, b: Snapshot) -> bool:
    """Returns whether two snapshots have the same tensors, bit for bit; their numbers of steps are not compared."""
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(x, b.tensors[name]) for name, x in a.tensors.items()
    )
