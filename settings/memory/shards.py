"""Elements of the weights that one rank keeps, by engine and mesh, as the engines' layouts give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

from settings.memory.shape import VOCABULARY_MULTIPLE, Cut, LayerKind, ModelShape, WeightSize
from settings.memory.use import AdapterSize, ModelUse, RolloutUse

ZERO_ALIGNMENT = 2
"""Elements per rank that DeepSpeed's stages 1 and 2 align the flattened weights to (`nccl_start_alignment_factor` in
deepspeed/runtime/zero/stage_1_and_2.py)."""


def stage_weights(use: ModelUse, stage: int) -> Iterator[tuple[int, WeightSize]]:
    """Yields the weights of a pipeline stage, each with the number of times it is there: a layer's once per layer. A
    tied embedding is on the first and on the last stage."""
    shape, num_stages = use.shape, use.mesh[0]
    if stage == 0 or (shape.shares_embedding and stage == num_stages - 1):
        yield 1, shape.embedding
    for kind in shape.layer_kinds:
        yield from ((len(kind.numbers) // num_stages, weight) for weight in kind.weights)
    if stage == num_stages - 1:
        yield from ((1, weight) for weight in shape.end)


def stage_layers(use: ModelUse, stage: int) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer of a pipeline stage, in order."""
    count = use.shape.layers // use.mesh[0]
    return use.shape.kinds[stage * count : (stage + 1) * count]


@lru_cache(maxsize=1024)
def kept_numel(use: ModelUse, stage: int) -> int:
    """Returns the elements of the model's own weights that a rank of a pipeline stage keeps, padding included. Data
    ranks may have fewer real ones: this is the first."""
    weights = stage_weights(use, stage)
    match use.engine:
        case "whole":
            return use.shape.num_parameters
        case "3d":
            return sum(times * tensor_numel(use, weight) for times, weight in weights)
        case "fsdp":
            return sum(times * sharded_rows(weight.shape, use.ranks) for times, weight in weights)
        case _:
            return zero_numel(use)


def tensor_numel(use: ModelUse, weight: WeightSize) -> int:
    """Returns the elements of a weight that a rank of engine 3d keeps: its part of t, of which data ranks may keep a
    share each."""
    _, tensor, data = use.mesh
    kept = cut_shape(weight, tensor)
    return sharded_rows(kept, data) if use.shards_over_data else math.prod(kept)


def cut_shape(weight: WeightSize, parts: int) -> tuple[int, ...]:
    """Returns the shape of one of `parts` tensor-parallel parts of a weight, as `services.storage.layout.Layout` keeps
    it: transposed where inputs are cut, with padding where tokens are."""
    match weight.cut:
        case Cut.OUTPUTS:
            return (weight.shape[0] // parts, *weight.shape[1:])
        case Cut.INPUTS:
            return (weight.shape[1] // parts, weight.shape[0])
        case Cut.TOKENS:
            multiple = math.lcm(VOCABULARY_MULTIPLE, parts)
            return (-(-weight.shape[0] // multiple) * multiple // parts, *weight.shape[1:])
        case Cut.WHOLE:
            return weight.shape


def sharded_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Returns the elements of FSDP2's shard of a tensor: 1/ranks of its rows, rounded up (`torch.chunk`); ranks that
    have fewer rows are padded to as many."""
    rows, *rest = shape
    return -(-rows // ranks) * math.prod(rest)


def zero_numel(use: ModelUse) -> int:
    """Returns the elements of a rank's ZeRO partition: of all weights flattened together at stages 1 and 2, of each
    weight at stage 3; of all at stages 1 and 2 for a model that is not trained."""
    shape, ranks = use.shape, use.ranks
    if use.zero_stage == 3:
        return sum(times * -(-weight.numel // ranks) for times, weight in stage_weights(use, 0))
    return zero_flat_numel(use) // ranks if use.learns else shape.num_parameters


def zero_flat_numel(use: ModelUse) -> int:
    """Returns the elements of the flattened weights at ZeRO stages 1 and 2, padding included."""
    multiple = ZERO_ALIGNMENT * use.ranks
    return -(-use.shape.num_parameters // multiple) * multiple


def generation_numel(use: ModelUse, stage: int) -> int:
    """Returns the elements of the weights that a rank of training stage `stage` generates with: the whole model, or
    1/(pg tg) of it on a generation mesh; without a mesh of training, those of the generation stage with most.

    With engine 3d the vocabulary has the padding of the training mesh, and where ranks of a rollout service share the
    model that of their own.
    """
    rollout = use.rollout_engine
    pipeline, tensor, _ = use.mesh
    if use.engine == "3d" or (use.engine == "none" and rollout.is_shared):
        return _generated_numel(use.shape, rollout, stage // (pipeline // rollout.pipeline), tensor)
    if not rollout.is_shared:
        return use.shape.num_parameters
    stages = range(rollout.pipeline)
    return max(_generated_numel(use.shape, rollout, own, rollout.tensor) for own in stages)


def _generated_numel(shape: ModelShape, rollout: RolloutUse, stage: int, trained: int) -> int:
    """Returns the elements of the generation shard of a rank of generation stage `stage`, each of whose parts consists
    of parts of `trained` tensor ranks."""
    is_first, is_last = stage == 0, stage == rollout.pipeline - 1
    numel = sum(
        len(kind.numbers) // rollout.pipeline * _merged_numel(kind.weights, trained, rollout.tensor)
        for kind in shape.layer_kinds
    )
    if is_first or (shape.shares_embedding and is_last):
        numel += _merged_numel((shape.embedding,), trained, rollout.tensor)
    return numel + (_merged_numel(shape.end, trained, rollout.tensor) if is_last else 0)


def _merged_numel(weights: Iterable[WeightSize], trained: int, generated: int) -> int:
    """Returns the elements of one of `generated` parts of weights, each of which consists of trained / generated of
    the `trained` parts."""
    return sum(
        math.prod(cut_shape(weight, trained)) * (trained // generated if weight.cut is not Cut.WHOLE else 1)
        for weight in weights
    )


def adapter_weights(layer: LayerKind, adapters: AdapterSize) -> list[WeightSize]:
    """Returns the two weights of each adapter of one layer: A [rank, inputs] and B [outputs, rank]. Experts and routers
    are no linear layers."""
    found = []
    for weight in layer.weights:
        module = weight.name.removesuffix(".weight")
        is_linear = weight.name.endswith(("_proj.weight", "shared_expert_gate.weight"))
        if is_linear and (not adapters.targets or module.endswith(adapters.targets)):
            outputs, inputs = weight.shape
            found += [
                WeightSize(f"{module}.lora_A", (adapters.rank, inputs)),
                WeightSize(f"{module}.lora_B", (outputs, adapters.rank)),
            ]
    return found


@lru_cache(maxsize=1024)
def trained_numel(use: ModelUse, stage: int) -> int:
    """Returns the elements of the trained weights that a rank keeps: all of `kept_numel`, the adapters where there are
    any, or 0 for a model that is not trained."""
    if not use.learns:
        return 0
    if use.adapters is None:
        return kept_numel(use, stage)
    return sum(
        len(kind.numbers) * sharded_rows(weight.shape, use.ranks)
        for kind in use.shape.layer_kinds
        for weight in adapter_weights(kind, use.adapters)
    )
