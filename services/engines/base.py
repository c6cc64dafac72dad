"""The interface of a training engine: what actor, critic and reference ask of whatever holds their model.

Every method that computes or moves tensors is collective: all ranks of the service call it, in the same order. A
loss is this rank's share of the loss of the whole mini-batch (already divided by global counts), so gradients are
summed over data ranks and an update does not depend on how rows were dealt out to ranks and micro-batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.storage.checkpoint import NO_SCALARS, Scalars

Output = TypeVar("Output")
LossFn = Callable[[Output, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class NonFiniteGradient(ArithmeticError):
    """The gradient norm of a step is inf or nan. Raised on every rank alike, before any weight has moved."""


class InferenceStopped(RuntimeError):
    """`should_stop` said so on some rank. Raised on every rank alike."""


class EngineOffloaded(RuntimeError):
    """The engine is offloaded; call `onload` first. Raised before any collective."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019) on all parameters, and its learning rate: linear warm-up, then a schedule.

    Args:
        lr: learning rate after warm-up.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, per unit of learning rate.
        max_grad_norm: a larger gradient is scaled down to this 2-norm; inf leaves it as it is.
        warmup_steps: step i of these, from 1, runs at lr * i / warmup_steps.
        schedule: after warm-up "constant", or from lr to lr * min_ratio by "linear" or "cosine" (Loshchilov and Hutter
            2017, "SGDR", equation 5, without restarts).
        total_steps: after so many steps, warm-up included, it is at its lowest and stays there.
        min_ratio: lowest learning rate as a share of lr.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int = 0
    min_ratio: float = 0.0

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * self._left(step))

    def _left(self, step: int) -> float:
        """Share of the way from the lowest learning rate to the highest that is left after warm-up."""
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Args:
        loss: of the whole mini-batch, the same on every rank.
        grad_norm: 2-norm of the whole gradient before it was clipped, the same on every rank.
        lr: learning rate of the step.
        stats: what the loss function counted, added up over this rank's micro-batches.
    """

    loss: float
    grad_norm: float
    lr: float
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's shards of weights and optimizer state at one moment, in host memory."""

    num_steps: int
    tensors: dict[str, Tensor]


class TrainEngine(ABC):
    """A model spread over the ranks of a service, and its optimizer.

    Between `offload` and `onload` all other methods raise EngineOffloaded.

    Attributes:
        device: where this rank computes.
        data_rank: which share of the rows is this rank's.
        data_size: into how many shares rows are dealt out.
        config: of the whole model.
        num_parameters: of the whole model.
        step_is_atomic: whether a `step` that fails, on whatever rank, has moved no weight on any.
        sees_outputs: whether the model's output comes out on this rank: in a pipeline, on the last stage alone.
            Others `infer` nothing and count no statistics.
        packs: whether it computes packed micro-batches, and not padded ones alone.
        cached_tokens: more than these take longer together than apart; None: the more the better.
        progressed: called after each micro-batch, tensor and file, to show that work goes on.
    """

    device: torch.device
    data_rank: int
    data_size: int
    config: PreTrainedConfig
    num_parameters: int
    step_is_atomic: bool = True
    sees_outputs: bool = True
    packs: bool = False
    cached_tokens: int | None = None
    progressed: Callable[[], None] = staticmethod(lambda: None)

    def token_budget_for(self, most: int, longest: int) -> int:
        """The token budget of rows of which the longest has so many tokens, where memory has room for `most`."""
        return most if self.cached_tokens is None else min(most, max(self.cached_tokens, longest))

    @abstractmethod
    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Output]:
        """Run the model without gradients and return what `head` reads, per micro-batch; where this rank does not see
        outputs, nothing.

        Ranks may have different numbers of micro-batches, and of different shapes.

        Args:
            should_stop: asked before every micro-batch; if any rank's says so, all stop there.
            progress: told how many micro-batches are done.

        Raises:
            InferenceStopped: `should_stop` returned True, here or on another rank.
        """

    @abstractmethod
    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        loss_fn: LossFn[Output],
        *,
        confirm: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """One AdamW step on the gradient of the sum of `loss_fn` over all micro-batches of all data ranks.

        Args:
            loss_fn: from what `head` reads to the micro-batch's share of the loss, a scalar to call backward on,
                and sums to keep as statistics, detached scalars. Called once per micro-batch, in order.
            confirm: called when all ranks know that the gradient is finite, before any weight moves. If it raises,
                which it must on every rank or on none, weights and optimizer state are as before.

        Raises:
            NonFiniteGradient: the gradient is not finite; weights and optimizer state are as before.
            RuntimeError: the engine was built without an optimizer.
        """

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copy weights and optimizer state, so that an update of several steps can be undone."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this engine, bit for bit. A snapshot can be restored any number of times."""

    @abstractmethod
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights whole, on every rank, one at a time in the order of their names.

        Names are those of the Hugging Face checkpoint; tied weights come under every name. The iterator is
        collective: run it to its end on every rank, and change no weight meanwhile. A tensor may share its memory
        with the engine: copy what is to be kept.
        """

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that this rank generates with, by name, one at a time: all of them whole, as `full_tensors`,
        or where an engine has a generation mesh this rank's part. Collective, as `full_tensors`."""
        return self.full_tensors()

    @abstractmethod
    def export(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Write a Hugging Face directory and return its sha256, as `services.models.export.tensors_sha256`.

        Weights that learn are exported as the optimizer has them, not as copies in a coarser type that are computed
        with. So the same weights have the same sha256 whatever the engine. The directory appears whole or not at all,
        and replaces one of the same name.

        Args:
            dtype: of all floating-point tensors; default the type that the engine keeps each of them in.

        Raises:
            OSError: it could not be written (rank 0; `agreement.PeerRankFailed` on the others).
        """

    @abstractmethod
    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        """Write weights and optimizer state as a sharded checkpoint that any number of ranks can load.

        The directory must be shared by all ranks. It appears whole or not at all, and replaces one of the same
        name.

        Args:
            scalars: kept beside the tensors, for the caller; the same on every rank.

        Raises:
            OSError: it could not be written (`agreement.PeerRankFailed` on ranks that could).
        """

    @abstractmethod
    def load(self, directory: Path) -> Scalars:
        """Read a checkpoint of `save` back, bit for bit, and return its scalars. If any rank fails, every rank
        stays as it was.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is of another model, or incomplete (`agreement.PeerRankFailed` on ranks that saw no error).
        """

    @abstractmethod
    def check_onloaded(self) -> None:
        """Raises EngineOffloaded between `offload` and `onload`."""

    @abstractmethod
    def start_over(self) -> None:
        """Go back to the weights of the model directory, an optimizer without moments and the first learning rate, bit
        for bit as a new engine has them; an offloaded engine comes back to the device. If any rank fails, every
        rank keeps its weights and optimizer state.

        Raises:
            ValueError: the directory can no longer be read (`agreement.PeerRankFailed` on ranks that could).
        """

    @abstractmethod
    def offload(self) -> int:
        """Move weights and optimizer state to host memory; returns the bytes moved, 0 where they are there.

        Raises:
            RuntimeError: memory ran out on a rank (`agreement.PeerRankFailed` on the others); the engine is still on
                the device, on every rank.
        """

    @abstractmethod
    def onload(self) -> int:
        """Bring them back to the device; returns the bytes moved.

        Raises:
            RuntimeError: memory ran out on a rank (`agreement.PeerRankFailed` on the others); the engine is still in
                host memory, on every rank, and can be brought back later.
        """
