"""Memory of an optimizer step beside what a rank always holds: the moments at which it is highest, each with its
components. The step needs as much as its largest moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from settings.memory import activations as acts
from settings.memory.activations import TokenCounts
from settings.memory.shape import WeightSize
from settings.memory.shards import (
    adapter_weights,
    cut_shape,
    sharded_rows,
    stage_layers,
    stage_weights,
    tensor_numel,
    trained_numel,
    zero_flat_numel,
)
from settings.memory.use import FLOAT32, ModelUse

BUCKET_NUMEL = 1 << 24
"""Most elements of DeepSpeed's buckets (`services.engines.zero.partitions`)."""
BUCKET_BYTES, BUCKETS_UNDER_WAY = 4 << 20, 8
"""Size of the buckets of engine 3d's reduction over data ranks, and how many are in flight
(`services.runtime.process_groups`)."""
FLOAT64 = 8


@dataclass(frozen=True)
class Moment:
    """A moment of a computation.

    Attributes:
        name: Its name, for reports.
        parts: Bytes on the rank's device, by component.
    """

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Layers:
    """Bytes of one micro-batch's activations on a rank, in its parts.

    Attributes:
        shared: What all layers share: sine and cosine.
        inputs: The input of each layer.
        layers: What each layer saves, its input included; of the last stage, the last one computes the scored tokens
            alone.
        end: What the last norm saves, and the hidden states that are scored; 0 on other stages than the last.
    """

    shared: int
    inputs: int
    layers: tuple[int, ...]
    end: int

    @property
    def saved(self) -> int:
        """All that is saved without recomputation."""
        return self.shared + sum(self.layers) + self.end

    @property
    def recomputed(self) -> int:
        """All that is saved where layers are recomputed: their inputs."""
        return self.shared + len(self.layers) * self.inputs + self.end


def update_moments(use: ModelUse, counts: TokenCounts, stage: int) -> list[Moment]:
    """Returns the largest moments of an optimizer step on a rank of a pipeline stage.

    Args:
        use: Use of the model, which learns.
        counts: Sizes of the micro-batches.
        stage: Pipeline stage.
    """
    sizes = _layers(use, counts, stage)
    is_last = stage == use.mesh[0] - 1
    kept = sizes.recomputed if use.activation_checkpointing else sizes.saved
    # By the 1F1B schedule, a stage keeps the activations of as many micro-batches as there are stages from it on.
    waiting = (min(use.mesh[0] - stage, counts.micro_batches) - 1) * kept
    wires = _wires(use, counts, stage)
    held = waiting + wires
    gradients = gradient_bytes(use, stage)
    moments = [
        Moment("end of the backward pass", {"gradients": gradients, **_reducing(use, counts, stage)}),
        Moment("clipping", {"gradients": gradients, "temporaries": FLOAT64 * largest_kept(use, stage)}),
    ]
    for number in _most_layers(use, sizes, stage):
        moments += _moments_of_layer(use, counts, stage, sizes, number, held if number else wires)
    if is_last:
        of_head = acts.in_backward_of_head(use, counts.scored)
        # The first micro-batch's backward pass begins without gradients.
        before = 0 if counts.micro_batches == 1 else gradients
        parts = {"gradients": before, "activations": held + kept, "temporaries": of_head}
        moments.append(Moment("backward of the head", {**parts, **_sharding_at_head(use, stage)}))
    return moments


def _most_layers(use: ModelUse, sizes: _Layers, stage: int) -> list[int]:
    """Returns the numbers, within the stage, of the layers in whose backward pass memory may be highest: the first and
    the last of each kind, of those that compute all tokens unless there is one layer."""
    done = 1 if stage == use.mesh[0] - 1 and use.packs and len(sizes.layers) > 1 else 0
    kinds = stage_layers(use, stage)[: len(sizes.layers) - done]
    last = {kind: number for number, kind in enumerate(kinds)}
    first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
    return sorted({*first.values(), *last.values()})


