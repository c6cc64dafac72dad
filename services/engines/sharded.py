"""Base class of all engines: steps, snapshots, checkpoints and offload, for weights that each rank keeps as shards in
plain tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.accumulating import AccumulatingEngine
from services.engines.adamw import clip_gradients, decay, make_adamw
from services.engines.agreement import all_or_none, new_directory, takes_effect
from services.engines.base import (
    GradientTooLarge,
    HeldTensor,
    LossFn,
    OptimizerOptions,
    Snapshot,
    StepResult,
)
from services.engines.collectives import max_over_ranks
from services.engines.loss_accumulator import numbers
from services.engines.offload import wait_for_copies
from services.engines.offloader import Offloader
from services.engines.snapshots import ReusedMemory, SnapshotMemory
from services.runtime.ranks import known_to_all
from services.storage.checkpoint import (
    NO_SCALARS,
    PART,
    Scalars,
    WeightShard,
    file_content,
    read_manifest,
    read_shards,
    write_manifest,
    write_shards,
)
from services.storage.publish import make_empty, readable_path
from services.storage.written import WrittenFile

Output = TypeVar("Output")

NUM_STEPS = "engine.num_steps"
"""Name of the scalar in a checkpoint that is the number of optimizer steps done."""


class ShardedEngine(AccumulatingEngine):
    """Base class of engines on all ranks of the default process group.

    Args:
        device: Device of this rank.
        kept: This rank's shards of the weights, by name. They are updated in place, from gradients in their `.grad`.
        trained: Names of those that are trained.
        optimizer: Options of AdamW; None for a model that is not trained and has no optimizer state.
    """

    _tied_names: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Further names of each tied weight, by its first name."""

    def __init__(
        self,
        device: torch.device,
        kept: Mapping[str, Tensor],
        trained: Sequence[str],
        optimizer: OptimizerOptions | None,
    ) -> None:
        self.device = device
        self._kept = dict(kept)
        self._trained_names = list(trained)
        self._options = optimizer
        self._adamw = self._make_adamw(optimizer) if optimizer is not None else None
        self._num_steps = 0
        self._has_first_values = True
        self._offloader = Offloader()
        self._snapshots = SnapshotMemory(device)
        self._file_memory = ReusedMemory(device)

    @abstractmethod
    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        """Returns a `WeightShard` of `kept`, with its offset in the checkpoint's tensor `name`. `kept` is this rank's
        shard of that weight, or a tensor with the same layout, such as a moment. Not a copy."""

    @abstractmethod
    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        """Overwrites the tensors of `weights`, given by name, with the values that this rank's shards have in a newly
        built engine. Not collective.

        Raises:
            ValueError: The model directory can no longer be read.
        """

    def _take_step(self, lr: float) -> None:
        """Makes an AdamW step on this rank's shards, in place, with the gradients in their `.grad`, at learning rate
        `lr`."""
        assert self._adamw is not None
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()

    def _is_primary(self, name: str) -> bool:
        """Returns whether this rank counts its shard of a weight in norms and writes it to checkpoints: True on
        exactly one of the ranks with replicas of the shard. Default: True, for shards without replicas."""
        return True

    def _weights_changed(self) -> None:
        """Updates the engine's copies of the shards, such as those in a coarser type, after the shards have changed.
        Default: does nothing."""

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        loss_fn: LossFn[Output],
        *,
        confirm: Callable[[], None] = lambda: None,
    ) -> StepResult:
        self._check_learns()
        assert self._options is not None, "the engine learns"
        try:
            loss, stats = self._accumulate_gradients(micro_batches, head, loss_fn)
            grad_norm = self._clip_gradients(self._options.max_grad_norm)
            if grad_norm > (limit := self._options.reject_grad_norm):
                where = f"at optimizer step {self._num_steps}"
                why = f"gradient norm is {grad_norm:.4g} {where}, above reject_grad_norm, {limit:g}"
                raise known_to_all(GradientTooLarge(why))
            lr = self._options.lr_at(self._num_steps)
            result = StepResult(loss, grad_norm, lr, numbers(stats))
            confirm()
            # Nothing below allocates, waits for other ranks or reads memory that other processes may change.
            self._has_first_values = False
            self._snapshots.wait()
            decay(((n, self._shard(n, self._kept[n])) for n in self._trained_names), self._options, lr)
            self._take_step(lr)
            self._weights_changed()
            self._num_steps += 1
            return result
        finally:
            self._snapshots.stepped()
            self._end_gradient()

    def _check_learns(self) -> None:
        if self._adamw is None:
            raise RuntimeError("this engine has no optimizer: its model is not trained")
        self.check_onloaded()

    def snapshot(self) -> Snapshot:
        self.check_onloaded()
        return Snapshot(self._num_steps, self._snapshots.copy(self._state()))

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        self.check_onloaded()
        self.drop_gradient()
        self._has_first_values = False
        self._snapshots.wait()
        for name, x in self._state().items():
            x.copy_(snapshot.tensors[name])
        self._weights_changed()
        self._set_num_steps(snapshot.num_steps)

    def held(self) -> Iterator[HeldTensor]:
        self.check_onloaded()
        weights = {f"weight.{name}": x.detach() for name, x in self._kept.items()}
        trained = set(self._trained_names) if self._adamw is not None else set()
        for name, shard in self.shards({**weights, **self._state()}).items():
            yield held_shard(name, shard, learns=_weight_name(name) in trained)
        yield from self._copies()

    def _copies(self) -> Iterator[HeldTensor]:
        """Yields further tensors that this rank computes with: copies of weights, such as those in a coarser type, and
        buffers. Default: none. May be collective."""
        yield from ()

    def weight_shards(self) -> Iterator[tuple[str, WeightShard]]:
        self.check_onloaded()
        for key, x in self._kept.items():
            shard, name = self._shard(key, x.detach()), key.partition(PART)[0]
            if shard.tensor.numel():
                yield from ((each, shard) for each in (name, *self._tied_names.get(name, ())))

    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        self.check_onloaded()
        with new_directory(directory, self.progressed) as partial:
            write_shards(partial, dist.get_rank(), self._file_content())
            self.progressed()
            if dist.get_rank() == 0:
                write_manifest(partial, dist.get_world_size(), {**scalars, NUM_STEPS: self._num_steps})

    def begin_save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> Callable[[], list[WrittenFile]]:
        self.check_onloaded()
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        with all_or_none(f"copying a checkpoint for {directory}"):
            if rank == 0:
                make_empty(directory)
            content = self._file_content()
            scalars = {**scalars, NUM_STEPS: self._num_steps}

        def write() -> list[WrittenFile]:
            shards = write_shards(directory, rank, content)
            return [shards, write_manifest(directory, num_ranks, scalars)] if rank == 0 else [shards]

        return write

    def _file_content(self) -> Tensor:
        """Returns a copy of what this rank writes to a checkpoint, as `file_content`."""
        own = {name: x for name, x in self._state().items() if self._is_primary(_weight_name(name))}
        content = file_content(self.shards(own), self._file_memory.take)
        wait_for_copies([self.device])
        return content

    def load(self, directory: Path) -> Scalars:
        self.check_onloaded()
        with all_or_none(f"reading {directory}"):
            stored = readable_path(directory)
            num_ranks, scalars = read_manifest(stored)
            tensors = {name: torch.zeros_like(x, device="cpu") for name, x in self._state().items()}
            read_shards(stored, num_ranks, self.shards(tensors), self.progressed)
            loaded = Snapshot(int(scalars[NUM_STEPS]), tensors)
        with takes_effect("loading a checkpoint"):
            self.restore(loaded)
        return {name: value for name, value in scalars.items() if name != NUM_STEPS}

    def start_over(self) -> None:
        self.drop_gradient()
        self.onload()
        if not max_over_ranks(not self._has_first_values):
            return
        with all_or_none("reading the weights of the model directory"):
            # Moments are zero: each is one element expanded to the shape.
            state = {name: x.new_zeros((), device="cpu").expand(x.shape) for name, x in self._state().items()}
            weights = {
                name: torch.zeros_like(x, device="cpu")
                for name, x in self._state().items()
                if name.startswith("weight.")
            }
            self._read_first_values({_weight_name(name): x for name, x in self.shards(weights).items()})
        with takes_effect("taking the model directory's weights"):
            self.restore(Snapshot(0, state | weights))
            self._has_first_values = True

    def offload(self) -> int:
        self.drop_gradient()
        return 0 if self.device.type == "cpu" else self._leave_device()

    def onload(self) -> int:
        return self._offloader.onload()

    def check_onloaded(self) -> None:
        self._offloader.check_onloaded()

    def _leave_device(self) -> int:
        """Offloads the engine, even if the device is the CPU; returns the bytes moved. Collective."""
        return self._offloader.offload(self._resident())

    def _clip_gradients(self, max_norm: float) -> float:
        """Scales the gradients in `.grad` of the trained shards, as `clip_gradients`; returns the norm before.
        Collective."""
        gradients = {
            name: gradient for name in self._trained_names if (gradient := self._kept[name].grad) is not None
        }
        primary = [name for name in gradients if self._is_primary(name)]
        return clip_gradients(gradients, primary, max_norm, self.device, self._num_steps)

    def _drop_gradients(self) -> None:
        """Sets `.grad` of this rank's shards to None. Called after every step, also one that failed."""
        for x in self._kept.values():
            x.grad = None

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        """Returns the optimizer of this rank's trained shards, with zero moments."""
        return make_adamw([self._kept[name] for name in self._trained_names], options)

    def _state(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the weights and of the first and second moments, by name: "weight.NAME",
        "exp_avg.NAME" and "exp_avg_sq.NAME"."""
        state = {f"weight.{name}": x.detach() for name, x in self._kept.items()}
        if self._adamw is not None:
            for name in self._trained_names:
                moments = self._adamw.state[self._kept[name]]
                state[f"exp_avg.{name}"] = moments["exp_avg"]
                state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def _resident(self) -> list[Tensor]:
        """Returns the tensors that stay on the device between calls, which `offload` moves."""
        return list(self._state().values())

    def _set_num_steps(self, num_steps: int) -> None:
        """Sets the number of optimizer steps done, of the engine and in AdamW's state."""
        self._num_steps = num_steps
        if self._adamw is not None:
            for moments in self._adamw.state.values():
                moments["step"].fill_(num_steps)

    def shards(self, state: Mapping[str, Tensor]) -> dict[str, WeightShard]:
        """Returns a `WeightShard` of each tensor of `state`, whose keys are those of a snapshot. Does not copy."""
        return {name: self._shard(_weight_name(name), x) for name, x in state.items()}


def snapshot_weights(engine: ShardedEngine, snapshot: Snapshot) -> Iterator[tuple[str, WeightShard]]:
    """Yields the name and shard of each weight in an engine's last snapshot; tied weights once, by their first name.
    Values written to the shards are loaded by `restore`. Blocks until the snapshot is complete, since its copies would
    overwrite these values."""
    engine._snapshots.finish()
    weights = {name: x for name, x in snapshot.tensors.items() if name.startswith("weight.")}
    for name, shard in engine.shards(weights).items():
        if shard.tensor.numel():
            yield _weight_name(name).partition(PART)[0], shard


def held_shard(name: str, shard: WeightShard, *, learns: bool) -> HeldTensor:
    """Returns a shard as a `HeldTensor`, whose place is its offsets in the whole tensor and the shapes of both."""
    place = f"{list(shard.offsets)} + {list(shard.tensor.shape)} of {list(shard.whole)}"
    return HeldTensor(name, place, shard.tensor, learns)


def _weight_name(state_name: str) -> str:
    """Returns NAME from the name of a state, "weight.NAME", "exp_avg.NAME" or "exp_avg_sq.NAME"."""
    return state_name.partition(".")[2]
