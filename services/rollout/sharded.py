"""Decoding with a model that is sharded over the generation mesh pg-tg-dg-d, on ranks that train on the mesh p-t-d
(HybridFlow paper, section 5, 3D-HybridEngine), or on ranks that only generate, on a mesh of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

from nccl_transfer.refs.mesh import Mesh
from services.engines.base import HeldTensor
from services.engines.collectives import max_over_ranks
from services.engines.generation_shards import GenerationShards
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.stage import ModelStage
from services.models.positions import max_positions
from services.rollout.base import SamplingOptions, check_names
from services.rollout.decoder import Decoder
from services.runtime.process_groups import own_group


class ShardedDecoder(Decoder):
    """Decoder on a model that is sharded over the ranks of a generation replica by pipeline and tensor parallelism.
    These ranks decode the same rows and must make the same calls. Construction is collective over all ranks of the
    default process group.

    Args:
        directory: Hugging Face directory of the model.
        mesh: Training and generation mesh.
        shards: The shards of the training engine of these ranks. If they have permanent memory, this model's weights
            are views of it. None for ranks without a training engine: weights have memory of their own.
        dtype: Type of weights and activations.
        device: Device of this rank.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        shards: GenerationShards | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device, self._dtype = device, dtype
        size = mesh.replica_size
        # In generation, ranks are in the usual order.
        self._groups = MeshGroups(Mesh(mesh.generation_pipeline, mesh.generation_tensor, mesh.replicas))
        self._replica = own_group([range(first, first + size) for first in range(0, mesh.size, size)])
        self.ranks_together = size
        self._stage = ModelStage(
            directory,
            self._groups,
            device=device,
            dtype=dtype,
            layouts=shards.layouts if shards is not None else None,
        )
        self._stage.allocate(shards.generation_memory() if shards is not None else None)
        self._shards = shards
        # Gathering weights again takes less time than a copy in host memory.
        self.keeps_weights = shards is None or shards.in_place
        for parameter in self._stage.parameters.values():
            parameter.requires_grad_(False)
            if shards is None:
                parameter.zero_()  # padding has no other values
        self.max_positions = max_positions(self._stage.config)

    def new_cache(self) -> DynamicCache:
        return self._stage.new_cache()

    def forward(self, ids_BT: Tensor, cache: DynamicCache, positions: Mapping[str, Tensor]) -> Tensor:
        """Runs the model as `Decoder.forward`; returns the logits [B, V] on the last pipeline stage, and an empty
        tensor [B, 0] on earlier stages. Collective over the replica."""
        groups, incoming = self._groups, ids_BT
        if not groups.is_first_stage:
            shape = (*ids_BT.shape, self._stage.config.hidden_size)
            incoming = torch.empty(shape, dtype=self._dtype, device=self.device)
            dist.recv(incoming, group=groups.pipeline, group_src=groups.stage - 1)
        hidden_BTH = self._stage.decode(incoming, cache, positions)
        if groups.is_last_stage:
            return self._stage.next_logits(hidden_BTH)
        dist.send(hidden_BTH.contiguous(), group=groups.pipeline, group_dst=groups.stage + 1)
        return hidden_BTH.new_empty((len(ids_BT), 0))

    def choose(
        self,
        logits_BV: Tensor,
        sampling: SamplingOptions,
        uniforms_B: Tensor,
        context_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses tokens, as `Decoder.choose`, on the last pipeline stage, which sends them to the others. Collective
        over the pipeline; `logits_BV` is read on the last stage alone."""
        groups = self._groups
        if groups.mesh.pipeline == 1:
            return super().choose(logits_BV, sampling, uniforms_B, context_BT)
        tokens_B = torch.empty(len(uniforms_B), dtype=torch.int64, device=self.device)
        log_probs_B = torch.empty(len(uniforms_B), dtype=torch.float32, device=self.device)
        if groups.is_last_stage:
            tokens_B, log_probs_B = super().choose(logits_BV, sampling, uniforms_B, context_BT)
        for drawn in (tokens_B, log_probs_B):
            dist.broadcast(drawn, group=groups.pipeline, group_src=groups.mesh.pipeline - 1)
        return tokens_B, log_probs_B

    def agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        if self._replica.size() == 1:
            return should_stop

        return lambda: bool(max_over_ranks(should_stop(), self._replica))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces this rank's generation shards. Tensors are not copied: each becomes the memory of its parameter.
        Raises ValueError if a name is not a parameter of this rank, or one is missing."""
        if not self.keeps_weights:
            self._drop_weights()
        came = set()
        for name, tensor in weights:
            came.add(name)
            if name in self._stage.parameters:
                self._stage.parameters[name].data = tensor
        check_names(came, self._stage.parameters.keys())

    def weight_memory(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._stage.parameters.items()}

    def held(self) -> Iterator[HeldTensor]:
        place = f"stage {self._groups.stage}, part {self._groups.tensor_index}"
        for name, parameter in self._stage.parameters.items():
            yield HeldTensor(f"generation.{name}", place, parameter.detach(), learns=True)

    def sleep(self, *, keep_weights: bool = True) -> int:
        """Frees the gathered weights and returns their bytes; does nothing and returns 0 if the weights are views of
        permanent buffers, which belong to the training engine. Without a training engine, moves them to host memory,
        unless they are on a CPU. `keep_weights` changes nothing: what is gathered is never kept, and the rest is."""
        if self._shards is None and self.device.type != "cpu":
            return self._leave_device(self._stage.parameters.values())
        if self.keeps_weights:
            return 0
        held = self._held_bytes()
        self._drop_weights()
        torch.cuda.empty_cache()
        return held - self._held_bytes()

    def wake(self) -> int:
        """Brings weights back from host memory. Does nothing and returns 0 with a training engine, whose weights
        `load_weights` brings."""
        return self._return_to_device()

    def _drop_weights(self) -> None:
        """Replaces the generation shards of this rank by placeholders of the same shapes that take no memory."""
        assert self._shards is not None, "weights that are not gathered are kept"
        memory = self._shards.generation_memory()
        for name, parameter in self._stage.parameters.items():
            parameter.data = memory(name)

    def _held_bytes(self) -> int:
        """Returns the bytes of the storages of this rank's weights, shared ones counted once."""
        storages = [parameter.untyped_storage() for parameter in self._stage.parameters.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
