"""Data-parallel training on FSDP2: every rank holds a shard of each weight, its gradient and its moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.engines.agreement import new_directory
from services.engines.base import LossFn, OptimizerOptions
from services.engines.checkpoint import Shard
from services.engines.heads import Head, unread
from services.engines.logits import DeferredLogits, OutputLayer
from services.engines.microbatch import MicroBatch, blank
from services.engines.packing import ATTENTION
from services.engines.recompute import recompute_in_backward
from services.engines.sharded import ShardedEngine
from services.engines.stage import FAMILIES
from services.linear import Linear
from services.models import ValueModel, tensors_sha256, write_model

Output = TypeVar("Output")


class FSDPEngine(ShardedEngine):
    """A model on all ranks of the default process group, which must be initialised (gloo for CPU, nccl for CUDA).

    Args:
        model: whole, in float32 where it is trained, with the same weights on every rank.
        device: where this rank computes; the current device, if CUDA.
        optimizer: None for a model that is never trained: it has no optimizer state.
        compute_dtype: of forward and backward, default that of the model; weights, gradients and moments keep
            the model's own.
        reshard_after_forward: gather the weights of a block again for its backward, so that a rank never holds more
            than a few blocks whole. False keeps them from forward to backward: more memory, less communication.
        activation_checkpointing: compute each block again in the backward pass, and keep its input alone.
    """

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        device: torch.device,
        *,
        optimizer: OptimizerOptions | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        self.data_rank = dist.get_rank()
        self.data_size = dist.get_world_size()
        self._model = model
        self.packs = _know_packed_rows(model)
        self._reader = _Reader(model)
        if activation_checkpointing:
            recompute_in_backward(_blocks(model))
        casts = compute_dtype is not None and any(p.dtype != compute_dtype for p in model.parameters())
        if self.data_size > 1 or casts:
            # Each transformer block on its own, and embeddings, norm and head together as the root.
            shard_modules(
                [*_blocks(model), self._reader],
                init_device_mesh(device.type, (self.data_size,)),
                dtype=next(model.parameters()).dtype,
                compute_dtype=compute_dtype,
                reshard_after_forward=reshard_after_forward,
            )
            # FSDP sets itself up in its first forward, and before that it cannot recover from an error in one.
            with torch.no_grad(), self._resharding():
                self._reader(blank().to(device), unread)
        else:
            nn.Module.to(model, device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self._parameters = dict(model.named_parameters())
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        # AdamW works element by element, so it may as well see the local shards: DTensors would only slow it down.
        shards = {name: local_part(p) for name, p in self._parameters.items()}
        super().__init__(device, shards, trained, optimizer)

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
        with self._resharding():
            outputs = []
            for micro_batch, is_ours in self._evened(micro_batches):
                self._stop_together(should_stop())
                output = self._reader(micro_batch, head if is_ours else unread)
                if is_ours:
                    outputs.append(output)
                    progress(len(outputs))
            return outputs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sorted(self._model.state_dict().items()):
            yield name, whole(tensor)

    def export(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        tied = self._tied_names()
        is_writer = self.data_rank == 0
        weights = {name: x.cpu() for name, x in self.full_tensors() if is_writer and name not in tied}
        write_companions = self._gather_companions()
        with new_directory(directory, self.device) as partial:
            if is_writer:
                write_model(self._model, weights, partial, tokenizer)
                write_companions(partial)
        return self._from_rank_0(tensors_sha256(weights.items()) if is_writer else "")

    def _gather_companions(self) -> Callable[[Path], None]:
        """Gathers, on all ranks, what an export holds beside the model; returns what writes it into a directory."""
        return lambda directory: None

    def _evened(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches on the device, and blank ones that are not ours until no rank has more.

        Forward and backward gather weights from all ranks, so all ranks must run them equally often.
        """
        most = self._most(len(micro_batches))
        for micro_batch in micro_batches:
            yield micro_batch.to(self.device), True
        for _ in range(most - len(micro_batches)):
            yield blank().to(self.device), False

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        stats: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=self.device)
        )
        with self._resharding():
            for micro_batch, is_ours in self._evened(micro_batches):
                output = self._reader(micro_batch, head if is_ours else unread)
                if is_ours:
                    loss, counts = loss_fn(output, micro_batch)
                    for name, count in counts.items():
                        stats[name] += count
                else:
                    loss = output * 0
                loss.backward()
                total += loss.detach()
        for name in self._trained_names:
            gradient, shard = self._parameters[name].grad, self._kept[name]
            shard.grad = local_part(gradient) if gradient is not None else torch.zeros_like(shard)
        dist.all_reduce(total)
        return float(total), stats

    def _shard(self, name: str, kept: Tensor) -> Shard:
        return _box(kept, self._parameters[name])

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _tied_names(self) -> set[str]:
        """Names under which a weight appears again: a checkpoint holds it once, under its first name."""
        first = {name for name, _ in self._model.named_parameters()}
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - first

    @contextmanager
    def _resharding(self) -> Iterator[None]:
        """Leave nothing of the weights but the shards, so that no forward computes with gathered, older ones."""
        try:
            yield
        finally:
            if isinstance(self._reader, FSDPModule):
                self._reader.reset_iter_state()


