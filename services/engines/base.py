"""The interface of a training engine, which keeps the model of an actor, critic, reference or reward service.

Every method that computes or moves tensors is collective: all ranks of the service call it, in the same order. A
loss is this rank's share of the loss of the whole mini-batch, already divided by global counts. So gradients are
summed over data ranks, and an update does not depend on the assignment of rows to ranks and micro-batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.compute.sequence_parallel import SequenceRanks
from services.engines.generation_shards import GenerationShards
from services.models.loading import Load
from services.storage.checkpoint import NO_SCALARS, Scalars, WeightShard
from services.storage.written import WrittenFile, written_below
from settings.model import ModelTable

Output = TypeVar("Output")
LossFn = Callable[[Output, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""Function of a head's output and its micro-batch. Returns the micro-batch's share of the loss, a scalar with a
graph, and statistics by name, detached scalars that are summed over micro-batches."""


class RejectedGradient(ArithmeticError):
    """The gradient of a step is rejected. Raised on every rank, before any weight changes."""


class NonFiniteGradient(RejectedGradient):
    """The gradient norm of a step is inf or nan."""


class GradientTooLarge(RejectedGradient):
    """The gradient norm of a step is above `OptimizerOptions.reject_grad_norm`."""


class InferenceStopped(RuntimeError):
    """Raised by `infer` on every rank after `should_stop` has returned True on any."""


