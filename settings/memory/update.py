"""Memory of an optimizer step beside what a rank always holds: the moments at which it is highest, each with its
components. The step needs as much as its largest moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from settings.memory import activations as acts
from settings.memory.activations import TokenCounts
from settings.memory.shards import (
    adapter_weights,
    cut_shape,
    sharded_rows,
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
        layer: What one layer saves, its input included.
        last: The same for the last layer, which computes the scored tokens alone.
        end: What the last norm saves, and the hidden states that are scored; 0 on other stages than the last.
        num_layers: Layers of the stage.
    """

    shared: int
    inputs: int
    layer: int
    last: int
    end: int
    num_layers: int

    @property
    def saved(self) -> int:
        """All that is saved without recomputation."""
        return self.shared + (self.num_layers - 1) * self.layer + self.last + self.end

    @property
    def recomputed(self) -> int:
        """All that is saved where layers are recomputed: their inputs."""
        return self.shared + self.num_layers * self.inputs + self.end


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
    of_layer = acts.in_backward_of_layer(use, counts.tokens)
    # The first micro-batch's backward pass begins without gradients.
    before, after_one = gradients, gradients
    if counts.micro_batches == 1:
        before, after_one = 0, gradients // sizes.num_layers
    moments = [
        Moment(
            "backward of a layer",
            {
                "gradients": after_one,
                "activations": held + _at_layer(use, sizes, is_last),
                "temporaries": of_layer,
                **_sharding_at_layer(use, stage),
            },
        ),
        Moment(
            "backward of the first layer",
            {
                "gradients": gradients,
                "activations": wires + sizes.shared + sizes.layer,
                "temporaries": of_layer,
                **_sharding_at_layer(use, stage),
            },
        ),
        Moment("end of the backward pass", {"gradients": gradients, **_reducing(use, counts, stage)}),
        Moment("clipping", {"gradients": gradients, "temporaries": FLOAT64 * largest_kept(use, stage)}),
    ]
    if is_last:
        of_head = acts.in_backward_of_head(use, counts.scored)
        parts = {"gradients": before, "activations": held + kept, "temporaries": of_head}
        moments.append(Moment("backward of the head", {**parts, **_sharding_at_head(use, stage)}))
    return moments


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
    return _Layers(
        shared=acts.rotary(use, counts.tokens),
        inputs=counts.tokens * hidden * use.itemsize,
        layer=acts.saved_by_layer(use, counts.tokens, counts.attended, counts.tokens),
        last=acts.saved_by_layer(use, counts.tokens, counts.attended, scored),
        end=end,
        num_layers=use.shape.layers // use.mesh[0],
    )


def _at_layer(use: ModelUse, sizes: _Layers, is_last: bool) -> int:
    """Returns the bytes of saved activations in the backward pass of the last layer that computes all tokens."""
    done = 1 if is_last and use.packs and sizes.num_layers > 1 else 0
    if use.activation_checkpointing:
        layer = sizes.layer if done or not is_last else sizes.last
        # The layer's input is saved already, and is the norm's where norms save no other.
        again = sizes.inputs if use.fused_norms else 0
        return sizes.shared + (sizes.num_layers - done) * sizes.inputs + layer - again
    before = sizes.shared + (sizes.num_layers - 1) * sizes.layer
    return before if done else before + sizes.last


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


def fsdp_groups(use: ModelUse, stage: int) -> tuple[int, int]:
    """Returns the elements of FSDP2's two kinds of groups on a rank when they are gathered, padding included: of the
    root group, which has embedding, norm and head, and of one layer."""
    tensor, ranks = use.mesh[1], use.mesh[2]
    root = layer = 0
    for times, weight in stage_weights(use, stage):
        shape = cut_shape(weight, tensor) if use.engine == "3d" else weight.shape
        numel = sharded_rows(shape, ranks) * ranks
        if times == use.shape.layers // use.mesh[0] and weight in use.shape.layer:
            layer += numel
        else:
            root += numel
    if use.adapters is not None:
        layer += ranks * sum(
            sharded_rows(weight.shape, ranks) for weight in adapter_weights(use.shape, use.adapters)
        )
    return root, layer


def _sharding_at_head(use: ModelUse, stage: int) -> dict[str, int]:
    """Returns the bytes that sharded engines hold in the backward pass of the head: gathered weights, of FSDP2 those of
    the root group and of the last layer, which is prefetched."""
    if is_sharded(use):
        root, layer = fsdp_groups(use, stage)
        prefetched = layer if use.mesh[2] > 1 else 0
        return {"gathered weights": (root + prefetched) * use.itemsize}
    return _zero_computing(use)


def _sharding_at_layer(use: ModelUse, stage: int) -> dict[str, int]:
    """Returns the bytes that sharded engines hold in the backward pass of a layer.

    FSDP2: the weights of the root group and of the layer, and the next layer's, gathered ahead; the output layer's
    gradient, which is reduced with the root group at the end; and the layer after this one, being reduced in float32.
    """
    if not is_sharded(use):
        return _zero_computing(use)
    root, layer = fsdp_groups(use, stage)
    prefetched = layer if use.mesh[2] > 1 else 0
    trains = use.learns and use.adapters is None
    head = _output_numel(use) * use.itemsize if trains and stage == use.mesh[0] - 1 else 0
    reducing = layer * FLOAT32 if trains else 0
    return {
        "gathered weights": (root + layer + prefetched) * use.itemsize,
        "gradients to reduce": head + reducing,
    }


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
    layer's, which are reduced meanwhile. On a CPU torch casts one rank's part of a tensor to float32 at a time
    (`_chunk_cat`). Engine 3d with replicas: buckets of small tensors. ZeRO stages 1 and 2: copies of the partition's
    gradients, concatenated and padded, and those of earlier micro-batches; stage 3: copies of the bucket.
    """
    trains = use.adapters is None
    if is_sharded(use) and trains:
        root, layer = fsdp_groups(use, stage)
        cast = 0 if use.on_gpu or use.itemsize == FLOAT32 else FLOAT32 * largest_kept(use, stage)
        # The root group's gradients are the last.
        missing = root * FLOAT32 // use.mesh[2] if counts.micro_batches == 1 else 0
        return {
            "gradients": gradient_bytes(use, stage) - missing,
            "gathered weights": root * use.itemsize,
            "gradients to reduce": root * (use.itemsize + FLOAT32) + layer * FLOAT32 + cast,
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
