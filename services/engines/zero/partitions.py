"""A model in the care of DeepSpeed ZeRO: who keeps which part of weights, gradients and moments, and their reductions.

DeepSpeed's optimizers are used without its engine. That one clips and steps at once, has a fixed number of
micro-batches per step, refuses float64, and brings timers and monitors that a service has already.
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Read by the import below.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
import deepspeed.ops
from deepspeed import comm
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer

from services.compute.linear import Linear, linear, speed_up, uses_onednn
from services.compute.torch_internals import buffers_of
from services.engines.zero.flat import Piece, cut_each, cut_together
from services.models.loading import Load, Model, load_on_meta, materialize
from services.models.value_model import transformer_of

BUCKET_NUMEL = 1 << 24
"""Most gradient elements that are reduced at a time, and weights gathered, where a single tensor is not larger."""


def prepare() -> None:
    """Have DeepSpeed use the process group that is there, start no processes and log where we do."""
    os.environ.setdefault("LOCAL_RANK", "0")
    # Without it, a rank on a CPU runs `numactl` at each reduction.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The operators that this names are built by the host's compilers when they are first used.
    deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    log = logging.getLogger("DeepSpeed")
    log.handlers.clear()
    log.propagate = True
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    comm.init_distributed(dist_init_required=False)


class Partitions(ABC):
    """A model of which each rank keeps parts.

    Attributes:
        model: what computes.
        shapes: of each weight, by name, a tied one by its first name.
        pieces: which elements of each weight this rank keeps; one without any is absent.
        kept: those elements, flat, by name.
    """

    model: Model
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, Piece]
    kept: dict[str, Tensor]
    is_cut = True
    """Whether ranks keep different parts."""
    has_all = True
    """Whether the model has all weights on every rank."""

    def resident(self) -> Iterable[Tensor]:
        """Tensors on the device beside the kept ones."""
        return ()

    def release(self) -> None:  # noqa: B027 - only where weights are cut there is something to do
        """Leave no weights of other ranks behind a forward or backward pass."""

    @contextmanager
    def whole(self, parameter: Tensor) -> Iterator[Tensor]:
        """A parameter of the model as a whole tensor. Collective."""
        yield parameter.detach()


class Replicas(Partitions):
    """A model without optimizer at stage 1 or 2, which cut only what one needs: every rank keeps all of it."""

    is_cut = False

    def __init__(self, model: Model) -> None:
        self.model = model
        self.shapes = _shapes(model)
        self.pieces = {name: Piece(0, p.numel(), 0) for name, p in model.named_parameters()}
        self.kept = {name: p.detach().view(-1) for name, p in model.named_parameters()}


class TrainedPartitions(Partitions):
    """A model that learns.

    Attributes:
        zero: DeepSpeed's optimizer.
        parameter: all that this rank keeps, end to end, and padding; pieces say where each weight's elements begin.
    """

    zero: Any
    parameter: Tensor
    offloads: bool

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """The elements of each weight in a tensor that lies as `parameter`, as views."""
        return {name: flat[piece.at :][: piece.last - piece.first] for name, piece in self.pieces.items()}

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch to those before it, over all ranks. Collective."""
        self.zero.clear_backward_seen_flag()
        self.zero.set_gradient_accumulation_boundary(is_last)
        self.zero.enter_backward()
        loss.backward()
        self._reduce(is_last)
        self.zero.backward_epilogue()
        self.zero.exit_backward()

    @abstractmethod
    def _reduce(self, is_last: bool) -> None:
        """Reduce what is to be reduced after a micro-batch."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """The sum over micro-batches and ranks, lying as `parameter`; the step takes it as it is then."""

    @abstractmethod
    def drop_gradient(self) -> None:
        """Forget all gradients, also those of a step that was broken off."""

    @abstractmethod
    def publish(self) -> None:
        """Have the model compute with the weights in `parameter`. Collective."""


class Stage12Partitions(TrainedPartitions):
    """Stage 1 cuts the optimizer's state, and stage 2 gradients too; the model has all weights on every rank."""

    def __init__(self, model: Model, adamw: torch.optim.AdamW, stage: int, offloads: bool) -> None:
        self.model, self.offloads = model, offloads
        self.shapes = _shapes(model)
        self._is_stage_2 = stage == 2
        dtype = next(model.parameters()).dtype
        self.zero = _Stage12Optimizer(
            adamw,
            {p: name for name, p in model.named_parameters()},
            timers=NoopTimer(),
            optimizer_params={},
            dp_process_group=comm.get_world_group(),
            partition_grads=stage == 2,
            reduce_bucket_size=_bucket_numel(model),
            allgather_bucket_size=_bucket_numel(model),
            # Ranks get whole gradients and keep their part: with several owners in a bucket DeepSpeed does the same.
            reduce_scatter=False,
            gradient_average=False,
            offload_optimizer_config=_offload(offloads),
            gradient_accumulation_dtype=dtype,
            communication_data_type=dtype,
            check_grad_overflow=False,
            compute_grad_norm=offloads,
        )
        self.parameter = self.zero.single_partition_of_fp32_groups[0]
        numels = {name: p.numel() for name, p in model.named_parameters()}
        self.pieces = cut_together(numels, int(self.zero.partition_size[0]), comm.get_rank())
        self.kept = self.cut(self.parameter.detach())

    def resident(self) -> Iterable[Tensor]:
        return self.zero.bit16_groups_flat

    def _reduce(self, is_last: bool) -> None:
        if self._is_stage_2:
            self.zero.overlapping_partition_gradients_reduce_epilogue()
        elif is_last:
            self.zero.reduce_gradients()

    def gradient(self) -> Tensor:
        if self.offloads:
            return _gradient_of(self.parameter)
        parts = torch.cat([part.reshape(-1) for part in self.zero.averaged_gradients[0]])
        flat = torch.zeros_like(self.parameter)
        flat[: len(parts)] = parts
        self.zero.averaged_gradients[0] = [flat]
        return flat

    def drop_gradient(self) -> None:
        zero = self.zero
        zero.zero_grad()
        zero._release_ipg_buffers()
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero.averaged_gradients, zero.all_grad_tensors = {}, {}
        zero.micro_step_id = -1
        if self.offloads:
            zero.accumulated_grads_in_cpu.clear()
            zero.reset_cpu_buffers()
            _gradient_of(self.parameter).zero_()
        _forget_backward(zero)

    def publish(self) -> None:
        self.zero.update_lp_params()