class EngineOffloaded(RuntimeError):
    """Raised by methods of an engine that is offloaded (or of a rollout engine that is asleep), before any
    collective."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of AdamW (Loshchilov and Hutter 2019) and of its learning rate: linear warm-up, then a schedule.

    Args:
        lr: learning rate after warm-up.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay; a step multiplies the weights for which `decays` is True by
            1 - lr * weight_decay.
        weight_decay_on: "all", or "matrices" for all but biases, weights of norms, and weights of one dimension.
        max_grad_norm: 2-norm to which a larger gradient is scaled down; inf for no clipping.
        reject_grad_norm: 2-norm above which a step is refused; inf for no limit.
        warmup_steps: steps of warm-up; step i of them, from 1, runs at lr * i / warmup_steps.
        schedule: after warm-up "constant", or from lr to lr * min_ratio by "linear" or "cosine" (Loshchilov and Hutter
            2017, "SGDR", equation 5, without restarts).
        total_steps: steps, warm-up included, after which the learning rate stays at its lowest.
        min_ratio: lowest learning rate as a share of lr.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    weight_decay_on: Literal["all", "matrices"] = "all"
    max_grad_norm: float = 1.0
    reject_grad_norm: float = math.inf
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int = 0
    min_ratio: float = 0.0

    def decays(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether weight decay applies to a weight, given its name in the checkpoint and its whole shape."""
        return self.weight_decay_on == "all" or (
            len(shape) > 1 and not name.endswith(("bias", "norm.weight"))
        )

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0: that of warm-up step i is at i - 1."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * self._left(step))

    def _left(self, step: int) -> float:
        """Returns the schedule's factor for a step after warm-up: 1 at the highest learning rate, 0 at the lowest."""
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class EngineSetup:
    """Arguments of `TrainEngine.create` that are not in the table of the service.

    Args:
        load: loads the role's model from a directory.
        mesh: mesh of the service: data ranks only, unless the engine reads the key `mesh`.
        device: device of this rank.
        optimizer: options of AdamW; None for a model that is not trained.
    """

    load: Load
    mesh: Mesh
    device: torch.device
    optimizer: OptimizerOptions | None


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Args:
        loss: loss of the whole mini-batch, the same on every rank.
        grad_norm: 2-norm of the whole gradient before clipping, the same on every rank.
        lr: learning rate of the step.
        stats: statistics of the loss function, summed over this rank's micro-batches.
    """

    loss: float
    grad_norm: float
    lr: float
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of this rank's shards of weights and optimizer state, on its device or in host memory.

    Attributes:
        num_steps: optimizer steps done.
        tensors: this rank's shards, by name: "weight.NAME", "exp_avg.NAME" and "exp_avg_sq.NAME".
    """

    num_steps: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor that stays in a rank's memory between calls, or a part of one.

    Attributes:
        name: name of the whole tensor, and of what it is for a weight, such as "weight.NAME" or "exp_avg.NAME".
        place: which part of the whole tensor it is. Tensors of the same name and place are replicas, on any ranks.
        tensor: the values; not a copy.
        learns: whether optimizer steps change it.
    """

    name: str
    place: str
    tensor: Tensor
    learns: bool


class TrainEngine(ABC):
    """Interface of a model that is distributed over the ranks of a service, and of its optimizer.

    Between `offload` and `onload`, the methods that use weights raise EngineOffloaded.

    Attributes:
        device: device of this rank.
        data_rank, data_size: index of this rank's data-parallel share of the rows, which are the same on all ranks with
            the same index, and number of shares.
        config, num_parameters: configuration and number of parameters of the whole model.
        step_is_atomic: whether a `step` that fails on any rank has changed no weight on any rank.
        sees_outputs: whether this rank has the outputs and statistics; in a pipeline, only the last stage has.
        packs: whether the engine can compute packed micro-batches, besides padded ones.
        sequence_ranks: sequence-parallel group that shards the tokens of packed micro-batches; None for none.
        cached_tokens: tokens of a micro-batch beyond which time per token grows; None if it does not.
        detail: what Describe says of the engine beside its name, such as a stage; empty for nothing.
        generation_shards: how `rollout_weights` cuts the weights; None if it yields whole tensors.
        progressed: called after each micro-batch, tensor and file, so that the service can tell work from a hang.
    """

    device: torch.device
    data_rank: int
    data_size: int
    config: PreTrainedConfig
    num_parameters: int
    step_is_atomic: bool = True
    sees_outputs: bool = True
    packs: bool = False
    sequence_ranks: SequenceRanks | None = None
    cached_tokens: int | None = None
    detail: str = ""
    generation_shards: GenerationShards | None = None
    progressed: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    @abstractmethod
    def create(cls, table: ModelTable, options: Any, setup: EngineSetup) -> Self:
        """Builds the engine of a service, with the model of directory `table.model`, over the default process group.
        Collective.

        Args:
            table: table of the service. `implementation.compute_dtype` gives the type of computation; trained weights
                are kept in float32 in any case.
            options: the engine's own options, of the type that its spec (`settings.engines.EngineSpec`) names.
            setup: loader of the model, mesh, device and optimizer.

        Raises:
            FileNotFoundError, ValueError: the model cannot be loaded, or not by this engine.
        """

    def token_budget_for(self, most: int, longest: int) -> int:
        """Returns the token budget of micro-batches that is fastest on this engine, of at most `most`, the configured
        one: `cached_tokens`, or the tokens of the longest row, `longest`, if these are more; `most` itself if
        `cached_tokens` is None."""
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
        """Runs the model without gradients.

        Ranks may have different numbers of micro-batches, of different shapes.

        Args:
            micro_batches: micro-batches of this rank.
            head: computes the output for a micro-batch.
            should_stop: called before every micro-batch or every few of them; all ranks stop if it returns True on
                any.
            progress: called with the number of micro-batches done so far.

        Returns:
            The output of `head` for each micro-batch, in order; an empty list if not `sees_outputs`.

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
        """Makes one AdamW step on the gradient of the sum of `loss_fn` over all micro-batches of all data ranks.

        Args:
            micro_batches: micro-batches of this rank.
            head: computes the output that the loss function takes.
            loss_fn: loss function. Called once per micro-batch, in order. If it fails, its error is raised here
                (`agreement.PeerRankFailed` on other ranks); weights and optimizer state are as before.
            confirm: called after the gradient is known to be finite on all ranks and before any weight changes. It
                must raise on every rank or on none; if it raises, weights and optimizer state are as before.

        Raises:
            RejectedGradient: the gradient is not finite, or larger than the optimizer's `reject_grad_norm`; weights
                and optimizer state are as before.
            RuntimeError: the engine was built without an optimizer.
        """

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Returns a copy of this rank's shards of weights and optimizer state, for `restore`; on the device, where that
        has room for it."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Restores a snapshot of this engine, bit for bit. A snapshot may be restored several times."""

    @abstractmethod
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the whole tensor of every weight, on every rank, one at a time in the order of names.

        Names are those of the Hugging Face checkpoint; tied weights appear under every name. The iterator is
        collective: run it to its end on every rank, and change no weight meanwhile. A tensor may share its memory
        with the engine: copy it to keep it.
        """

    def held(self) -> Iterator[HeldTensor]:
        """Yields the tensors of this rank that must stay as they are between optimizer steps, for `VerifyWeights`. The
        iterator is collective, as that of `full_tensors`.

        Default: all tensors of `full_tensors`, as learning ones. An engine that yields its own has them all verified.
        """
        for name, tensor in self.full_tensors():
            yield HeldTensor(f"weight.{name}", "whole", tensor, learns=True)

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of each weight that this rank generates with, as `full_tensors`, the default."""
        return self.full_tensors()

    def weight_shards(self) -> Iterator[tuple[str, WeightShard]]:
        """Yields name and shard of the weights that this rank sends to other services, valid until they change: on all
        ranks together what `export` writes, by the names of `full_tensors`. Default: whole tensors, each copied to the
        host memory of one rank. May be collective."""
        return dealt_to_ranks(self.full_tensors())

    def local_shards(self) -> Iterator[tuple[str, WeightShard]]:
        """Yields the weights in this rank's memory as `weight_shards`, the default, but replicas too."""
        return self.weight_shards()

    @abstractmethod
    def export(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Writes the model as a Hugging Face directory.

        Trained weights are exported in the optimizer's precision, not as the coarser copies that the model computes
        with, so the same weights have the same sha256 in every engine. The directory appears whole or not at all, and
        replaces one of the same name.

        Args:
            directory: path of the directory.
            tokenizer: tokenizer to write beside the model; None for none.
            dtype: type of all floating-point tensors. Default: the type that the engine keeps each of them in.

        Returns:
            sha256 (hex) over all weights, as `services.models.export.tensors_sha256`.

        Raises:
            OSError: the directory could not be written (rank 0; `agreement.PeerRankFailed` on the others).
        """

    @abstractmethod
    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        """Writes weights and optimizer state as a sharded checkpoint that any number of ranks can load.

        The directory must be on a file system that all ranks share. It appears whole or not at all, and replaces one
        of the same name.

        Args:
            directory: path of the checkpoint.
            scalars: further numbers to store in the checkpoint, by name; the same on every rank.

        Raises:
            OSError: the directory could not be written (`agreement.PeerRankFailed` on ranks that could).
        """

    def begin_save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> Callable[[], list[WrittenFile]]:
        """Copies weights and optimizer state for a checkpoint, and returns a function that writes it while the engine
        goes on: it is not collective, may be called on any thread, and returns the files that this rank has written
        and synced. Collective. The directory must be empty or missing, and is incomplete until the functions of all
        ranks have returned.

        Default: writes the checkpoint by `save` before it returns.

        Args:
            directory, scalars: as in `save`.

        Raises:
            ValueError: the directory is not empty (`agreement.PeerRankFailed` on other ranks than 0).
        """
        self.save(directory, scalars)
        return lambda: written_below(directory) if dist.get_rank() == 0 else []

    @abstractmethod
    def load(self, directory: Path) -> Scalars:
        """Loads a checkpoint of `save`, bit for bit; returns the scalars that were given to `save`. If any rank fails
        to read it, every rank keeps its state.

        Raises:
            FileNotFoundError: there is no checkpoint in the directory.
            ValueError: the checkpoint is of a different model or incomplete (`agreement.PeerRankFailed` on ranks that
                could read their shards).
        """

    @abstractmethod
    def check_onloaded(self) -> None:
        """Raises EngineOffloaded if the engine is offloaded."""

    @abstractmethod
    def start_over(self) -> None:
        """Resets the engine to its state after construction, bit for bit: weights of the model directory, zero
        moments, first learning rate. An offloaded engine is brought back to the device. If any rank fails, every rank
        keeps its weights and optimizer state.

        Raises:
            ValueError: the directory can no longer be read (`agreement.PeerRankFailed` on ranks that could).
        """

    @abstractmethod
    def offload(self) -> int:
        """Moves weights and optimizer state of this rank to host memory; returns the bytes moved, 0 if they are there
        already. On a CPU does nothing, returns 0, and the engine does not count as offloaded.

        Raises:
            RuntimeError: memory ran out on a rank (`agreement.PeerRankFailed` on the others); the engine is still on
                the device, on every rank.
        """

    @abstractmethod
    def onload(self) -> int:
        """Moves what `offload` moved back to the device; returns the bytes moved, 0 if the engine is not offloaded.

        Raises:
            RuntimeError: memory ran out on a rank (`agreement.PeerRankFailed` on the others); the engine is still in
                host memory, on every rank, and can be moved later.
        """


def dealt_to_ranks(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, WeightShard]]:
    """Yields copies, in host memory, of every n-th of the tensors that all n ranks iterate over together."""
    for number, (name, tensor) in enumerate(tensors):
        if number % dist.get_world_size() == dist.get_rank():
            yield name, WeightShard.of_whole(tensor.detach().to("cpu", copy=True))
