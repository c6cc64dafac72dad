"""A model partitioned by DeepSpeed ZeRO: which rank keeps which elements of weights, gradients and moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from services.engines.zero.flat import FlatPiece
from services.models.loading import Model

BUCKET_NUMEL = 1 << 24
"""Most elements of gradients that are reduced together, and of weights that are gathered together, unless one tensor is
larger."""


class Partitions(ABC):
    """A model of which each rank keeps parts.

    Attributes:
        model: the model.
        shapes: shape of each weight, by name; tied weights under their first name.
        pieces: elements of each weight that this rank keeps; a weight without any is absent.
        kept: those elements, flat, by name.
        is_cut: whether ranks keep different parts.
        has_all: whether every rank's model has all weights.
    """

    model: Model
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, FlatPiece]
    kept: dict[str, Tensor]
    is_cut = True
    has_all = True

    def resident(self) -> Iterable[Tensor]:
        """Tensors that stay on the device between calls, besides the kept ones."""
        return ()

    def release(self) -> None:  # noqa: B027 - for stage 3 alone
        """Frees weights that a forward or backward pass gathered from other ranks."""

    @contextmanager
    def whole(self, parameter: Tensor) -> Iterator[Tensor]:
        """A parameter of the model as a whole tensor. Collective."""
        yield parameter.detach()


class Replicas(Partitions):
    """A model without optimizer at stage 1 or 2, which partition optimizer state and gradients alone: every rank keeps
    all of it."""

    is_cut = False

    def __init__(self, model: Model) -> None:
        self.model = model
        self.shapes = weight_shapes(model)
        self.pieces = {name: FlatPiece(0, p.numel(), 0) for name, p in model.named_parameters()}
        self.kept = {name: p.detach().view(-1) for name, p in model.named_parameters()}


class TrainedPartitions(Partitions):
    """A model that is trained.

    Attributes:
        zero: DeepSpeed's optimizer.
        parameter: this rank's elements of all weights, concatenated, and padding; `pieces` has their offsets.
        offloads: whether `parameter` and the optimizer state are in host memory.
    """

    zero: Any
    parameter: Tensor
    offloads: bool

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a tensor with the layout of `parameter`: the elements of each weight."""
        return {name: flat[piece.at :][: piece.last - piece.first] for name, piece in self.pieces.items()}

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradient of a micro-batch to those before it, over all ranks. Collective."""
        self.zero.clear_backward_seen_flag()
        self.zero.set_gradient_accumulation_boundary(is_last)
        self.zero.enter_backward()
        loss.backward()
        self._reduce(is_last)
        self.zero.backward_epilogue()
        self.zero.exit_backward()

    @property
    def offloaded_gradient(self) -> Tensor | None:
        """The gradient in host memory; None where the optimizer is on the device."""
        if not self.offloads:
            return None
        assert self.parameter.grad is not None
        return self.parameter.grad

    @abstractmethod
    def _reduce(self, is_last: bool) -> None:
        """Reduces gradients after the backward pass of a micro-batch."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """The gradient of the step, summed over micro-batches and ranks, with the layout of `parameter`; changes to it
        enter the step."""

    @abstractmethod
    def drop_gradient(self) -> None:
        """Drops all gradients, also those of an interrupted step."""

    @abstractmethod
    def publish(self) -> None:
        """Copies `parameter` to the weights that the model computes with. Collective."""


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of each whole weight, by name."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def bucket_numel(model: Model) -> int:
    """Elements of a reduction or gather bucket: `BUCKET_NUMEL`, or an even number that holds a smaller model."""
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return min(BUCKET_NUMEL, numel + numel % 2)