class Stage3Partitions(TrainedPartitions):
    """Stage 3 cuts weights too: modules gather theirs when they compute.

    Args:
        root: what is called first in every forward pass, and has all modules in it.
    """

    has_all = False

    def __init__(self, model: Model, root: nn.Module, adamw: torch.optim.AdamW, offloads: bool) -> None:
        self.model, self.offloads = model, offloads
        self.shapes = _shapes(model)
        dtype = next(model.parameters()).dtype
        self.zero = _Stage3Optimizer(
            root,
            adamw,
            {p: name for name, p in model.named_parameters()},
            timers=NoopTimer(),
            ds_config=_STAGE_3,
            dp_process_group=comm.get_world_group(),
            reduce_bucket_size=_bucket_numel(model),
            # Which DeepSpeed has for float32 and coarser types only.
            reduce_scatter=dtype != torch.float64,
            offload_optimizer_config=_offload(offloads),
            offload_ratio=1.0 if offloads else 0.0,
            gradient_accumulation_dtype=dtype,
            communication_data_type=dtype,
            **_gathering(model),
        )
        self.parameter = self.zero.fp32_partitioned_groups_flat[0]
        numels = {name: p.ds_numel for name, p in _parameters(model)}
        self.pieces = cut_each(numels, comm.get_world_size(), comm.get_rank())
        self.kept = self.cut(self.parameter.detach())

    def resident(self) -> Iterable[Tensor]:
        return (*self.zero.fp16_partitioned_groups_flat, self.zero.grad_partitions_flat_buffer)

    def release(self) -> None:
        self.zero._partition_all_parameters()

    @contextmanager
    def whole(self, parameter: Tensor) -> Iterator[Tensor]:
        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach()

    def _reduce(self, is_last: bool) -> None:
        self.zero.overlapping_partition_gradients_reduce_epilogue()

    def gradient(self) -> Tensor:
        if self.offloads:
            return _gradient_of(self.parameter)
        return self.zero.grad_partitions_flat_buffer

    def drop_gradient(self) -> None:
        zero = self.zero
        # DeepSpeed's own way of forgetting them expects streams, which the CPU has none of.
        for parameter in self.model.parameters():
            parameter.grad = None
        zero.zero_grad()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        zero.params_already_reduced = dict.fromkeys(zero.params_already_reduced, False)
        zero.averaged_gradients = {}
        zero.grad_partitions_flat_buffer.zero_()
        if self.offloads:
            _gradient_of(self.parameter).zero_()
        _forget_backward(zero)

    def publish(self) -> None:
        self.zero._reassign_or_swap_out_partitioned_parameters(0)


