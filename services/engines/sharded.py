"""Base of engines whose ranks keep their parts of a model as plain tensors: optimizer, snapshots, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.agreement import all_or_none, new_directory
from services.engines.base import (
    EngineOffloaded,
    InferenceStopped,
    LossFn,
    NonFiniteGradient,
    OptimizerOptions,
    Snapshot,
    StepResult,
    TrainEngine,
)
from services.engines.offload import OffloadedStorage, bring_back, copy_to_host, free, num_bytes
from services.runtime.ranks import known_to_all
from services.storage.checkpoint import (
    NO_SCALARS,
    Scalars,
    WeightShard,
    read_manifest,
    read_shards,
    write_manifest,
    write_shards,
)
from services.storage.publish import readable_path

Output = TypeVar("Output")

NUM_STEPS = "engine.num_steps"
"""Scalar of a checkpoint: optimizer steps done."""
_SHA256_BYTES = 32
_HOST = torch.device("cpu")
"""Where ranks agree on what may have failed for want of device memory."""


class ShardedEngine(TrainEngine):
    """An engine on all ranks of the default process group.

    Args:
        device: Where this rank computes.
        kept: This rank's part of every weight, by name; in place from here on. Gradients come in their `.grad`.
        trained: Names of those that learn.
        optimizer: None for a model that is never trained: it has no optimizer state.
    """

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
        self._offloaded: list[OffloadedStorage] = []

    @abstractmethod
    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        """Leave the gradient of the whole mini-batch in `.grad` of what is kept; returns its loss and this rank's
        statistics."""

    @abstractmethod
    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        """The kept part of a weight, or of a tensor with its layout, as a box of the checkpoint's tensor."""

    @abstractmethod
    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        """Fill boxes of weights that this rank keeps, by name, with the values that a new engine has. Not collective.

        Raises:
            ValueError: the model directory can no longer be read.
        """

    def _take_step(self, lr: float) -> None:
        """Move what is kept along the gradient in its `.grad`."""
        assert self._adamw is not None
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()

    def _is_primary(self, name: str) -> bool:
        """Whether this rank's part of a weight counts where each is counted or written once, not as a replica."""
        return True

    def _weights_changed(self) -> None:
        """Called when the kept weights have new values, to update copies of them."""

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        loss_fn: LossFn[Output],
        *,
        confirm: Callable[[], None] = lambda: None,
    ) -> StepResult:
        if self._adamw is None or self._options is None:
            raise RuntimeError("this engine has no optimizer: its model is not trained")
        self.check_onloaded()
        try:
            with _deterministic(self.device):
                loss, stats = self._accumulate_gradients(micro_batches, head, loss_fn)
            grad_norm = self._clip_gradients(self._options.max_grad_norm)
            lr = self._options.lr_at(self._num_steps)
            result = StepResult(loss, grad_norm, lr, {name: float(x) for name, x in stats.items()})
            confirm()
            # From here on nothing allocates, waits for other ranks or reads what others may change.
            self._has_first_values = False
            self._take_step(lr)
            self._weights_changed()
            self._num_steps += 1
            return result
        finally:
            self._drop_gradients()

    def snapshot(self) -> Snapshot:
        self.check_onloaded()
        return Snapshot(self._num_steps, {name: _in_host_memory(x) for name, x in self._state().items()})

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        self.check_onloaded()
        self._has_first_values = False
        for name, x in self._state().items():
            x.copy_(snapshot.tensors[name])
        self._weights_changed()
        self._set_num_steps(snapshot.num_steps)

    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        self.check_onloaded()
        own = {name: x for name, x in self._state().items() if self._is_primary(_weight_name(name))}
        with new_directory(directory, self.device, self.progressed) as partial:
            write_shards(partial, dist.get_rank(), self._shards(own))
            self.progressed()
            if dist.get_rank() == 0:
                write_manifest(partial, dist.get_world_size(), {**scalars, NUM_STEPS: self._num_steps})

    def load(self, directory: Path) -> Scalars:
        self.check_onloaded()
        with all_or_none(f"reading {directory}", self.device):
            stored = readable_path(directory)
            num_ranks, scalars = read_manifest(stored)
            tensors = {name: torch.zeros_like(x, device="cpu") for name, x in self._state().items()}
            read_shards(stored, num_ranks, self._shards(tensors), self.progressed)
            loaded = Snapshot(int(scalars[NUM_STEPS]), tensors)
        self.restore(loaded)
        return {name: value for name, value in scalars.items() if name != NUM_STEPS}

    def start_over(self) -> None:
        self.onload()
        if not self._most(not self._has_first_values):
            return
        with all_or_none("reading the weights of the model directory", self.device):
            # Moments are zero: one element each, read as many times as they have elements.
            state = {name: x.new_zeros((), device="cpu").expand(x.shape) for name, x in self._state().items()}
            weights = {
                name: torch.zeros_like(x, device="cpu")
                for name, x in self._state().items()
                if name.startswith("weight.")
            }
            self._read_first_values({_weight_name(name): x for name, x in self._shards(weights).items()})
        self.restore(Snapshot(0, state | weights))
        self._has_first_values = True

    def offload(self) -> int:
        return 0 if self.device.type == "cpu" else self._leave_device()

    def onload(self) -> int:
        if not self._offloaded:
            return 0
        moved_bytes = num_bytes(self._offloaded)
        try:
            with all_or_none("bringing the engine back to the device", _HOST):
                bring_back(self._offloaded)
        except BaseException:
            free(self._offloaded)
            torch.cuda.empty_cache()
            raise
        self._offloaded = []
        return moved_bytes

    def _leave_device(self) -> int:
        """As `offload`, whatever the device."""
        if self._offloaded:
            return 0
        with all_or_none("copying the engine to host memory", _HOST):
            offloaded = copy_to_host(self._resident())
        free(offloaded)
        self._offloaded = offloaded
        torch.cuda.empty_cache()
        return num_bytes(offloaded)

    def check_onloaded(self) -> None:
        if self._offloaded:
            raise EngineOffloaded("the engine is offloaded; bring it back first")

    def _stop_together(self, stop: bool) -> None:
        """Raises InferenceStopped where any rank wants to stop."""
        stopping = torch.tensor(stop, dtype=torch.int64, device=self.device)
        dist.all_reduce(stopping)
        if stopping:
            raise known_to_all(InferenceStopped("inference was stopped between micro-batches"))

    def _most(self, count: int) -> int:
        """The largest count of any rank."""
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _from_rank_0(self, sha256: str) -> str:
        """The digest that rank 0 has."""
        digest = bytes.fromhex(sha256) if dist.get_rank() == 0 else bytes(_SHA256_BYTES)
        shared = torch.tensor(list(digest), dtype=torch.uint8, device=self.device)
        dist.broadcast(shared, src=0)
        return bytes(shared.tolist()).hex()

    def _clip_gradients(self, max_norm: float) -> float:
        """Scale the gradient to at most `max_norm`; returns the norm it had, summed in float64 over all ranks.

        Raises:
            NonFiniteGradient: on every rank, since all see the same sum.
        """
        gradients = {name: x.grad for name in self._trained_names if (x := self._kept[name]).grad is not None}
        # What DeepSpeed offloads has its gradient in host memory.
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).to(self.device)
            for name, gradient in gradients.items()
            if self._is_primary(name)
        ]
        squares = (
            torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=self.device)]).square().sum()
        )
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if not norm < float("inf"):
            raise known_to_all(
                NonFiniteGradient(f"gradient norm is {norm} at optimizer step {self._num_steps}")
            )
        if norm > max_norm:
            for gradient in gradients.values():
                gradient.mul_(max_norm / norm)
        return norm

    def _drop_gradients(self) -> None:
        for x in self._kept.values():
            x.grad = None

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        trained = [self._kept[name] for name in self._trained_names]
        adamw = torch.optim.AdamW(
            trained,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        # Made here and not at the first step, so that the state has one shape for life.
        for x in trained:
            adamw.state[x] = {
                "step": torch.zeros((), device=x.device),
                "exp_avg": torch.zeros_like(x),
                "exp_avg_sq": torch.zeros_like(x),
            }
        return adamw

    def _state(self) -> dict[str, Tensor]:
        """Every tensor that makes this rank's part of the engine: weights, first and second moments."""
        state = {f"weight.{name}": x.detach() for name, x in self._kept.items()}
        if self._adamw is not None:
            for name in self._trained_names:
                moments = self._adamw.state[self._kept[name]]
                state[f"exp_avg.{name}"] = moments["exp_avg"]
                state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def _resident(self) -> list[Tensor]:
        """Every tensor that is on the device as long as the engine is."""
        return list(self._state().values())

    def _set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._adamw is not None:
            for moments in self._adamw.state.values():
                moments["step"].fill_(num_steps)

    def _shards(self, state: Mapping[str, Tensor]) -> dict[str, WeightShard]:
        return {name: self._shard(_weight_name(name), x) for name, x in state.items()}


def _weight_name(state_name: str) -> str:
    return state_name.partition(".")[2]


def _in_host_memory(x: Tensor) -> Tensor:
    """A copy; from a GPU into pages that it writes to by itself, which torch keeps for the next one."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x.detach())


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Choose deterministic kernels on CUDA, where there are any; CPU kernels are, for one number of threads."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A property of the module's class, which types do not show.
    settings: Any = deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Every tensor would be written once before the kernel that makes it does.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
