"""3D-parallel training (3DParallelWorker of the HybridFlow paper): pipeline stages, tensor parallelism, replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nccl_transfer.mesh import Mesh
from services.engines.agreement import all_or_none, new_directory
from services.engines.base import LossFn, OptimizerOptions
from services.engines.checkpoint import Shard
from services.engines.groups import MeshGroups
from services.engines.heads import Head
from services.engines.layout import Layout
from services.engines.microbatch import MicroBatch
from services.engines.pipeline import run_forward, run_forward_backward
from services.engines.sharded import ShardedEngine
from services.engines.stage import ModelStage
from services.engines.transition import Kind, Transition
from services.engines.weights import write_weights

Output = TypeVar("Output")

ROUND_PER_STAGE = 4
"""Micro-batches per stage that an inference runs before it asks whether to stop: a pipeline drains at each stop, so
that a fifth of the time is lost at most."""


class ThreeDParallelEngine(ShardedEngine):
    """A model on a p-t-d mesh of all ranks of the default process group (gloo for CPU, nccl for CUDA).

    Each rank keeps its part of one stage's weights, in place, the same on all data ranks; their gradients are summed
    when all micro-batches are done. Hidden states are the same on all ranks of a tensor group, and no rank has the
    logits of the whole vocabulary.

    Args:
        directory: Hugging Face directory; each rank reads its own part.
        mesh: p-t-d.
        device: Where this rank computes; the current device, if CUDA.
        dtype: Of the weights and of what is computed. Weights of less than 32 bits that learn are rounded copies of
            float32 ones, which have the gradients and moments (Micikevicius et al. 2018, "Mixed Precision Training").
        optimizer: None for a model that is never trained.
        with_value_head: Whether it is a value model.
        transition: How ranks come by the weights that they generate with, on the mesh's generation part; None for a
            model that does not generate.
        generates_in_place: Whether the weights of training are a part of those of generation, in memory; else
            `rollout_weights` copies. For `hybridflow` only.

    Attributes:
        transition: As above.
        layouts: Of all tensors.
        activation_checkpointing: Whether layers compute again in the backward pass, and keep their input alone.

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
    ) -> None:
        self._groups = MeshGroups(mesh)
        self.transition: Transition | None = None

        def make_transition(layouts: Mapping[str, Layout]) -> Transition:
            assert transition is not None
            self.transition = Transition(
                layouts, mesh, transition, dtype=dtype, device=device, in_place=generates_in_place
            )
            return self.transition

        self._stage = ModelStage(
            directory,
            self._groups,
            device=device,
            dtype=dtype,
            with_value_head=with_value_head,
            memory=(lambda layouts: make_transition(layouts).training_memory())
            if transition and generates_in_place
            else None,
            activation_checkpointing=activation_checkpointing,
        )
        if transition and not generates_in_place:
            make_transition(self._stage.layouts)
        self.data_rank, self.data_size = self._groups.data_index, mesh.data
        self.sees_outputs, self.packs = self._groups.is_last_stage, True
        self.config = self._stage.config
        self.num_parameters = sum(torch.Size(layout.shape).numel() for layout in self._stage.layouts.values())
        self._like_hidden = torch.empty((0, self.config.hidden_size), dtype=dtype, device=device)
        self._parameters = self._stage.parameters
        kept: Mapping[str, Tensor] = self._parameters
        if optimizer is not None and dtype.itemsize < torch.float32.itemsize:
            kept = _masters(self._parameters)
        self._stage.load(kept)
        super().__init__(device, kept, list(kept), optimizer)
        self._weights_changed()

    @torch.no_grad()
    def infer(
        self,
        micro_batches: Sequence[MicroBatch],
        head: Head[Output],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Output]:
        self._check_onloaded()
        num_stages = self._groups.mesh.pipeline
        per_round = 1 if num_stages == 1 else ROUND_PER_STAGE * num_stages
        outputs, num_done = [], 0
        for first in range(0, self._most(len(micro_batches)), per_round):
            self._stop_together(should_stop())
            ours = [each.to(self.device) for each in micro_batches[first : first + per_round]]
            hidden = run_forward(self._stage, self._groups, ours, self._like_hidden)
            for micro_batch, hidden_BTH in zip(ours, hidden, strict=True):
                if self.sees_outputs:
                    outputs.append(head(self._stage.read(hidden_BTH, micro_batch), micro_batch))
                num_done += 1
                progress(num_done)
        return outputs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._gather(self._parameters, [*self._stage.layouts, *self._stage.aliases])

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.transition is None:
            return self.full_tensors()
        return self.transition.gather(self._parameters)

    def export(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        with new_directory(directory, self.device) as partial:
            sha256 = self._write(partial, tokenizer) if dist.get_rank() == 0 else self._only_gather()
        return self._from_rank_0(sha256)

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], head: Head[Output], loss_fn: LossFn[Output]
    ) -> tuple[float, dict[str, Tensor]]:
        ours = [each.to(self.device) for each in micro_batches]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        stats: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=self.device)
        )
        failures: list[Exception] = []

        def loss_of(hidden_BTH: Tensor, number: int) -> Tensor:
            if number < len(ours) and not failures:
                try:
                    raw = self._stage.read(hidden_BTH, ours[number])
                    loss, counts = loss_fn(head(raw, ours[number]), ours[number])
                except Exception as error:  # noqa: BLE001 - raised below: the other stages wait for this gradient
                    failures.append(error)
                else:
                    for name, count in counts.items():
                        stats[name] += count
                    total.add_(loss.detach())
                    return loss
            return hidden_BTH.sum() * 0

        run_forward_backward(self._stage, self._groups, ours, loss_of, self._like_hidden)
        with all_or_none("the loss", self.device):
            for error in failures:
                raise error
        self._sum_gradients()
        if not self.sees_outputs or self._groups.tensor_index > 0:
            total.zero_()
        dist.all_reduce(total)
        return float(total), stats

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add up the gradients of all ranks that keep the same weight and saw different parts of its gradient."""
        tied = set(self._stage.aliases.values())
        for name, parameter in self._kept.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._stage.layouts[name].partial_gradient:
                dist.all_reduce(parameter.grad, group=self._groups.tensor)
            if name in tied:
                dist.all_reduce(parameter.grad, group=self._groups.ends)
        if self.data_size > 1:
            gradients = [parameter.grad for parameter in self._kept.values()]
            for work in [dist.all_reduce(x, group=self._groups.data, async_op=True) for x in gradients]:
                assert work is not None
                work.wait()

    @torch.no_grad()
    def _weights_changed(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not self._kept[name]:
                parameter.copy_(self._kept[name])

    def _resident(self) -> list[Tensor]:
        # With masters, the weights that are computed with are others.
        computing = [parameter.detach() for parameter in self._parameters.values()]
        return [*super()._resident(), *computing, *(self.transition.resident() if self.transition else ())]

    def _shard(self, name: str, kept: Tensor) -> Shard:
        return self._stage.layouts[name].shard(kept, self._groups.tensor_index)

    def _counts(self, name: str) -> bool:
        return not self._stage.is_replica(name)

    def _gather(self, kept: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that lie as the weights, whole on every rank, one at a time in the order of names. Collective."""
        groups = self._groups
        for name in sorted(names):
            first_name = self._stage.aliases.get(name, name)
            layout = self._stage.layouts[first_name]
            gathered = self._like_hidden.new_empty(layout.gathered_shape)
            if layout.stage == groups.stage:
                own = kept[first_name].detach()
                if layout.is_cut:
                    dist.all_gather(list(gathered.chunk(layout.parts)), own, group=groups.tensor)
                else:
                    gathered.copy_(own)
            if groups.mesh.pipeline > 1:
                dist.broadcast(gathered, group=groups.pipeline, group_src=layout.stage)
            yield name, layout.whole(gathered)

    def _only_gather(self) -> str:
        for _ in self._gather(self._parameters, self._stage.layouts):
            pass
        return ""

    @torch.no_grad()
    def _write(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None) -> str:
        """Gather the weights and write them as a Hugging Face directory; returns their sha256."""
        layouts, bytes_each = self._stage.layouts, self._like_hidden.element_size()
        sizes = {name: torch.Size(each.shape).numel() * bytes_each for name, each in layouts.items()}
        sha256 = write_weights(directory, sizes, self._gather(self._parameters, layouts))
        self._stage.write_config(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        return sha256


def _masters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 tensors like them, to which the gradients of each backward pass are moved and added."""
    masters = {name: torch.empty_like(x, dtype=torch.float32) for name, x in parameters.items()}

    def mover(master: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        return move

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(mover(masters[name]))
    return masters