class FrozenStage3(Partitions):
    """A model without optimizer at stage 3; `root` as of `Stage3Partitions`."""

    has_all = False

    def __init__(self, model: Model, root: nn.Module) -> None:
        self.model = model
        self.shapes = _shapes(model)
        self._zero = DeepSpeedZeRoOffload(
            root,
            timers=NoopTimer(),
            ds_config=_STAGE_3,
            overlap_comm=False,
            dp_process_group=comm.get_world_group(),
            **_gathering(model),
        )
        numels = {name: p.ds_numel for name, p in _parameters(model)}
        self.pieces = cut_each(numels, comm.get_world_size(), comm.get_rank())
        parts = {name: p.ds_tensor for name, p in _parameters(model)}
        self.kept = {
            name: parts[name].detach()[: piece.last - piece.first] for name, piece in self.pieces.items()
        }

    def release(self) -> None:
        self._zero.partition_all_parameters()

    @contextmanager
    def whole(self, parameter: Tensor) -> Iterator[Tensor]:
        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach()


def load(
    load_model: Load, directory: Path, stage: int, device: torch.device, dtype: torch.dtype
) -> tuple[Model, dict[str, Tensor]]:
    """A model of a Hugging Face directory, with memory for all its weights at stages 1 and 2, at stage 3 for a rank's
    parts, and for one whole weight meanwhile.

    Returns:
        The model, and those of its tensors, by name, that have no values yet.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    model = load_on_meta(load_model, directory, dtype)
    if stage < 3:
        empty = dict(materialize(model, device))
        nn.Module.to(model, device)
        return model, empty
    # Weights keep their own type. DeepSpeed accepts float64 here only on CPUs without float16 arithmetic.
    init = deepspeed.zero.Init(config_dict_or_path=_STAGE_3, dtype=torch.float32)
    empty = {}
    for name, tensor in materialize(model, device):
        empty[name] = tensor
        if isinstance(tensor, nn.Parameter):
            init._convert_to_zero_parameters([tensor])
    init._convert_to_zero_parameters(list(model.parameters()))
    for module in model.modules():
        buffers = buffers_of(module)
        buffers.update({name: x if x is None else x.to(device) for name, x in buffers.items()})
    speed_up(model, _GatheredLinear)
    return model, empty


class _GatheredLinear(Linear):
    """A linear layer whose weight is gathered while it computes. Its backward pass looks at the parameter again, where
    torch's own keeps what was gathered for the forward pass: all weights of the model, in the end."""

    def forward(self, input: Tensor) -> Tensor:
        if uses_onednn(input, self.weight):
            return linear(input, self.weight, self.bias)
        return zero3_linear_wrap(input, self.weight, self.bias)


class _Stage12Optimizer(DeepSpeedZeroOptimizer):
    """Keeps weights in their own type, where DeepSpeed has float32 alone."""

    def _configure_master_weights(self, **options: Any) -> torch.dtype:
        super()._configure_master_weights(**options)
        return self.optimizer.param_groups[0]["params"][0].dtype


class _Stage3Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """Keeps weights in their own type, and adds gradients up where DeepSpeed averages them."""

    def _configure_master_weights(self, **options: Any) -> torch.dtype:
        super()._configure_master_weights(**options)
        return self.optimizer.param_groups[0]["params"][0].dtype

    def _gradient_averaging_world_size(self, params: Any, partition_world_size: int) -> int:
        return 1


_STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def _gathering(model: Model) -> dict[str, Any]:
    """Have no more weights on a rank than a layer that computes and the one after it."""
    backbone = transformer_of(model)
    layer = (
        sum(p.ds_numel for _, p in _parameters(model)) // backbone.config.get_text_config().num_hidden_layers
    )
    return {
        "prefetch_bucket_size": layer,
        "max_reuse_distance": 0,
        "param_persistence_threshold": 0,
        "model_persistence_threshold": 0,
    }


def _offload(offloads: bool) -> Any:
    if not offloads:
        return None
    table = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return DeepSpeedZeroOffloadOptimizerConfig.model_validate(table)


def _parameters(model: Model) -> Iterable[tuple[str, Any]]:
    """By name, and with the attributes that stage 3 gives them."""
    return model.named_parameters()


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def _bucket_numel(model: Model) -> int:
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return min(BUCKET_NUMEL, numel + numel % 2)


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _forget_backward(zero: Any) -> None:
    while zero._backward_active_depth:
        zero.exit_backward()
    zero.clear_backward_seen_flag()