class _Reader(nn.Module):
    """A model and what a head reads off it, as one forward pass: so the weight of the output layer is gathered while
    the head computes with it, chunk by chunk."""

    def __init__(self, model: PreTrainedModel | ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        return head(self._raw(micro_batch), micro_batch)

    def _raw(self, micro_batch: MicroBatch) -> Tensor | DeferredLogits:
        model: Any = self.model
        inputs = {"input_ids": micro_batch.input_ids_BT, "use_cache": False, **micro_batch.arguments()}
        layer = output_layer(model)
        if layer is None:
            output = model(**inputs, logits_to_keep=micro_batch.num_scored)
            return output if isinstance(output, Tensor) else output.logits
        hidden_BTH = model.get_decoder()(**inputs).last_hidden_state
        return DeferredLogits(hidden_BTH, layer)


def _know_packed_rows(model: PreTrainedModel | ValueModel) -> bool:
    """Have the model understand packed micro-batches, where it is of a family that hands on to its attention whatever
    it is given; returns whether it does."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    if backbone.config.model_type not in FAMILIES:
        return False
    backbone.set_attn_implementation(ATTENTION)
    return True


def output_layer(model: PreTrainedModel | ValueModel) -> OutputLayer | None:
    """What makes logits of hidden states, of families known to multiply and do nothing else; None of other models."""
    if isinstance(model, ValueModel) or model.config.model_type not in FAMILIES:
        return None
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear or isinstance(layer, Linear):
        return OutputLayer(layer.weight)
    return None


def shard_modules(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard modules with FSDP2 so that gradients are summed, each on its own, what it holds before itself.

    Args:
        dtype: of the weights, their gradients and their reduction, which is in float32 or finer.
        compute_dtype: of forward and backward, default `dtype`.
    """
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in modules:
        sharded = fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
        # Gradients are summed over ranks, where FSDP would average them. A plain sum is also all that gloo has.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # In a mixture of experts each rank may use other experts.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)


def _blocks(model: PreTrainedModel | ValueModel) -> list[nn.Module]:
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = set(backbone._no_split_modules or ())
    return [module for module in backbone.modules() if type(module).__name__ in names]


def whole(x: Tensor) -> Tensor:
    """All of a tensor, gathered from all ranks where they share it, without its graph."""
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory and not its graph."""
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _box(local: Tensor, parameter: Tensor) -> Shard:
    """Where the local part of a parameter, or a tensor shaped like it, lies in the whole."""
    offsets: Sequence[int] = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return Shard(local, tuple(offsets), tuple(parameter.shape))
