"""Base class of the data-parallel engines, in which each rank computes the whole model on its own rows, keeps a shard
of the weights, and gathers the other shards only to compute."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from services.compute.heads import Head, dummy_head, zero_loss
from services.compute.microbatch import MicroBatch, dummy_micro_batch, to_device
from services.engines.accumulating import PassLosses
from services.engines.base import HeldTensor, OptimizerOptions
from services.engines.collectives import max_over_ranks, stop_together
from services.engines.export import export_gathered
from services.engines.sharded import ShardedEngine
from services.models.experts import EXPERTS
from services.models.export import has_files_by_parts, tensors_sha256, write_config, write_model
from services.models.loading import Model, repeated_names, tied_names
from services.models.value_model import transformer_of
from services.models.weights import cast, write_weights
from services.storage.checkpoint import WeightShard

Output = TypeVar("Output")


class DataParallelEngine(ShardedEngine):
    """Base class of engines in which each rank of the default process group computes the whole model.

    Args:
        model: the model, whose weights may be partitioned over the ranks.
        device, kept, trained, optimizer: as in `ShardedEngine`.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        kept: Mapping[str, Tensor],
        trained: Sequence[str],
        optimizer: OptimizerOptions | None,
    ) -> None:
        super().__init__(device, kept, trained, optimizer)
        self._model = model
        self._tied_names = tied_names(model)
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Returns a context manager for a block of forward and backward passes. On exit, it frees the weights
        that the passes gathered from other ranks, so that no later pass computes with outdated ones. Collective."""

    @abstractmethod
    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        """Runs the forward pass of a micro-batch; returns the output of `head`. Collective."""

    def _run_dummy(self, micro_batch: MicroBatch) -> Tensor:
        """Runs the forward pass of a dummy micro-batch, so that this rank takes part in the collectives of ranks that
        run a real one; returns a scalar whose graph includes the model."""
        return self._read(micro_batch, dummy_head)

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Runs the backward pass of a micro-batch and adds its gradient to those of earlier micro-batches.
        Collective.

        Args:
            loss: loss of the micro-batch.
            is_last: whether this is the last micro-batch of the optimizer step.
        """
        loss.backward()

    @abstractmethod
    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the whole tensor of each of the given tensors, on every rank, one at a time.
        Collective.

        Args:
            tensors: tensors of the model, possibly partitioned, by name.
            dtype: type of floating-point tensors. Default: their own.
        """

    @torch.no_grad()
    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Output]:
        self.check_onloaded()
        outputs = []
        with self._computing():
            for micro_batch in self._pad_with_dummies(micro_batches):
                stop_together(should_stop())
                self.progressed()
                if micro_batch.is_dummy:
                    self._run_dummy(micro_batch)
                else:
                    outputs.append(self._read(micro_batch, head))
                    progress(len(outputs))
        return outputs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.check_onloaded()
        yield from self._gather(self._tensors())

    def weight_shards(self) -> Iterator[tuple[str, WeightShard]]:
        yield from super().weight_shards()
        for name, x in self._tensors().items():
            if not isinstance(x, nn.Parameter):
                yield name, WeightShard.of_whole(x)

    def export(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        self.check_onloaded()
        repeated = repeated_names(self._model)
        tensors = {name: x for name, x in self._tensors().items() if name not in repeated}
        write_companions = self._gather_companions()

        def write(partial: Path, gathered: Iterator[tuple[str, Tensor]]) -> str:
            sha256 = self._write(partial, tensors, gathered, dtype)
            write_companions(partial)
            return sha256

        return export_gathered(directory, self._gather(tensors, dtype), write, tokenizer, self.progressed)

    def _copies(self) -> Iterator[HeldTensor]:
        for name, buffer in self._model.named_buffers():
            yield HeldTensor(f"buffer.{name}", "whole", buffer, learns=False)

    def _tensors(self) -> dict[str, Tensor]:
        """Returns parameters and persistent buffers of the model, possibly partitioned, by name in the order of
        names."""
        return dict(sorted(self._model.state_dict(keep_vars=True).items()))

    def _shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Returns the shape of a whole tensor of the model, given its name and `tensor`, which may be this rank's
        shard of it. Default: the shape of `tensor`, which for a DTensor is that of the whole tensor."""
        return tuple(tensor.shape)

    def _gather_companions(self) -> Callable[[Path], None]:
        """Gathers further tensors for an export, such as LoRA adapters; returns a function that writes them to the
        directory it is given. Collective. Default: gathers and writes nothing."""
        return lambda directory: None

    def _write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        gathered: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype | None,
    ) -> str:
        """Writes tensors as a Hugging Face directory while they are gathered; returns one sha256 (hex) over all.

        Args:
            directory: existing directory.
            tensors: the tensors that `gathered` yields, possibly partitioned, by name.
            gathered: name and whole tensor of each, in the same order.
            dtype: type that `gathered` has cast floating-point tensors to, for the configuration; None if it has not.
        """
        if has_files_by_parts(self._model):
            sizes = {
                name: math.prod(self._shape(name, x)) * cast(x.new_empty(0), dtype).element_size()
                for name, x in tensors.items()
            }
            experts = EXPERTS.get(transformer_of(self._model).config.model_type)
            sha256 = write_weights(directory, sizes, gathered, experts)
        else:
            # transformers converts these tensors, and needs all of them at once.
            weights = {name: x.to("cpu", copy=True) for name, x in gathered}
            write_model(self._model, weights, directory)
            sha256 = tensors_sha256(weights.items())
        write_config(self._model, directory, dtype)
        return sha256

    def _pad_with_dummies(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Returns the micro-batches on the device, followed by dummies: in all as many as the rank with the most
        has, and at least 1. Collective.

        Forward passes gather weights from all ranks and backward passes reduce gradients, so all ranks must run the
        same number of passes.
        """
        missing = max(max_over_ranks(len(micro_batches)), 1) - len(micro_batches)
        return to_device([*micro_batches, *(dummy_micro_batch() for _ in range(missing))], self.device)

    def _run_passes(self, micro_batches: Sequence[MicroBatch], losses: PassLosses[Output]) -> None:
        padded = self._pad_with_dummies(micro_batches)
        with self._computing():
            for micro_batch in padded:
                self.progressed()
                if micro_batch.is_dummy:
                    loss = self._run_dummy(micro_batch) * 0
                else:
                    output = self._read(micro_batch, losses.head)
                    found = losses.loss_of(lambda output=output: output, micro_batch)
                    loss = zero_loss(output) if found is None else found
                self._backward(loss, is_last=losses.are_last and micro_batch is padded[-1])
