"""All that the engine `zero` uses of DeepSpeed: its ZeRO optimizers without its engine, and private names of them.

DeepSpeed's engine clips and steps at once, has a fixed number of micro-batches per step, refuses float64, and brings
timers and monitors that a service has already. Its optimizers have no public way to drop the gradients of a failed
step, or to gather and release weights around a step. pyproject.toml pins DeepSpeed's version, and
tests/unit/test_internals.py checks that the names are there. No other module imports DeepSpeed, since this one first
sets the environment that its import reads.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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

__all__ = ["DeepSpeedZeRoOffload", "NoopTimer", "comm", "zero3_linear_wrap"]

STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
"""DeepSpeed's configuration for stage 3."""


def prepare() -> None:
    """Configures DeepSpeed to use the existing default process group, start no processes, and log through this
    process's log handlers."""
    os.environ.setdefault("LOCAL_RANK", "0")
    # Without it, a rank on a CPU runs `numactl` at each reduction.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # DeepSpeed would compile these operators with the host's compilers on first use.
    deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    log = logging.getLogger("DeepSpeed")
    log.handlers.clear()
    log.propagate = True
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    comm.init_distributed(dist_init_required=False)


class Stage12Optimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of stages 1 and 2, with master weights in the type of the weights instead of float32."""

    def _configure_master_weights(self, **options: Any) -> torch.dtype:
        super()._configure_master_weights(**options)
        return self.optimizer.param_groups[0]["params"][0].dtype


class Stage3Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's optimizer of stage 3, with master weights in the type of the weights instead of float32, and
    gradients summed over ranks instead of averaged."""

    def _configure_master_weights(self, **options: Any) -> torch.dtype:
        super()._configure_master_weights(**options)
        return self.optimizer.param_groups[0]["params"][0].dtype

    def _gradient_averaging_world_size(self, params: Any, partition_world_size: int) -> int:
        return 1


def offload_options(offloads: bool) -> DeepSpeedZeroOffloadOptimizerConfig | None:
    """Returns DeepSpeed's configuration of an optimizer in host memory (pinned if there is CUDA) if `offloads`, else
    None, for an optimizer on the device."""
    if not offloads:
        return None
    table = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return DeepSpeedZeroOffloadOptimizerConfig.model_validate(table)


def partition_weights(batches: Iterable[list[Tensor]]) -> None:
    """Partitions parameters over the ranks for stage 3, in place. Takes one batch of parameters after the other, so
    that not all of them need memory at the same time. Collective."""
    # Weights keep their own type. DeepSpeed accepts float64 here only on CPUs without float16 arithmetic.
    init = deepspeed.zero.Init(config_dict_or_path=STAGE_3, dtype=torch.float32)
    for batch in batches:
        init._convert_to_zero_parameters(batch)


@contextmanager
def gathered(parameter: Tensor) -> Iterator[Tensor]:
    """Context manager that gathers a partitioned parameter and yields it as a whole tensor, valid in the block alone.
    Collective."""
    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def release_weights(zero: Stage3Optimizer) -> None:
    """Frees all gathered weights of the model of a stage 3 optimizer; this rank's partitions remain."""
    zero._partition_all_parameters()


def copy_partitions_to_model(zero: Stage3Optimizer) -> None:
    """Copies the master weights of a stage 3 optimizer to this rank's partitions of the model's weights, from which
    the model gathers what it computes with."""
    zero._reassign_or_swap_out_partitioned_parameters(0)


def drop_stage12_gradients(zero: Stage12Optimizer, offloaded_gradient: Tensor | None) -> None:
    """Drops all gradients of a stage 1 or 2 optimizer, including those of an interrupted step.

    Args:
        zero: The optimizer.
        offloaded_gradient: The gradient in host memory; None if the optimizer is on the device.
    """
    zero.zero_grad()
    zero._release_ipg_buffers()
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    zero.params_already_reduced = [False] * len(zero.params_already_reduced)
    zero.averaged_gradients, zero.all_grad_tensors = {}, {}
    zero.micro_step_id = -1
    if offloaded_gradient is not None:
        zero.accumulated_grads_in_cpu.clear()
        zero.reset_cpu_buffers()
        offloaded_gradient.zero_()
    _leave_backward(zero)


def drop_stage3_gradients(
    zero: Stage3Optimizer, parameters: Iterable[nn.Parameter], offloaded_gradient: Tensor | None
) -> None:
    """Drops all gradients of a stage 3 optimizer, including those of an interrupted step.

    Args:
        zero: The optimizer.
        parameters: Parameters of the model.
        offloaded_gradient: The gradient in host memory; None if the optimizer is on the device.
    """
    # DeepSpeed's own function expects CUDA streams.
    for parameter in parameters:
        parameter.grad = None
    zero.zero_grad()
    for bucket in zero.ipg_buckets.values():
        bucket.clear_params()
    zero.params_already_reduced = dict.fromkeys(zero.params_already_reduced, False)
    zero.averaged_gradients = {}
    zero.grad_partitions_flat_buffer.zero_()
    if offloaded_gradient is not None:
        offloaded_gradient.zero_()
    _leave_backward(zero)


def _leave_backward(zero: Any) -> None:
    """Ends the backward pass of an optimizer if an error has interrupted it. In any case clears DeepSpeed's flag that a
    backward pass has begun in this step."""
    while zero._backward_active_depth:
        zero.exit_backward()
    zero.clear_backward_seen_flag()
