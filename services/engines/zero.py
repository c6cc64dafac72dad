"""Data-parallel training on DeepSpeed ZeRO (Rajbhandari et al. 2020): ranks share out optimizer state, gradients
and weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from services.engines import partitions
from services.engines.agreement import new_directory
from services.engines.base import LossFn, NonFiniteGradient, OptimizerOptions, Snapshot
from services.engines.checkpoint import PART, Shard
from services.engines.flat import boxes
from services.engines.heads import Head
from services.engines.logits import DeferredLogits
from services.engines.microbatch import MicroBatch, blank
from services.engines.modules import Pass, nothing
from services.engines.partitions import Partitions, TrainedPartitions
from services.engines.sharded import ShardedEngine
from services.engines.weights import write_weights
from services.models import ValueModel, write_config

Output = TypeVar("Output")


class ZeROEngine(ShardedEngine):
    """A model on all ranks of the default process group, which must be initialised (gloo for CPU, nccl for CUDA).

    What a rank keeps of a weight is an interval of its elements in row-major order. A box of it, at most three for a
    matrix, is what the optimizer's state, snapshots and checkpoints know.

    Args:
        directory: Hugging Face directory.
        stage: 1 cuts the optimizer's state, 2 gradients too, 3 weights too.
        device: Where this rank computes; the current device, if CUDA.
        dtype: Of the weights, their gradients and moments: float32 where they are trained.
        compute_dtype: Of matrix products, by autocast; default as the weights.
        optimizer: None for a model that is never trained.
        offloads: Whether the weights that learn and the optimizer's state are in host memory, and it works there.
        with_value_head: Whether it is a value model.

    Raises:
        ValueError: The directory holds another kind of model, or not all of its weights.
    """

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
        with_value_head: bool = False,
    ) -> None:
        partitions.prepare()
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()
        casts = compute_dtype not in (None, dtype)
        self._autocast = partial(torch.autocast, device.type, dtype=compute_dtype, enabled=casts)
        model = partitions.load(directory, stage, device, dtype, with_value_head=with_value_head)
        self._model, self._pass = model, Pass(model, compute_dtype)
        self.config = (model.backbone if isinstance(model, ValueModel) else model).config
        self._partitions = self._share_out(stage, optimizer, offloads)
        self._is_published = True
        self._boxes = {
            f"{name}{PART}{number}" if number else name: (name, box)
            for name, piece in self._partitions.pieces.items()
            for number, box in enumerate(boxes(self._partitions.shapes[name], piece.first, piece.last))
        }
        self.num_parameters = sum(math.prod(shape) for shape in self._partitions.shapes.values())
        kept = self._as_boxes(self._partitions.kept)
        super().__init__(device, kept, list(kept) if optimizer else [], optimizer)

    @torch.no_grad()
    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Output]:
        self._check_onloaded()
        self._publish()
        with self._releasing():
            outputs = []
            for micro_batch, is_ours, _ in self._evened(micro_batches):
                self._stop_together(should_stop())
                raw = self._forward(micro_batch)
                if is_ours:
                    outputs.append(head(raw, micro_batch))
                    progress(len(outputs))
                else:
                    nothing(raw, micro_batch)
            return outputs

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        # Later, all ranks together: one whose call fails alone restores alone, and must not wait for others.
        self._is_published = False

    @torch.no_grad()
    def _publish(self) -> None:
        """Have the model compute with what is kept, where that was restored. Collective."""
        if not self._is_published and isinstance(self._partitions, TrainedPartitions):
            self._partitions.publish()
        self._is_published = True

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._gather(self._tensors())

    def export(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        tied = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        tied -= self._partitions.shapes.keys()
        tensors = {name: x for name, x in self._tensors().items() if name not in tied}
        sizes = {
            name: math.prod(getattr(x, "ds_shape", x.shape)) * x.element_size() for name, x in tensors.items()
        }
        sha256 = ""
        with new_directory(directory, self.device) as partial_directory:
            if self.data_rank == 0:
                sha256 = write_weights(partial_directory, sizes, self._gather(tensors))
                write_config(self._model, partial_directory, tokenizer)
            else:
                for _ in self._gather(tensors):
                    pass
        return self._from_rank_0(sha256)

    def _tensors(self) -> dict[str, Tensor]:
        """The model's parameters and what else is in a checkpoint, in the order of their names."""
        return dict(sorted(self._model.state_dict(keep_vars=True).items()))

    @torch.no_grad()
    def _gather(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the model, whole on every rank, one at a time. Collective."""
        self._publish()
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                yield name, tensor
                continue
            with self._partitions.whole(tensor) as whole:
                yield name, whole

    def _share_out(self, stage: int, optimizer: OptimizerOptions | None, offloads: bool) -> Partitions:
        model = self._model.requires_grad_(optimizer is not None)
        if optimizer is None:
            return partitions.FrozenStage3(model, self._pass) if stage == 3 else partitions.Replicas(model)
        adamw = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        if stage == 3:
            return partitions.Stage3Partitions(model, self._pass, adamw, offloads)
        return partitions.Stage12Partitions(model, adamw, stage, offloads)

    def _forward(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        assert micro_batch.packing is None, "this engine does not pack"
        with self._autocast():
            return self._pass.read(micro_batch)

    def _evened(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool, bool]]:
        """The micro-batches on the device, and blank ones that are not ours until no rank has more, which is 1 at
        least; whether each is ours, and the last.

        Forward gathers weights from all ranks and backward reduces gradients, so all ranks must run them equally
        often.
        """
        most = max(self._most(len(micro_batches)), 1)
        for number in range(most):
            is_ours = number < len(micro_batches)
            micro_batch = micro_batches[number] if is_ours else blank()
            yield micro_batch.to(self.device), is_ours, number == most - 1

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        stats: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=self.device)
        )
        learning = self._learning
        self._publish()
        with self._releasing():
            for micro_batch, is_ours, is_last in self._evened(micro_batches):
                raw = self._forward(micro_batch)
                if is_ours:
                    loss, counts = loss_fn(head(raw, micro_batch), micro_batch)
                    for name, count in counts.items():
                        stats[name] += count
                else:
                    loss = nothing(raw, micro_batch)
                learning.backward(loss, is_last=is_last)
                total += loss.detach()
        for name, gradient in self._as_boxes(learning.cut(learning.gradient())).items():
            self._kept[name].grad = gradient
        dist.all_reduce(total)
        return float(total), stats

    def _take_step(self, lr: float) -> None:
        zero = self._learning.zero
        zero.set_lr(lr)
        zero.step()
        if zero.overflow:
            raise NonFiniteGradient(f"DeepSpeed finds the gradient not finite at step {self._num_steps}")

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._learning.drop_gradient()

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        adamw, flat = self._learning.zero.optimizer, self._learning.parameter
        adamw.state[flat] = {
            "step": torch.zeros((), device=flat.device),
            "exp_avg": torch.zeros_like(flat),
            "exp_avg_sq": torch.zeros_like(flat),
        }
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

    def _shard(self, name: str, kept: Tensor) -> Shard:
        weight, (offsets, _) = self._boxes[name]
        return Shard(kept, offsets, self._partitions.shapes[weight])

    def _counts(self, name: str) -> bool:
        return self._partitions.is_cut or self.data_rank == 0

    def _as_boxes(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        """The boxes of pieces of weights, as views."""
        views, used = {}, defaultdict(int)
        for key, (name, (_, sizes)) in self._boxes.items():
            numel = math.prod(sizes)
            views[key] = pieces[name][used[name] :][:numel].view(sizes)
            used[name] += numel
        return views

    @property
    def _learning(self) -> TrainedPartitions:
        assert isinstance(self._partitions, TrainedPartitions), "the engine has an optimizer"
        return self._partitions

    @contextmanager
    def _releasing(self) -> Iterator[None]:
        """Leave nothing of the weights but what is kept."""
        try:
            yield
        finally:
            self._partitions.release()
