"""Data-parallel training with DeepSpeed ZeRO (Rajbhandari et al. 2020), which partitions optimizer state, gradients
and weights over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.adamw import add_moments, new_adamw
from services.engines.base import EngineSetup, HeldTensor, NonFiniteGradient, OptimizerOptions, Snapshot
from services.engines.data_parallel import DataParallelEngine
from services.engines.implementation import compute_dtype, kept_dtype
from services.engines.zero.deepspeed_internals import prepare
from services.engines.zero.flat import boxes
from services.engines.zero.loading import load_for_stage
from services.engines.zero.modules import ForwardPass, dummy_loss
from services.engines.zero.partitions import Partitions, Replicas, TrainedPartitions
from services.engines.zero.stage3 import FrozenStage3, Stage3Partitions
from services.engines.zero.stage12 import Stage12Partitions
from services.models.families import load_causal_lm
from services.models.loading import Load, Model, read_first_values, read_parts
from services.models.value_model import transformer_of
from services.models.weights import cast
from services.runtime.ranks import known_to_all
from services.storage.checkpoint import PART, WeightShard
from settings.engines import ZeroTable
from settings.model import ModelTable

Output = TypeVar("Output")


class ZeROEngine(DataParallelEngine):
    """Training engine on DeepSpeed ZeRO, on all ranks of the default process group, which must be initialized (gloo
    for CPU, nccl for CUDA). Construction is collective.

    ZeRO gives each rank an interval of the elements of a flattened weight. Optimizer state, snapshots and checkpoints
    represent it by boxes (hyperrectangles) of the weight, at most three for a matrix.

    Args:
        directory: Hugging Face directory of the model.
        stage: ZeRO stage: 1 partitions optimizer state, 2 gradients too, 3 weights too.
        device: Device of this rank; the current device, if CUDA.
        dtype: Type of weights, gradients and moments; float32 if the model is trained.
        compute_dtype: Type of matrix products, by autocast. Default: that of the weights.
        optimizer: Options of AdamW; None for a model that is not trained.
        offloads: Whether master weights and optimizer state are in host memory, and steps run on the CPU.
        load: Loads the model from the directory. Default: as a causal language model.

    Raises:
        ValueError: The directory contains a different kind of model, or not all of its weights.
    """

    step_is_atomic = False
    """False, since DeepSpeed allocates memory and gathers weights after it has changed this rank's, so a step may
    fail after a change."""

    def __init__(
        self,
        directory: Path,
        stage: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        optimizer: OptimizerOptions | None = None,
        offloads: bool = False,
        load: Load = load_causal_lm,
    ) -> None:
        prepare()
        casts = compute_dtype not in (None, dtype)
        self._autocast = partial(torch.autocast, device.type, dtype=compute_dtype, enabled=casts)
        self._directory, self._dtype, self._load = directory, dtype, load
        model, empty = load_for_stage(self._load, directory, stage, device, dtype)
        self._pass = ForwardPass(model, compute_dtype)
        self.config = transformer_of(model).config
        self.detail = f"stage {stage}"
        self._partitions = self._partition(model, stage, optimizer, offloads)
        self._is_published = True
        self._boxes = {
            f"{name}{PART}{number}" if number else name: (name, box)
            for name, piece in self._partitions.pieces.items()
            for number, box in enumerate(boxes(self._partitions.shapes[name], piece.first, piece.last))
        }
        self.num_parameters = sum(math.prod(shape) for shape in self._partitions.shapes.values())
        kept = self._as_boxes(self._partitions.kept)
        super().__init__(model, device, kept, list(kept) if optimizer else [], optimizer)
        if empty:
            self._fill(empty)

    @classmethod
    def create(cls, table: ModelTable, options: ZeroTable, setup: EngineSetup) -> Self:
        return cls(
            table.model,
            options.stage,
            setup.device,
            dtype=kept_dtype(table, setup.optimizer),
            compute_dtype=compute_dtype(table),
            optimizer=setup.optimizer,
            offloads=options.offload_optimizer,
            load=setup.load,
        )

    def _fill(self, empty: Mapping[str, Tensor]) -> None:
        """Reads the values of those tensors of the model that have none yet, given by name, from the model directory:
        this rank's partition, and whole tensors where the model has these on each rank. Collective."""
        has_all = self._partitions.has_all
        kept = ((self._boxes[key][0], self._shard(key, x)) for key, x in self._kept.items())
        parts = [(name, part) for name, part in kept if name in empty and self._partitions.is_cut]
        wholes = [
            (name, WeightShard.of_whole(x))
            for name, x in empty.items()
            if has_all or not isinstance(x, nn.Parameter)
        ]
        read_parts(self._directory, [*parts, *wholes])
        self._is_published = has_all
        self._publish()

    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        boxes_by_name = ((self._boxes[key][0], shard) for key, shard in weights.items())
        read_first_values(self._load, self._directory, self._dtype, boxes_by_name)

    def restore(self, snapshot: Snapshot) -> None:
        """Restores a snapshot on this rank alone; not collective. The weights that the model computes with follow in
        the next collective method."""
        super().restore(snapshot)
        # Published later by all ranks together: a rank whose call failed alone restores alone, and must not wait.
        self._is_published = False

    @torch.no_grad()
    def _publish(self) -> None:
        """Copies restored weights to those that the model computes with, unless that was done since the last restore.
        Collective."""
        if not self._is_published and isinstance(self._partitions, TrainedPartitions):
            self._partitions.publish()
        self._is_published = True

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._publish()
        try:
            yield
        finally:
            self._partitions.release()

    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        assert micro_batch.packing is None, "this engine does not pack"
        with self._autocast():
            raw = self._pass.read(micro_batch)
        return head(raw, micro_batch)

    def _run_dummy(self, micro_batch: MicroBatch) -> Tensor:
        return self._read(micro_batch, dummy_loss)

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._learning.backward(loss, is_last=is_last)

    def _store_gradients(self) -> None:
        gradients = self._learning.cut(self._learning.gradient())
        for name, gradient in self._as_boxes(gradients).items():
            self._kept[name].grad = gradient

    @torch.no_grad()
    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self._publish()
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                yield name, cast(tensor, dtype)
                continue
            with self._partitions.whole(tensor) as whole:
                yield name, cast(whole, dtype)

    def local_shards(self) -> Iterator[tuple[str, WeightShard]]:
        if not self._partitions.has_all:
            return super().local_shards()
        self.check_onloaded()
        self._publish()
        return ((name, WeightShard.of_whole(x.detach())) for name, x in self._tensors().items())

    def _copies(self) -> Iterator[HeldTensor]:
        yield from super()._copies()
        if not self._partitions.is_cut:
            return
        self._publish()
        learns = isinstance(self._partitions, TrainedPartitions)
        if self._partitions.has_all:
            for name, parameter in self._model.named_parameters():
                yield HeldTensor(f"copy.{name}", "whole", parameter.detach(), learns)
            return
        for number, partition in enumerate(self._partitions.resident()):
            yield HeldTensor(f"partition {number}", f"of rank {self.data_rank}", partition.detach(), learns)

    def _shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        return self._partitions.shapes.get(name, tuple(tensor.shape))

    def _partition(
        self, model: Model, stage: int, optimizer: OptimizerOptions | None, offloads: bool
    ) -> Partitions:
        """Returns this rank's partitions of a model at a ZeRO stage. Freezes the model if `optimizer` is None;
        otherwise DeepSpeed's optimizer takes hold of it, in host memory if `offloads`."""
        model = model.requires_grad_(optimizer is not None)
        if optimizer is None:
            return FrozenStage3(model, self._pass) if stage == 3 else Replicas(model)
        adamw = new_adamw(model.parameters(), optimizer)
        if stage == 3:
            return Stage3Partitions(model, self._pass, adamw, offloads)
        return Stage12Partitions(model, adamw, stage, offloads)

    def _take_step(self, lr: float) -> None:
        zero = self._learning.zero
        zero.set_lr(lr)
        zero.step()
        if zero.overflow:
            raise known_to_all(
                NonFiniteGradient(f"DeepSpeed finds the gradient not finite at step {self._num_steps}")
            )

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._learning.drop_gradient()

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        adamw, flat = self._learning.zero.optimizer, self._learning.parameter
        add_moments(adamw, flat)
        return adamw

    def _state(self) -> dict[str, Tensor]:
        state = {f"weight.{name}": x for name, x in self._kept.items()}
        if self._adamw is not None:
            moments = self._adamw.state[self._learning.parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                parts = self._as_boxes(self._learning.cut(moments[moment]))
                state |= {f"{moment}.{name}": x for name, x in parts.items()}
        return state

    def _resident(self) -> list[Tensor]:
        return [x for x in (*self._state().values(), *self._partitions.resident()) if x.device == self.device]

    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        weight, (offsets, _) = self._boxes[name]
        return WeightShard(kept, offsets, self._partitions.shapes[weight])

    def _is_primary(self, name: str) -> bool:
        return self._partitions.is_cut or self.data_rank == 0

    def _as_boxes(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        """Splits this rank's flat pieces of weights, by name, into views with the shapes of their boxes."""
        views, used = {}, defaultdict(int)
        for key, (name, (_, sizes)) in self._boxes.items():
            numel = math.prod(sizes)
            views[key] = pieces[name][used[name] :][:numel].view(sizes)
            used[name] += numel
        return views

    @property
    def _learning(self) -> TrainedPartitions:
        """The partitions of an engine that has an optimizer."""
        assert isinstance(self._partitions, TrainedPartitions), "the engine has an optimizer"
        return self._partitions
