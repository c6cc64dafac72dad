"""Data-parallel training on FSDP2: every rank holds a shard of each weight, its gradient and its moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.engines.agreement import all_or_none, new_directory
from services.engines.base import (
    InferenceStopped,
    LossFn,
    NonFiniteGradient,
    OptimizerOptions,
    Snapshot,
    StepResult,
    TrainEngine,
)
from services.engines.checkpoint import (
    NO_SCALARS,
    Scalars,
    Shard,
    read_manifest,
    read_shards,
    write_manifest,
    write_shards,
)
from services.engines.heads import Head
from services.engines.microbatch import MicroBatch, blank
from services.engines.offload import Parked, num_bytes, park, unpark
from services.models import ValueModel, tensors_sha256, write_model

Output = TypeVar("Output")

NUM_STEPS = "engine.num_steps"
"""Scalar of a checkpoint: optimizer steps done."""
_SHA256_BYTES = 32


class FSDPEngine(TrainEngine):
    """A model on all ranks of the default process group, which must be initialised (gloo for CPU, nccl for CUDA).

    Args:
        model: whole, in float32 where it is trained, with the same weights on every rank.
        device: where this rank computes; the current device, if CUDA.
        optimizer: None for a model that is never trained: it has no optimizer state.
        compute_dtype: of forward and backward, default that of the model; weights, gradients and moments keep
            the model's own.
        reshard_after_forward: gather the weights of a block again for its backward, so that a rank never holds more
            than a few blocks whole. False keeps them from forward to backward: more memory, less communication.
    """

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        device: torch.device,
        *,
        optimizer: OptimizerOptions | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        self.device = device
        self.data_rank = dist.get_rank()
        self.data_size = dist.get_world_size()
        self._model = model
        self._parked: list[Parked] = []
        if self.data_size > 1 or compute_dtype not in (None, next(model.parameters()).dtype):
            _shard(model, device, compute_dtype, reshard_after_forward)
            # FSDP sets itself up in its first forward, and before that it cannot recover from an error in one.
            with torch.no_grad(), self._resharding():
                self._forward(blank().to(device))
        else:
            nn.Module.to(model, device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        # AdamW works element by element, so it may as well see the local shards: DTensors would only slow it down.
        self._shards = {name: _local(p) for name, p in model.named_parameters()}
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._options = optimizer
        self._adamw = self._make_adamw(optimizer) if optimizer is not None else None
        self._num_steps = 0

    @torch.no_grad()
    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Output]:
        with self._resharding():
            outputs = []
            for micro_batch, is_ours in self._evened(micro_batches):
                self._stop_together(should_stop())
                raw = self._forward(micro_batch)
                if is_ours:
                    outputs.append(head(raw, micro_batch))
                    progress(len(outputs))
            return outputs

    def step(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> StepResult:
        if self._adamw is None or self._options is None:
            raise RuntimeError("this engine has no optimizer: its model is not trained")
        try:
            with self._resharding(), _deterministic(self.device):
                loss, stats = self._accumulate_gradients(micro_batches, head, loss_fn)
            grad_norm = self._clip_gradients(self._options.max_grad_norm)
            lr = self._options.lr_at(self._num_steps)
            self._adamw.param_groups[0]["lr"] = lr
            self._adamw.step()
            self._num_steps += 1
            return StepResult(loss, grad_norm, lr, {name: float(x) for name, x in stats.items()})
        finally:
            self._drop_gradients()

    def snapshot(self) -> Snapshot:
        return Snapshot(self._num_steps, {name: x.to("cpu", copy=True) for name, x in self._state().items()})

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        for name, x in self._state().items():
            x.copy_(snapshot.tensors[name])
        self._set_num_steps(snapshot.num_steps)

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sorted(self._model.state_dict().items()):
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

    def export(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        tied = self._tied_names()
        is_writer = self.data_rank == 0
        weights = {name: x.cpu() for name, x in self.full_tensors() if is_writer and name not in tied}
        with new_directory(directory, self.device) as partial:
            if is_writer:
                write_model(self._model, weights, partial, tokenizer)
        digest = bytes.fromhex(tensors_sha256(weights.items())) if is_writer else bytes(_SHA256_BYTES)
        shared = torch.tensor(list(digest), dtype=torch.uint8, device=self.device)
        dist.broadcast(shared, src=0)
        return bytes(shared.tolist()).hex()

    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        with new_directory(directory, self.device) as partial:
            write_shards(partial, self.data_rank, self._boxes(self._state()))
            if self.data_rank == 0:
                write_manifest(partial, self.data_size, {**scalars, NUM_STEPS: self._num_steps})

    def load(self, directory: Path) -> Scalars:
        with all_or_none(f"reading {directory}", self.device):
            num_ranks, scalars = read_manifest(directory)
            tensors = {name: torch.empty_like(x, device="cpu") for name, x in self._state().items()}
            read_shards(directory, num_ranks, self._boxes(tensors))
            loaded = Snapshot(int(scalars[NUM_STEPS]), tensors)
        self.restore(loaded)
        return {name: value for name, value in scalars.items() if name != NUM_STEPS}

    def offload(self) -> int:
        if self.device.type == "cpu" or self._parked:
            return 0
        self._parked = park(self._state().values())
        torch.cuda.empty_cache()
        return num_bytes(self._parked)

    def onload(self) -> int:
        parked, self._parked = self._parked, []
        unpark(parked)
        return num_bytes(parked)

    def _forward(self, micro_batch: MicroBatch) -> Tensor:
        if self._parked:
            raise RuntimeError("the engine is offloaded; bring it back first")
        output = self._model(
            input_ids=micro_batch.input_ids_BT, use_cache=False, logits_to_keep=micro_batch.num_scored
        )
        return output if isinstance(output, Tensor) else output.logits

    def _evened(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches on the device, and blank ones that are not ours until no rank has more.

        Forward and backward gather weights from all ranks, so all ranks must run them equally often.
        """
        most = torch.tensor(len(micro_batches), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for micro_batch in micro_batches:
            yield micro_batch.to(self.device), True
        for _ in range(int(most) - len(micro_batches)):
            yield blank().to(self.device), False

    def _stop_together(self, stop: bool) -> None:
        stopping = torch.tensor(stop, dtype=torch.int64, device=self.device)
        dist.all_reduce(stopping)
        if stopping:
            raise InferenceStopped("inference was stopped between micro-batches")

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        """Leave the gradient of the whole mini-batch in `.grad`; returns its loss and this rank's statistics."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        stats: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=self.device)
        )
        for micro_batch, is_ours in self._evened(micro_batches):
            raw = self._forward(micro_batch)
            if is_ours:
                loss, counts = loss_fn(head(raw, micro_batch), micro_batch)
                for name, count in counts.items():
                    stats[name] += count
            else:
                loss = raw.sum() * 0
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total), stats

    def _clip_gradients(self, max_norm: float) -> float:
        """Scale the gradient to at most `max_norm`; returns the norm it had, summed in float64 over all ranks.

        Raises:
            NonFiniteGradient: on every rank, since all see the same sum.
        """
        for name, p in self._trained.items():
            shard = self._shards[name]
            shard.grad = _local(p.grad) if p.grad is not None else torch.zeros_like(shard)
        gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        squares = torch.stack(norms).square().sum()
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if not norm < float("inf"):
            raise NonFiniteGradient(f"gradient norm is {norm} at optimizer step {self._num_steps}")
        if norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    def _drop_gradients(self) -> None:
        for name, p in self._trained.items():
            p.grad = self._shards[name].grad = None

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        shards = [self._shards[name] for name in self._trained]
        adamw = torch.optim.AdamW(
            shards,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        # Made here and not at the first step, so that the state has one shape for life.
        for shard in shards:
            adamw.state[shard] = {
                "step": torch.zeros((), device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        return adamw

    def _state(self) -> dict[str, Tensor]:
        """Every tensor that makes this rank's part of the engine: weights, first and second moments."""
        state = {f"weight.{name}": shard for name, shard in self._shards.items()}
        if self._adamw is not None:
            for name in self._trained:
                moments = self._adamw.state[self._shards[name]]
                state[f"exp_avg.{name}"] = moments["exp_avg"]
                state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def _set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._adamw is not None:
            for moments in self._adamw.state.values():
                moments["step"].fill_(num_steps)

    def _boxes(self, state: Mapping[str, Tensor]) -> dict[str, Shard]:
        parameters = dict(self._model.named_parameters())
        return {name: _box(x, parameters[name.partition(".")[2]]) for name, x in state.items()}

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
            if isinstance(self._model, FSDPModule):
                self._model.reset_iter_state()


def _shard(
    model: PreTrainedModel | ValueModel,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> None:
    """Shard each transformer block on its own, and embeddings, norm and head together as the root."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in [*_blocks(model), model]:
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


def _local(x: Tensor) -> Tensor:
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


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Choose deterministic kernels on CUDA, where there are any; CPU kernels are, for one number of threads."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
