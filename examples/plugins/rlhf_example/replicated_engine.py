"""A training engine in which every rank keeps the whole model, and ranks sum their gradients before each step: data
parallelism without sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.compute.heads import Head
from services.compute.microbatch import MicroBatch
from services.engines.base import EngineSetup, OptimizerOptions
from services.engines.data_parallel import DataParallelEngine
from services.engines.implementation import compute_dtype, kept_dtype
from services.models.loading import Load, load_on_meta, materialize, read_first_values, read_parts
from services.models.value_model import transformer_of
from services.models.weights import cast
from services.storage.checkpoint import WeightShard
from settings.engines import NoEngineOptions
from settings.model import ModelTable

Output = TypeVar("Output")


class ReplicatedEngine(DataParallelEngine):
    """Training engine with replicated weights, for any model that transformers loads."""

    def __init__(
        self,
        directory: Path,
        load: Load,
        device: torch.device,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        optimizer: OptimizerOptions | None,
    ) -> None:
        model = load_on_meta(load, directory, dtype)
        empty = {name: WeightShard.of_whole(x.detach()) for name, x in materialize(model, device)}
        read_parts(directory, empty.items())
        self._directory, self._load, self._dtype, self._compute_dtype = directory, load, dtype, compute_dtype
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.config = transformer_of(model).config
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters.values())
        # AdamW updates these in place; they share the memory of the model's parameters.
        kept = {name: parameter.detach() for name, parameter in self._parameters.items()}
        super().__init__(model, device, kept, list(kept), optimizer)

    @classmethod
    def create(cls, table: ModelTable, options: NoEngineOptions, setup: EngineSetup) -> Self:
        return cls(
            table.model,
            setup.load,
            setup.device,
            dtype=kept_dtype(table, setup.optimizer),
            compute_dtype=compute_dtype(table),
            optimizer=setup.optimizer,
        )

    def _computing(self) -> AbstractContextManager[Any]:
        # Weights in float32 are rounded for the products of a coarser type, each once in this block.
        is_coarser = self._compute_dtype != self._dtype
        return torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=is_coarser)

    def _read(self, micro_batch: MicroBatch, head: Head[Output]) -> Output:
        model: Any = self._model
        output = model(
            input_ids=micro_batch.input_ids_BT, use_cache=False, logits_to_keep=micro_batch.num_scored
        )
        # A value model returns the values themselves.
        return head(output if isinstance(output, Tensor) else output.logits, micro_batch)

    @torch.no_grad()
    def _store_gradients(self) -> None:
        """Sums gradients in the order of the ranks, so that the bits do not depend on the backend's algorithm."""
        for name in self._trained_names:
            gradient = self._parameters[name].grad
            own = torch.zeros_like(self._kept[name]) if gradient is None else gradient
            of_ranks = [torch.empty_like(own) for _ in range(self.data_size)]
            dist.all_gather(of_ranks, own)
            total = of_ranks[0]
            for other in of_ranks[1:]:
                total += other
            self._kept[name].grad = total

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield name, cast(tensor.detach(), dtype)

    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        return WeightShard.of_whole(kept)

    def _is_primary(self, name: str) -> bool:
        return self.data_rank == 0

    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        read_first_values(self._load, self._directory, self._dtype, weights.items())
