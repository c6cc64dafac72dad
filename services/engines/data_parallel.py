"""Base of the data-parallel engines: each rank computes the whole model on its own rows, keeps a shard of the weights,
and gathers the other shards only to compute."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from services.compute.heads import Head, dummy_head, zero_loss
from services.compute.microbatch import MicroBatch, dummy_micro_batch
from services.engines.agreement import all_or_none
from services.engines.base import LossFn, OptimizerOptions
from services.engines.collectives import max_over_ranks, stop_together
from services.engines.export import export_gathered
from services.engines.loss_accumulator import LossAccumulator
from services.engines.sharded import ShardedEngine
from services.models.export import stored_as_computed, tensors_sha256, write_config, write_model
from services.models.loading import Model, repeated_names
from services.models.weights import cast, write_weights

Output = TypeVar("Output")


class DataParallelEngine(ShardedEngine):
    """An engine on all ranks of the default process group, each of which computes the whole model.

    Args:
        model: the model.
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
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Context of forward and backward passes with the current weights. Its end frees gathered weights, so that no
        later pass computes with outdated ones. Collective."""

    @abstractmethod
    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        """Forward pass of the model; returns the output of `head`."""

    def _run_dummy(self, micro_batch: MicroBatch) -> Tensor:
        """Forward pass of a dummy micro-batch; returns a scalar with a graph."""
        return self._read(micro_batch, dummy_head)

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch to those before it.

        Args:
            is_last: whether it is the last micro-batch of the step.
        """
        loss.backward()

    @abstractmethod
    def _store_gradients(self) -> None:
        """Store the accumulated gradients in `.grad` of the shards."""

    @abstractmethod
    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the model, whole on every rank, one at a time. Collective.

        Args:
            dtype: type of floating-point tensors; default their own.
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
                stop_together(should_stop(), self.device)
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
            sha256 = self._write(partial, tensors, gathered, tokenizer, dtype)
            write_companions(partial)
            return sha256

        return export_gathered(directory, self._gather(tensors, dtype), write, self.device, self.progressed)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of the model, by name, in the order of names."""
        return dict(sorted(self._model.state_dict(keep_vars=True).items()))

    def _shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(tensor.shape)

    def _gather_companions(self) -> Callable[[Path], None]:
        """Gathers further contents of an export; returns the function that writes them to a directory. Collective."""
        return lambda directory: None

    def _write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        gathered: Iterator[tuple[str, Tensor]],
        tokenizer: PreTrainedTokenizerBase | None,
        dtype: torch.dtype | None,
    ) -> str:
        """Write tensors while they are gathered, as a Hugging Face directory; returns their sha256."""
        if stored_as_computed(self._model):
            sizes = {
                name: math.prod(self._shape(name, x)) * cast(x.new_empty(0), dtype).element_size()
                for name, x in tensors.items()
            }
            sha256 = write_weights(directory, sizes, gathered)
        else:
            # transformers converts these tensors, and needs all of them at once.
            weights = {name: x.to("cpu", copy=True) for name, x in gathered}
            write_model(self._model, weights, directory)
            sha256 = tensors_sha256(weights.items())
        write_config(self._model, directory, tokenizer, dtype)
        return sha256

    def _pad_with_dummies(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches on the device, padded with dummies to the largest number on any rank, at least 1.

        Forward passes gather weights from all ranks and backward passes reduce gradients, so all ranks run the same
        number of them.
        """
        missing = max(max_over_ranks(len(micro_batches), self.device), 1) - len(micro_batches)
        return [
            each.to(self.device) for each in (*micro_batches, *(dummy_micro_batch() for _ in range(missing)))
        ]

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        accumulator, padded = LossAccumulator(self.device), self._pad_with_dummies(micro_batches)
        failures: list[Exception] = []
        with self._computing():
            for micro_batch in padded:
                self.progressed()
                if micro_batch.is_dummy:
                    loss, stats = self._run_dummy(micro_batch) * 0, {}
                else:
                    output = self._read(micro_batch, head)
                    try:
                        loss, stats = loss_fn(output, micro_batch)
                    except Exception as error:  # noqa: BLE001 - raised after the backward pass, which other ranks join
                        failures.append(error)
                        loss, stats = zero_loss(output), {}
                self._backward(loss, is_last=micro_batch is padded[-1])
                accumulator.add(loss, stats)
        with all_or_none("the loss", self.device):
            for error in failures:
                raise error
        self._store_gradients()
        return accumulator.total()
