"""Two ways to keep a stage's weights on the data ranks of a mesh: replicated, or fully sharded (FSDP2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from services.compute.heads import dummy_head
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.engines.collectives import max_over_ranks
from services.engines.fully_shard import local_part, shard_modules
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.stage import Memory, ModelStage
from services.runtime.process_groups import add_up


class WeightSharding(ABC):
    """Base class of the ways to keep a stage's weights on the data ranks of a mesh.

    Attributes:
        kept: This rank's weights (or shards of them) in the type of the optimizer, by name.
        weights: With replicas, the same weights in the type that the stage computes in; `kept` itself if the types
            are equal. With shards, always `kept` itself: FSDP casts weights when it gathers them.
        is_primary: Whether this rank counts its weights in norms and writes them to checkpoints. Of data ranks with
            replicas, one does.
    """

    kept: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    is_primary: bool

    @abstractmethod
    def first_row(self, name: str) -> int:
        """Returns the row of this rank's tensor-parallel shard of a weight with which `kept[name]` begins; 0 if that
        is the whole shard, the number of its rows if this rank keeps none."""

    @abstractmethod
    def parts(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Returns a mapping from name to this rank's whole tensor-parallel shard of each tensor: `kept` itself if data
        ranks replicate it, otherwise gathered over data ranks at each access to an element, which is collective.

        Args:
            kept: Tensors with the layout of `self.kept`, by name.
            dtype: Type of the shards if they are gathered; not finer than that of `kept`.
        """

    @abstractmethod
    def padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Returns the micro-batches of this rank, followed by dummies if weights are gathered for each micro-batch: in
        all as many as the data rank with the most has. Collective."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Returns a context manager for a block of forward and backward passes. Its end frees weights that were
        gathered over data ranks."""

    @abstractmethod
    def sum_gradients(self) -> None:
        """Stores the gradients, summed over data ranks, in `.grad` of the tensors in `kept`; zeros for a tensor
        without gradient. Collective."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Sets `.grad` of the stage's parameters to None where these are other tensors than those in `kept`."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Copies the tensors in `kept`, after they have changed, to those in `weights` that are other tensors."""


class Replicated(WeightSharding):
    """Every data rank has all weights of the stage; gradients are summed after all micro-batches.

    Args:
        stage: The stage; its weights are allocated and read here.
        groups: Position and process groups of this rank.
        kept_dtype: Type of `kept`. If it is not the stage's type, the weights are rounded copies of `kept`.
        memory: Returns the memory of each weight. Default: new memory.
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
        self.is_primary = groups.data_index == 0
        _load(stage, self)

    def first_row(self, name: str) -> int:
        return 0

    def parts(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        return kept

    def padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(micro_batches)

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
        """Does nothing: parameters have no gradients besides those of `kept`."""

    @torch.no_grad()
    def weights_changed(self) -> None:
        for name, weight in self.weights.items():
            if weight is not self.kept[name]:
                weight.copy_(self.kept[name])


class FullySharded(WeightSharding):
    """Every data rank has a shard of each weight, its gradient and moments (FSDP2). A layer's weights are gathered to
    compute, and gradients are reduce-scattered after each micro-batch.

    Args:
        stage: The stage; its weights are allocated and read here.
        groups: Position and process groups of this rank.
        kept_dtype: Type of the shards; gathered weights have the stage's type.
    """

    is_primary = True

    def __init__(self, stage: ModelStage, groups: MeshGroups, kept_dtype: torch.dtype) -> None:
        self._layouts, self._group = stage.layouts, groups.data
        self._device = stage.device
        # On the meta device, so that no rank ever has memory for more than its shards.
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
            # Modules with buffers alone have memory already.
            if any(True for _ in module.parameters(recurse=False)):
                module.to_empty(device=stage.device, recurse=False)
        assert isinstance(stage.module, FSDPModule)
        self._module = stage.module
        # FSDP initializes in its first forward pass, which may move the shards.
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

    def padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        most = max_over_ranks(len(micro_batches), self._group)
        return [*micro_batches, *(dummy_micro_batch() for _ in range(most - len(micro_batches)))]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager that frees all gathered weights after the block, even if the block fails."""
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
        """Does nothing: `weights` is `kept` itself."""

    def _rows_each(self, name: str) -> int:
        """Returns the rows of a tensor-parallel shard that a data rank keeps; the last ranks may have fewer, or
        none."""
        return -(-self._layouts[name].kept_shape[0] // self._group.size())

    def _gather(self, dtype: torch.dtype, name: str, local: Tensor) -> Tensor:
        """Gathers a tensor-parallel shard in type `dtype` from the rows `local` of each data rank. Collective."""
        num_rows, *rest = self._layouts[name].kept_shape
        own = torch.zeros((self._rows_each(name), *rest), dtype=dtype, device=self._device)
        own[: len(local)] = local
        gathered = own.new_empty((len(own) * self._group.size(), *rest))
        dist.all_gather(list(gathered.chunk(self._group.size())), own, group=self._group)
        return gathered[:num_rows]


class _Gathered(Mapping[str, Tensor]):
    """Mapping from name to whole tensor, which each access gathers anew from local tensors. Collective."""

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
    """Reads `kept` from the stage's model directory, with zeros in the padding, and updates `weights`."""
    for x in sharding.kept.values():
        x.zero_()
    stage.load({name: stage.shard(name, x, sharding.first_row(name)) for name, x in sharding.kept.items()})
    sharding.weights_changed()


def _masters(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns master copies of parameters in a finer type, without values, by name. Hooks on the parameters add the
    gradient of each backward pass to the masters' and remove it from the parameters."""
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
