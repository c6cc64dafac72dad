"""Training engine with 3D parallelism: pipeline, tensor and data parallelism (3DParallelWorker of the HybridFlow
paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import ConfigError
from services.compute import matmul
from services.compute.heads import Head, dummy_head
from services.compute.microbatch import MicroBatch, to_device
from services.engines.accumulating import PassLosses
from services.engines.base import EngineSetup, HeldTensor, OptimizerOptions
from services.engines.collectives import max_over_ranks, stop_together
from services.engines.export import export_gathered
from services.engines.implementation import compute_dtype
from services.engines.sharded import ShardedEngine, held_shard
from services.engines.three_d.gather_groups import Kind
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.pipeline import run_forward, run_forward_backward
from services.engines.three_d.stage import ModelStage
from services.engines.three_d.transition import Transition
from services.engines.three_d.weight_sharding import FullySharded, Replicated, WeightSharding
from services.models.families import load_causal_lm, load_value_model
from services.storage.checkpoint import WeightShard
from settings.actor import ActorTable
from settings.model import ModelTable

Output = TypeVar("Output")

CACHED_TOKENS = 2048
"""Tokens of a micro-batch up to which activations stay in a CPU's caches, with oneDNN. With MKL the largest possible
micro-batch is the fastest (by 5 % on an Intel Xeon)."""

ROUND_PER_STAGE = 4
"""Micro-batches per stage between two checks of `should_stop`. The pipeline empties at each check, which costs at
most a fifth of the time."""


class ThreeDParallelEngine(ShardedEngine):
    """Training engine on a mesh of p pipeline stages, t tensor-parallel and d data-parallel ranks, over the default
    process group (gloo for CPU, nccl for CUDA). Construction is collective.

    Each rank keeps a tensor-parallel shard of one stage's weights. Data-parallel ranks replicate it and sum its
    gradients after all micro-batches, or each keep a shard of it. Hidden states are the same on all ranks of a tensor
    group, and no rank has the logits of the whole vocabulary.

    Args:
        directory: Hugging Face directory of the model, from which each rank reads its shards.
        mesh: The mesh.
        device: Device of this rank; the current device, if CUDA.
        dtype: Type of weights and activations. Trained weights of fewer than 32 bits are rounded copies of float32
            masters, which have gradients and moments (Micikevicius et al. 2018, "Mixed Precision Training").
        optimizer: Options of AdamW; None for a model that is not trained.
        with_value_head: Whether the model is a value model.
        transition: How generation weights are gathered from training weights; None if the model does not generate.
        generates_in_place: Whether training weights are views of the generation weights' memory; if not,
            `rollout_weights` copies them. Only with a transition "hybridflow".
        activation_checkpointing: Whether a layer saves only its input, and is recomputed in the backward pass.
        shards_over_data: Whether data ranks shard weights, gradients and moments (FSDP2); not with generates_in_place.

    Attributes:
        transition: The object that gathers generation weights; None for a model that does not generate.

    Raises:
        ValueError: The model is of another kind, does not divide over the mesh, or cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerOptions | None = None,
        with_value_head: bool = False,
        transition: Kind | None = None,
        generates_in_place: bool = True,
        activation_checkpointing: bool = False,
        shards_over_data: bool = False,
    ) -> None:
        self._kept_dtype = learns_in = torch.promote_types(dtype, torch.float32) if optimizer else dtype
        self._groups = MeshGroups(mesh)
        self._stage = ModelStage(
            directory,
            self._groups,
            device=device,
            dtype=dtype,
            with_value_head=with_value_head,
            activation_checkpointing=activation_checkpointing,
        )
        layouts = self._stage.layouts
        self.generation_shards = self.transition = (
            Transition(layouts, mesh, transition, dtype=dtype, device=device, in_place=generates_in_place)
            if transition is not None
            else None
        )
        memory = self.transition.training_memory() if self.transition and generates_in_place else None
        assert not (memory and shards_over_data), "shards over data ranks are not in generation memory"
        self.data_rank, self.data_size = self._groups.data_index, mesh.data
        self.sees_outputs, self.packs = self._groups.is_last_stage, True
        self._counts_loss = self.sees_outputs and self._groups.tensor_index == 0
        # With sharding over data ranks each micro-batch gathers weights, so fewer micro-batches are faster.
        is_cached = device.type == "cpu" and not shards_over_data and matmul.backend() == "onednn"
        self.cached_tokens = CACHED_TOKENS if is_cached else None
        self.config = self._stage.config
        self.num_parameters = sum(torch.Size(layout.shape).numel() for layout in layouts.values())
        self._hidden_template = torch.empty((0, self.config.hidden_size), dtype=dtype, device=device)
        self._sharding: WeightSharding = (
            FullySharded(self._stage, self._groups, learns_in)
            if shards_over_data
            else Replicated(self._stage, self._groups, learns_in, memory=memory)
        )
        self._stage.module.register_forward_hook(lambda *_: self.progressed())
        self._tied_names = {first: [name] for name, first in self._stage.aliases.items()}
        kept = self._sharding.kept
        super().__init__(device, kept, list(kept), optimizer)

    @classmethod
    def create(cls, table: ModelTable, options: Any, setup: EngineSetup) -> Self:
        if setup.load not in (load_causal_lm, load_value_model):
            raise ConfigError(
                "engine 3d: has causal language models and value models alone, and the service's model is of another "
                "kind; use engine fsdp or zero"
            )
        return cls(
            table.model,
            setup.mesh,
            setup.device,
            dtype=compute_dtype(table),
            optimizer=setup.optimizer,
            with_value_head=setup.load is load_value_model,
            transition=_transition(table),
            generates_in_place=_generates_in_place(table),
            activation_checkpointing=table.activation_checkpointing,
            shards_over_data=table.shards_over_data,
        )

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
        num_stages = self._groups.mesh.pipeline
        per_round = 1 if num_stages == 1 else ROUND_PER_STAGE * num_stages
        padded = self._sharding.padded(micro_batches)
        outputs, num_done = [], 0

        def read(raw: Any, micro_batch: MicroBatch) -> Output | Tensor:
            return (dummy_head if micro_batch.is_dummy else head)(raw, micro_batch)

        with self._sharding.computing():
            for first in range(0, max_over_ranks(len(padded)), per_round):
                stop_together(should_stop())
                ours = to_device(padded[first : first + per_round], self.device)
                results = run_forward(self._stage, self._groups, ours, read, self._hidden_template)
                for micro_batch, output in zip(ours, results, strict=True):
                    if micro_batch.is_dummy:
                        continue
                    num_done += 1
                    progress(num_done)
                    if self.sees_outputs:
                        outputs.append(output)
        return outputs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.check_onloaded()
        names = [*self._stage.layouts, *self._stage.aliases]
        yield from self._gather(self._sharding.weights, names, self._stage.dtype)

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.check_onloaded()
        if self.transition is None:
            return self.full_tensors()
        return self.transition.gather(self._sharding.parts(self._sharding.weights, self._stage.dtype))

    @torch.no_grad()
    def export(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        self.check_onloaded()
        kept = self._gather(self._sharding.kept, self._stage.layouts, self._kept_dtype)
        write = partial(self._stage.write, dtype=dtype or self._kept_dtype)
        return export_gathered(directory, kept, write, tokenizer, self.progressed)

    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        self._stage.load(weights)

    def _run_passes(self, micro_batches: Sequence[MicroBatch], losses: PassLosses[Output]) -> None:
        def loss_head(raw: Any, micro_batch: MicroBatch) -> Tensor:
            loss = None
            if not micro_batch.is_dummy:
                loss = losses.loss_of(lambda: losses.head(raw, micro_batch), micro_batch)
            return dummy_head(raw, micro_batch) * 0 if loss is None else loss

        padded = to_device(self._sharding.padded(micro_batches), self.device)
        with self._sharding.computing():
            run_forward_backward(self._stage, self._groups, padded, loss_head, self._hidden_template)

    @torch.no_grad()
    def _store_gradients(self) -> None:
        """Sums the gradient of each weight over all ranks that computed a part of it. Collective."""
        self._sharding.sum_gradients()
        tied = set(self._stage.aliases.values())
        for name, x in self._kept.items():
            if self._stage.layouts[name].partial_gradient:
                dist.all_reduce(x.grad, group=self._groups.tensor)
            if name in tied:
                dist.all_reduce(x.grad, group=self._groups.ends)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._sharding.drop_gradients()

    def _weights_changed(self) -> None:
        self._sharding.weights_changed()

    def _copies(self) -> Iterator[HeldTensor]:
        for name, weight in self._sharding.weights.items():
            if weight is not self._sharding.kept[name]:
                yield held_shard(f"copy.{name}", self._shard(name, weight.detach()), learns=True)
        # Each stage numbers its layers anew, and a tensor rank may have buffers of its own part alone.
        place = f"stage {self._groups.stage}, part {self._groups.tensor_index}"
        for name, buffer in self._stage.module.named_buffers():
            yield HeldTensor(f"buffer.{name}", place, buffer, learns=False)

    def _resident(self) -> list[Tensor]:
        # With masters, the model computes with other tensors.
        computing = [x.detach() for x in self._sharding.weights.values()]
        return [*super()._resident(), *computing, *(self.transition.resident() if self.transition else ())]

    def _shard(self, name: str, kept: Tensor) -> WeightShard:
        return self._stage.shard(name, kept, self._sharding.first_row(name))

    def _is_primary(self, name: str) -> bool:
        return self._sharding.is_primary and not self._stage.is_replica(name)

    def _gather(
        self, kept: Mapping[str, Tensor], names: Iterable[str], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the whole tensor of each of the given names, on every rank, in the order of names.
        Collective.

        Args:
            kept: this rank's tensors with the layout of the weights, by name.
            names: names of the tensors to gather; names of tied tensors may be further ones.
            dtype: type of the gathered tensors: that of `kept`, or with sharding over data ranks also a coarser one.
        """
        groups, parts = self._groups, self._sharding.parts(kept, dtype)
        for name in sorted(names):
            first_name = self._stage.aliases.get(name, name)
            layout = self._stage.layouts[first_name]
            gathered = self._hidden_template.new_empty(layout.gathered_shape, dtype=dtype)
            if layout.stage == groups.stage:
                own = parts[first_name].detach()
                if layout.is_cut:
                    dist.all_gather(list(gathered.chunk(layout.parts)), own, group=groups.tensor)
                else:
                    gathered.copy_(own)
            if groups.mesh.pipeline > 1:
                dist.broadcast(gathered, group=groups.pipeline, group_src=layout.stage)
            yield name, layout.whole(gathered)


def _transition(table: ModelTable) -> Kind | None:
    """Returns the key `transition` of an actor's table if its rollout engine takes generation shards; None for a
    rollout engine that takes whole weights or generates nothing, and for every other service."""
    if isinstance(table, ActorTable) and table.generates and table.rollout_spec.takes_shards:
        return table.transition
    return None


def _generates_in_place(table: ModelTable) -> bool:
    """Returns whether the rollout engine of a table generates with memory of which training weights are views. False
    if the table is not an actor's."""
    return (
        isinstance(table, ActorTable)
        and table.rollout_spec.in_training_memory
        and table.transition == "hybridflow"
        and not table.shards_over_data
    )