def _moments_of_layer(
    use: ModelUse, counts: TokenCounts, stage: int, sizes: _Layers, number: int, held: int
) -> Iterator[Moment]:
    """Yields the largest moments of the backward pass of layer `number` of a stage, beside `held` bytes of
    activations: its computation, and with FSDP2 its end, when the gradients of all its weights are there, and their
    reduction."""
    kinds = stage_layers(use, stage)
    gradients = gradient_bytes(use, stage)
    if counts.micro_batches == 1 and number:
        # The first micro-batch's backward pass begins without gradients.
        later = sum(kind.numel for kind in kinds[min(number + 1, len(kinds) - 1) :])
        gradients = gradients * later // sum(kind.numel for kind in kinds)
    is_sparse = kinds[number].is_sparse
    yield Moment(
        f"backward of layer {number}",
        {
            "gradients": gradients,
            "activations": held + _at_layer(use, sizes, number),
            "temporaries": acts.in_backward_of_layer(use, is_sparse, counts.tokens),
            **_sharding_at_layer(use, stage, number),
        },
    )
    if not is_sharded(use):
        return
    sharding = _sharding_at_layer(use, stage, number)
    if number and use.mesh[2] > 1 and not use.on_gpu:
        ahead = fsdp_groups(use, stage)[1][number - 1] * use.itemsize
        # gloo has a copy of its own, and there are the shards, cast.
        copies = ahead + (ahead // use.mesh[2] if use.itemsize < use.kept_itemsize else 0)
        kept = sizes.inputs * (number + 1) if use.activation_checkpointing else _at_layer(use, sizes, number)
        held_then = {"gradients": gradients, "activations": held + sizes.shared + kept}
        yield Moment(f"gathering ahead of layer {number}", {**held_then, **sharding, "temporaries": copies})
    if use.adapters is not None:
        return
    before = sizes.shared + number * sizes.inputs
    if not use.activation_checkpointing:
        before = sizes.shared + sum(sizes.layers[:number])
    activations = held + before + sizes.inputs
    layer = fsdp_groups(use, stage)[1][number]
    computed = {"gradients": gradients, "activations": activations}
    yield Moment(
        f"gradients of layer {number}", {**computed, **sharding, "temporaries": layer * use.itemsize}
    )
    cast = FLOAT32 * largest_kept(use, stage) if casts_parts(use) else 0
    gloo = layer * FLOAT32 if use.mesh[2] > 1 and not use.on_gpu else 0
    reduced = gloo + layer * FLOAT32 // use.mesh[2]
    reducing = layer * FLOAT32 + max(layer * use.itemsize + cast, reduced)
    sharding["gathered weights"] -= layer * use.itemsize
    sharding["gradients to reduce"] -= _reduced_before(use, stage, number)
    yield Moment(f"reduction of layer {number}", {**computed, **sharding, "temporaries": reducing})


def casts_parts(use: ModelUse) -> bool:
    """Returns whether torch casts one rank's part of a gradient at a time to float32, to be reduced: on a CPU
    (`_chunk_cat`)."""
    return not use.on_gpu and use.itemsize < FLOAT32


def gradient_bytes(use: ModelUse, stage: int) -> int:
    """Returns the bytes of a rank's gradients, which are float32. At ZeRO stage 1 they are those of the whole model, at
    stage 3 they are in a buffer that the rank always has."""
    if use.engine == "zero":
        return 0 if use.zero_stage == 3 or use.offload_optimizer else FLOAT32 * _zero_gradient_numel(use)
    return FLOAT32 * trained_numel(use, stage)


def _zero_gradient_numel(use: ModelUse) -> int:
    return use.shape.num_parameters if use.zero_stage == 1 else zero_flat_numel(use) // use.ranks


def _layers(use: ModelUse, counts: TokenCounts, stage: int) -> _Layers:
    is_last = stage == use.mesh[0] - 1
    scored = counts.scored if is_last and use.packs else counts.tokens
    hidden = use.shape.hidden
    end = scored * acts.saved_by_norm(use, hidden) + counts.scored * use.itemsize * hidden if is_last else 0
    kinds = stage_layers(use, stage)
    saved = {
        kind: acts.saved_by_layer(use, kind.is_sparse, counts.tokens, counts.attended, counts.tokens)
        for kind in use.shape.layer_kinds
    }
    last = acts.saved_by_layer(use, kinds[-1].is_sparse, counts.tokens, counts.attended, scored)
    return _Layers(
        shared=acts.rotary(use, counts.tokens),
        inputs=counts.tokens * hidden * use.itemsize,
        layers=(*(saved[kind] for kind in kinds[:-1]), last),
        end=end,
    )


def _at_layer(use: ModelUse, sizes: _Layers, number: int) -> int:
    """Returns the bytes of saved activations in the backward pass of layer `number` of a stage."""
    if not use.activation_checkpointing:
        return sizes.shared + sum(sizes.layers[: number + 1])
    # The layer's input is saved already, and is the norm's where norms save no other.
    again = sizes.inputs if use.fused_norms or not number else 0
    return sizes.shared + (number + 1) * sizes.inputs + sizes.layers[number] - again


def _wires(use: ModelUse, counts: TokenCounts, stage: int) -> int:
    """Returns the bytes of the buffers that torch's pipeline schedule receives hidden states and their gradients in:
    one for every micro-batch of the step (`torch.distributed.pipelining.PipelineStage`)."""
    num_stages = use.mesh[0]
    if num_stages == 1:
        return 0
    neighbours = (stage > 0) + (stage < num_stages - 1)
    every = max(counts.micro_batches, num_stages)
    return neighbours * every * counts.tokens * use.shape.hidden * use.itemsize


def is_sharded(use: ModelUse) -> bool:
    """Returns whether FSDP2 shards the weights: over ranks or data ranks, or to cast them."""
    if use.engine == "3d":
        return use.shards_over_data
    has_other_type = use.itemsize < FLOAT32 and use.learns
    return use.engine == "fsdp" and (use.ranks > 1 or has_other_type)


@lru_cache(maxsize=1024)
def fsdp_groups(use: ModelUse, stage: int) -> tuple[int, tuple[int, ...]]:
    """Returns the elements of FSDP2's groups on a rank when they are gathered, padding included: of the root group,
    which has embedding, norm and head, and of each layer."""
    ranks = use.mesh[2]

    def gathered(weight: WeightSize) -> int:
        shape = cut_shape(weight, use.mesh[1]) if use.engine == "3d" else weight.shape
        return sharded_rows(shape, ranks) * ranks

    kinds = stage_layers(use, stage)
    own = {kind: sum(map(gathered, kind.weights)) for kind in use.shape.layer_kinds}
    root = sum(times * gathered(weight) for times, weight in stage_weights(use, stage))
    root -= sum(own[kind] for kind in kinds)
    if use.adapters is not None:
        for kind in own:
            own[kind] += sum(map(gathered, adapter_weights(kind, use.adapters)))
    return root, tuple(own[kind] for kind in kinds)


def _sharding_at_head(use: ModelUse, stage: int) -> dict[str, int]:
    """Returns the bytes that sharded engines hold in the backward pass of the head: gathered weights, of FSDP2 those of
    the root group and of the last layer, which is prefetched."""
    if is_sharded(use):
        root, layers = fsdp_groups(use, stage)
        prefetched = layers[-1] if use.mesh[2] > 1 else 0
        return {"gathered weights": (root + prefetched) * use.itemsize}
    return _zero_computing(use)


def _sharding_at_layer(use: ModelUse, stage: int, number: int) -> dict[str, int]:
    """Returns the bytes that sharded engines hold in the backward pass of layer `number` of a stage.

    FSDP2: the weights of the root group and of the layer, and the next layer's, gathered ahead; the output layer's
    gradient, which is reduced with the root group at the end; and the layer after this one, being reduced in float32.
    """
    if not is_sharded(use):
        return _zero_computing(use)
    root, layers = fsdp_groups(use, stage)
    prefetched = layers[number - 1] if number and use.mesh[2] > 1 else 0
    trains = use.learns and use.adapters is None
    head = _output_numel(use) * use.itemsize if trains and stage == use.mesh[0] - 1 else 0
    return {
        "gathered weights": (root + layers[number] + prefetched) * use.itemsize,
        "gradients to reduce": head + _reduced_before(use, stage, number),
    }


def _reduced_before(use: ModelUse, stage: int, number: int) -> int:
    """Returns the bytes of the gradients that FSDP2 reduces in the backward pass of layer `number`: those of the layer
    after it."""
    layers = fsdp_groups(use, stage)[1]
    trains = use.learns and use.adapters is None
    return layers[min(number + 1, len(layers) - 1)] * FLOAT32 if trains else 0


def _output_numel(use: ModelUse) -> int:
    """Returns the elements of a rank's part of the output layer."""
    return acts.vocabulary_of_rank(use) * use.shape.hidden if use.shape.head == "lm" else use.shape.hidden


def zero_bucket(use: ModelUse) -> int:
    """Returns the bytes of the bucket in which DeepSpeed collects gradients to reduce: at stages 1 and 2 while it
    computes them, at stage 3 always."""
    return FLOAT32 * min(BUCKET_NUMEL, use.shape.num_parameters)


def zero_gathered(use: ModelUse) -> int:
    """Returns the bytes of weights that DeepSpeed holds in a pass: at stage 3 those of a layer, of the next, and of the
    embedding or output layer, each as it was gathered and in place; at stages 1 and 2 autocast's copies of the layers'
    weights, where these are finer than the type of computation."""
    shape = use.shape
    if use.zero_stage == 3:
        ends = max(shape.embedding.numel, _output_numel(use))
        return use.kept_itemsize * 2 * (2 * shape.layer_numel + ends)
    return use.itemsize * shape.layers * shape.layer_numel if use.itemsize < use.kept_itemsize else 0


def _zero_computing(use: ModelUse) -> dict[str, int]:
    """Returns the bytes that DeepSpeed holds in a backward pass; empty for other engines."""
    if use.engine != "zero":
        return {}
    bucket = zero_bucket(use) if use.zero_stage < 3 else 0
    return {"gathered weights": zero_gathered(use), "gradients to reduce": bucket}


def _reducing(use: ModelUse, counts: TokenCounts, stage: int) -> dict[str, int]:
    """Returns the bytes of temporaries when the last gradients of a backward pass are reduced.

    FSDP2: weights and gradients of the root group, in the type of computation; the gradients in float32; and the first
    layer's, which are reduced meanwhile. Engine 3d with replicas: buckets of small tensors. ZeRO stages 1 and 2: copies
    of the partition's gradients, concatenated and padded, and those of earlier micro-batches; stage 3: copies of the
    bucket.
    """
    trains = use.adapters is None
    if is_sharded(use) and trains:
        root, layers = fsdp_groups(use, stage)
        cast = FLOAT32 * largest_kept(use, stage) if casts_parts(use) else 0
        # The root group's gradients are the last.
        missing = root * FLOAT32 // use.mesh[2] if counts.micro_batches == 1 else 0
        return {
            "gradients": gradient_bytes(use, stage) - missing,
            "gathered weights": root * use.itemsize,
            "gradients to reduce": root * (use.itemsize + FLOAT32) + layers[0] * FLOAT32 + cast,
        }
    if use.engine == "3d" and use.mesh[2] > 1:
        return {"gradients to reduce": _bucketed(use, stage)}
    if use.engine == "zero" and use.zero_stage == 3:
        # Concatenated, and on a CPU once more inside gloo; meanwhile the embedding is still gathered.
        copies = 1 if use.on_gpu else 2
        gathered = use.shape.embedding.numel * use.kept_itemsize
        return {"gathered weights": gathered, "gradients to reduce": copies * zero_bucket(use)}
    if use.engine == "zero":
        copies = 3 if use.zero_stage == 2 and counts.micro_batches > 1 else 2
        return {"gradients to reduce": copies * FLOAT32 * zero_flat_numel(use) // use.ranks}
    return {}


def _bucketed(use: ModelUse, stage: int) -> int:
    """Returns the bytes of the buckets by which engine 3d reduces gradients over data ranks: of tensors smaller than a
    bucket, as many buckets at a time as are in flight (`services.runtime.process_groups.add_up`)."""
    small = sum(
        times * nbytes
        for times, weight in stage_weights(use, stage)
        if (nbytes := FLOAT32 * tensor_numel(use, weight)) < BUCKET_BYTES
    )
    return min(small, BUCKETS_UNDER_WAY * BUCKET_BYTES)


def largest_kept(use: ModelUse, stage: int) -> int:
    """Returns the elements of the largest tensor that a rank keeps a share of and trains. Its norm is summed in
    float64, for which torch makes a copy."""
    if use.adapters is not None:
        return 0
    weights = [weight for _, weight in stage_weights(use, stage)]
    if use.engine == "3d":
        return max(tensor_numel(use, weight) for weight in weights)
    return max(sharded_rows(weight.shape, use.ranks) for weight in weights)
