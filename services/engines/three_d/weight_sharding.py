"""How the data ranks of a mesh keep the weights that they share: each all of them, or each a shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from services.compute.heads import dummy_head
from services.compute.microbatch import dummy_micro_batch
from services.engines.fully_shard import local_part, shard_modules
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.stage import Memory, ModelStage
from services.runtime.process_groups import add_up


class WeightSharding(ABC):
    """A stage's weights on the ranks of `groups.data`, loaded.

    Attributes:
        kept: What this rank keeps, in the type it learns in, by name.
        weights: The same in the type the stage computes in, or `kept`.
        counts: Whether what it keeps counts where each weight is counted or written once, not as a replica.
    """

    kept: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    counts: bool

    @abstractmethod
    def first_row(self, name: str) -> int:
        """Of this rank's part of a tensor, with which what is kept begins."""

    @abstractmethod
    def parts(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """This rank's parts of tensors, whole and in a type not finer than theirs, of some that lie as what is kept. To
        read one is collective."""

    @abstractmethod
    def num_passes(self, count: int) -> int:
        """How many micro-batches a rank must run that has so many. Collective."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Around forward and backward passes."""

    @abstractmethod
    def sum_gradients(self) -> None:
        """Leave the gradients of all data ranks, added up, in `.grad` of what is kept. Collective."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget those of the weights."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Called when the kept weights have new values."""


class Replicated(WeightSharding):
    """Each has all of them, in place; gradients are summed when all micro-batches are done.

    Args:
        stage: Its weights have no memory yet.
        kept_dtype: Other than that of the weights: they are rounded copies of what is kept.
        memory: For the weights; default memory of their own.
    """

    def __init__(
        self,
        stage: ModelStage,
        groups: MeshGroups,
        kept_dtype: torch.dtype,
        *,
        memory: Memory | None = None,
    ) -> None:
        self._group = groups.data
        stage.allocate(memory)
        self.weights = self.kept = stage.parameters
        if any(x.dtype != kept_dtype for x in self.weights.values()):
            self.kept = _masters(self.weights, kept_dtype)
        self.counts = groups.data_index == 0
        _load(stage, self)

    def first_row(self, name: str) -> int:
        return 0

    def parts(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        return kept

    def num_passes(self, count: int) -> int:
        return count

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        for x in self.kept.values():
            if x.grad is None:
                x.grad = torch.zeros_like(x)
        if self._group.size() > 1:
            add_up([x.grad for x in self.kept.values() if x.grad is not None], self._group)

    def drop_gradients(self) -> None:
        """Weights have none that are not of what is kept."""

    @torch.no_grad()
    def weights_changed(self) -> None:
        for name, weight in self.weights.items():
            if weight is not self.kept[name]:
                weight.copy_(self.kept[name])


class FullySharded(WeightSharding):
    """Each has some rows of each of them, their gradients and moments (FSDP2). A layer's are gathered while it
    computes, and gradients are summed and cut after each micro-batch.

    Args:
        stage: Its weights have no memory yet.
        kept_dtype: Of the shards; what is gathered of them has the stage's.
    """

    counts = True

    def __init__(self, stage: ModelStage, groups: MeshGroups, kept_dtype: torch.dtype) -> None:
        self._layouts, self._group = stage.layouts, groups.data
        self._device = stage.device
        # Still without memory, in the type of the shards: no rank ever has more than those.
        stage.allocate(
            lambda name: torch.empty(stage.layouts[name].kept_shape, dtype=kept_dtype, device="meta")
        )
        paths = {parameter: path for path, parameter in stage.module.named_parameters()}
        shard_modules(
            [*stage.layers, stage.module],
            DeviceMesh.from_group(groups.data, stage.device.type),
            dtype=kept_dtype,
            compute_dtype=stage.dtype if stage.dtype != kept_dtype else None,
        )
        for module in stage.module.modules():
            # Not of those that have buffers alone, which are there.
            if any(True for _ in module.parameters(recurse=False)):
                module.to_empty(device=stage.device, recurse=False)
        assert isinstance(stage.module, FSDPModule)
        self._module = stage.module
        # FSDP sets itself up in its first forward, which may move the shards.
        with torch.no_grad(), self.computing():
            for parameter in stage.module.parameters():
                parameter.zero_()
            incoming = torch.zeros((1, 1, stage.config.hidden_size), dtype=stage.dtype, device=stage.device)
            stage.forward(incoming, dummy_micro_batch().to(stage.device), dummy_head)
        self._parameters = {
            name: stage.module.get_parameter(paths[x]) for name, x in stage.parameters.items()
        }
        self.weights = self.kept = {name: local_part(x) for name, x in self._parameters.items()}
        _load(stage, self)

    def first_row(self, name: str) -> int:
        return min(self._group.rank() * self._rows_each(name), self._layouts[name].kept_shape[0])

    def parts(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        return _Gathered(kept, partial(self._gather, dtype))

    def num_passes(self, count: int) -> int:
        most = torch.tensor(count, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Leaves nothing of the weights but the shards, whatever happened."""
        try:
            yield
        finally:
            self._module.reset_iter_state()

    def sum_gradients(self) -> None:
        for name, x in self.kept.items():
            gradient = self._parameters[name].grad
            x.grad = torch.zeros_like(x) if gradient is None else local_part(gradient)

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def weights_changed(self) -> None:
        """They are what is kept."""

    def _rows_each(self, name: str) -> int:
        """Of a tensor's part, on every data rank but the last that have any."""
        return -(-self._layouts[name].kept_shape[0] // self._group.size())

    def _gather(self, dtype: torch.dtype, name: str, local: Tensor) -> Tensor:
        num_rows, *rest = self._layouts[name].kept_shape
        own = torch.zeros((self._rows_each(name), *rest), dtype=dtype, device=self._device)
        own[: len(local)] = local
        gathered = own.new_empty((len(own) * self._group.size(), *rest))
        dist.all_gather(list(gathered.chunk(self._group.size())), own, group=self._group)
        return gathered[:num_rows]


class _Gathered(Mapping[str, Tensor]):
    """Tensors that are gathered when they are read, each time anew."""

    def __init__(self, local: Mapping[str, Tensor], gather: Callable[[str, Tensor], Tensor]) -> None:
        self._local, self._gather = local, gather

    def __getitem__(self, name: str) -> Tensor:
        return self._gather(name, self._local[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)


@torch.no_grad()
def _load(stage: ModelStage, sharding: WeightSharding) -> None:
    for x in sharding.kept.values():
        x.zero_()
    stage.load({name: stage.shard(name, x, sharding.first_row(name)) for name, x in sharding.kept.items()})
    sharding.weights_changed()


def _masters(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Finer tensors like them, to which the gradients of each backward pass are moved and added."""
    masters = {name: torch.empty_like(x, dtype=dtype) for name, x in parameters.items()}

    def mover(master: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.to(dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        return move

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(mover(masters[name]))
    return masters
