"""Partitions of a model by DeepSpeed ZeRO: which elements of weights, gradients and moments this rank keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from services.engines.zero.flat import FlatPiece
from services.models.loading import Model

BUCKET_NUMEL = 1 << 24
"""Most elements of gradients that are reduced in one collective, and of weights that are gathered in one, unless a
single tensor is larger."""


class Partitions(ABC):
    """Base class of the ways in which ranks keep parts of a model.

    Attributes:
        model: the model.
        shapes: shape of each whole weight, by name; tied weights under their first name.
        pieces: interval of each weight's elements that this rank keeps, by name; a weight without any is absent.
        kept: these elements as flat tensors, by name.
        is_cut: whether ranks keep different elements. If not, each keeps all.
        has_all: whether the model on each rank has all weights whole, besides the elements that the rank keeps.
    """

    model: Model
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, FlatPiece]
    kept: dict[str, Tensor]
    is_cut = True
    has_all = True

    def resident(self) -> Iterable[Tensor]:
        """Returns the tensors that this rank holds between calls, besides those in `kept` and the optimizer state.
        Default: none."""
        return ()

    def release(self) -> None:  # noqa: B027 - for stage 3 alone
        """Frees weights that a forward or backward pass gathered from other ranks. Default: does nothing."""

    @contextmanager
    def whole(self, parameter: Tensor) -> Iterator[Tensor]:
        """Context manager that yields a parameter of the model as a whole tensor, valid in the block alone.
        Collective."""
        yield parameter.detach()


class Replicas(Partitions):
    """A model without optimizer at stage 1 or 2. These stages partition gradients and optimizer state alone, so every
    rank keeps the whole model."""

    is_cut = False

    def __init__(self, model: Model) -> None:
        self.model = model
        self.shapes = weight_shapes(model)
        self.pieces = {name: FlatPiece(0, p.numel(), 0) for name, p in model.named_parameters()}
        self.kept = {name: p.detach().view(-1) for name, p in model.named_parameters()}


class TrainedPartitions(Partitions):
    """Base class of the partitions of a model that is trained.

    Attributes:
        zero: DeepSpeed's optimizer.
        parameter: this rank's elements of all weights, concatenated and padded, which the optimizer updates; `pieces`
            has the offset of each weight.
        offloads: whether `parameter` and the optimizer state are in host memory.
    """

    zero: Any
    parameter: Tensor
    offloads: bool

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Splits a tensor with the layout of `parameter`, such as a moment, into views of each weight's elements, by
        name."""
        return {name: flat[piece.at :][: piece.last - piece.first] for name, piece in self.pieces.items()}

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Runs the backward pass of a micro-batch and adds its gradient to those of earlier micro-batches.
        Collective.

        Args:
            loss: loss of the micro-batch.
            is_last: whether this is the last micro-batch of the optimizer step.
        """
        self.zero.clear_backward_seen_flag()
        self.zero.set_gradient_accumulation_boundary(is_last)
        self.zero.enter_backward()
        loss.backward()
        self._reduce(is_last)
        self.zero.backward_epilogue()
        self.zero.exit_backward()

    @property
    def offloaded_gradient(self) -> Tensor | None:
        """Gradient of `parameter` in host memory; None if the optimizer is on the device."""
        if not self.offloads:
            return None
        assert self.parameter.grad is not None
        return self.parameter.grad

    @abstractmethod
    def _reduce(self, is_last: bool) -> None:
        """Reduces gradients over ranks after the backward pass of a micro-batch. Collective."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """Returns the gradient of the optimizer step, summed over micro-batches and ranks, with the layout of
        `parameter`. Not a copy: the step uses it with any changes that the caller makes."""

    @abstractmethod
    def drop_gradient(self) -> None:
        """Drops all gradients, including those of an interrupted step."""

    @abstractmethod
    def publish(self) -> None:
        """Copies `parameter` to the weights that the model computes with. Collective."""


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each whole weight of a model, partitioned or not, by name."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def bucket_numel(model: Model) -> int:
    """Returns the size, in elements, of DeepSpeed's buckets for reducing gradients and gathering weights:
    `BUCKET_NUMEL`, or, for a smaller model, the number of its elements rounded up to an even number."""
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return min(BUCKET_NUMEL, numel + numel % 2)
