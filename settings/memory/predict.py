"""Prediction of a rank's memory in each stage of a run, on its device and in host memory, by component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from settings.memory import activations as acts
from settings.memory.activations import token_counts
from settings.memory.generation import (
    cache_bytes,
    decoding_bytes,
    freed_by_sleep,
    merged_bytes,
    resharding_bytes,
    vllm_workspace,
)
from settings.memory.shape import ModelShape
from settings.memory.shards import (
    generation_numel,
    kept_numel,
    stage_weights,
    trained_numel,
    zero_flat_numel,
)
from settings.memory.update import fsdp_groups, is_sharded, update_moments, zero_bucket, zero_gathered
from settings.memory.use import FLOAT32, ModelUse, RowSizes

StageName = Literal["loading", "idle", "transition", "generation", "forward", "update", "checkpoint"]
"""Stage of a run: loading the model; idle, between calls; transition, gathering of generation weights; generation;
forward, log-probabilities, values or scores; update; and copying of a checkpoint."""

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Footprint:
    """Predicted memory of one rank in one stage.

    Attributes:
        device: Bytes on the rank's device by component; in host memory where the device is a CPU.
        host: Bytes in host memory beside those, by component.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(self.host.values())


def predict(use: ModelUse, rows: RowSizes) -> dict[StageName, Footprint]:
    """Returns the footprint of the rank that needs most, in each stage that the service has.

    Args:
        use: Use of the model.
        rows: Rows of a step.

    Raises:
        ValueError: The model cannot be divided over the mesh.
    """
    pipeline, tensor, _ = use.mesh
    _check_divides(use.shape, pipeline, tensor)
    if use.rollout is not None:
        _check_divides(use.shape, use.rollout.pipeline, use.rollout.tensor)
    found: dict[StageName, Footprint] = {}
    for number in range(pipeline):
        for name, footprint in predict_rank(use, rows, number).items():
            if name not in found or footprint.device_bytes > found[name].device_bytes:
                found[name] = footprint
    return found


def _check_divides(shape: ModelShape, pipeline: int, tensor: int) -> None:
    for what, size, parts in (
        ("layers", shape.layers, pipeline),
        ("attention heads", shape.heads, tensor),
        ("key-value heads", shape.kv_heads, tensor),
        ("feed-forward units", shape.intermediate, tensor),
    ):
        if size % parts:
            raise ValueError(f"{size} {what} cannot be divided by {parts}")


def predict_rank(use: ModelUse, rows: RowSizes, stage: int) -> dict[StageName, Footprint]:
    """Returns the footprint of the ranks of one pipeline stage, in each stage of a run."""
    idle = {**idle_parts(use, stage), "arena": use.device_arena_bytes}
    arena = {"arena": use.arena_bytes}
    held = trained_numel(use, stage) * 3 * FLOAT32
    offloaded = _offloaded(use)
    counts = token_counts(use, rows)

    def footprint(device: Mapping[str, int], host: Mapping[str, int] = NOTHING) -> Footprint:
        return Footprint(_present({**idle, **device}), _present({**arena, **offloaded, **host}))

    found: dict[StageName, Footprint] = {
        "loading": footprint({"one tensor or gathered layer": _while_loading(use, stage)}),
        "idle": footprint({}),
    }
    rollout = use.rollout
    if rollout is not None and rollout.generates:
        transition, generation = generation_parts(use, rows, stage)
        if use.engine == "none":
            return {**found, "generation": footprint(generation)}
        merged = use.adapters is not None and rollout.is_shared
        copies = {"merged weights": merged_bytes(use)} if merged else NOTHING
        found["transition"], found["generation"] = footprint(transition, copies), footprint(generation)
    asleep = dict.fromkeys(freed_by_sleep(use), 0)
    found["forward"] = footprint({**_forward(use, counts, stage), **asleep})
    if use.learns:
        largest = max(update_moments(use, counts, stage), key=lambda moment: moment.total)
        # Where nothing can fail between steps, one step needs no way back.
        is_atomic = rows.mini_batches == 1 and use.engine != "zero" and not use.scores_with_copy
        copies = {"weights staged for the copy": _copy_bytes(use)} if use.scores_with_copy else {}
        found["update"] = footprint(
            {**largest.parts, **copies, **asleep}, {"snapshot before the update": 0 if is_atomic else held}
        )
        found["checkpoint"] = footprint({}, {"copy for the checkpoint": held})
    return found


def generation_parts(use: ModelUse, rows: RowSizes, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes that a rank that generates takes on its device in the stages transition and generation, by
    component: those that replace a component of `idle_parts`, and further ones."""
    gathered, bucket = _transition(use, stage)
    transition = {"generation weights": gathered, "gathered tensors": bucket}
    generation = {
        "generation weights": gathered,
        "KV cache": cache_bytes(use, rows),
        "decoding": decoding_bytes(use, rows),
        "vLLM workspace": vllm_workspace(use),
    }
    return transition, generation


def idle_parts(use: ModelUse, stage: int) -> dict[str, int]:
    """Returns the bytes that a rank of a pipeline stage always holds on its device: weights, moments, and what it
    computes or generates with beside them, by component."""
    if use.engine == "none":
        return _rollout_parts(use, stage)
    kept, trained = kept_numel(use, stage), trained_numel(use, stage)
    parts = {"weights": kept * use.kept_itemsize}
    if use.receives:
        parts["received weights"] = parts["weights"]
    if use.adapters is not None:
        parts["adapters"] = trained * FLOAT32
    on_device = 0 if use.offload_optimizer else FLOAT32
    if use.engine == "zero" and use.learns:
        parts["weights"] = kept * on_device
        parts["weights that compute"] = FLOAT32 * (kept if use.zero_stage == 3 else zero_flat_numel(use))
        if use.zero_stage == 3:
            parts["gradient buffer"] = kept * on_device
            parts["reduction bucket"] = zero_bucket(use)
        elif use.offload_optimizer:
            parts["gradient buffer"] = _largest_gradient(use)
    elif use.engine == "3d" and use.learns and use.itemsize < FLOAT32 and not use.shards_over_data:
        parts["weights that compute"] = kept * use.itemsize
    parts["moments"] = 2 * trained * on_device
    rollout = use.rollout
    if use.generates_in_place:
        # Training weights, or their rounded copies, are views of the generation weights' memory.
        parts["generation weights"] = (generation_numel(use, stage) - kept) * use.itemsize
    elif rollout is not None and use.engine == "3d" and rollout.engine == "hf":
        # Gathered into new memory, which is kept until they are gathered again.
        numel = use.shape.num_parameters if rollout.gathers_all else generation_numel(use, stage)
        parts["generation weights"] = numel * use.itemsize if rollout.generates else 0
    elif rollout is not None:
        parts["generation weights"] = generation_numel(use, stage) * use.itemsize
        if rollout.engine == "vllm":
            parts["KV cache"] = rollout.cache_bytes
    if use.scores_with_copy:
        parts["copy that scores"] = _copy_bytes(use)
    return parts


def _rollout_parts(use: ModelUse, stage: int) -> dict[str, int]:
    """Returns the bytes that a rank of a rollout service always holds on its device, by component."""
    if use.rollout is None:
        return {}
    weights = generation_numel(use, stage) * use.itemsize
    parts = {"generation weights": weights, "received weights": weights if use.receives else 0}
    return parts | ({"KV cache": use.rollout.cache_bytes} if use.rollout.engine == "vllm" else {})


def staying_bytes(use: ModelUse, idle: Footprint) -> int:
    """Returns the bytes that stay on the device of a rank while the service is offloaded: the arena, DeepSpeed's
    buckets, the copy of the model that a reward scores with, and all of a reward that only scores, which does not move.

    Args:
        use: Use of the model.
        idle: Its footprint between calls.
    """
    if use.engine == "whole":
        return idle.device_bytes
    return sum(idle.device.get(name, 0) for name in ("arena", "reduction bucket", "copy that scores"))


def _copy_bytes(use: ModelUse) -> int:
    return use.shape.num_parameters * use.itemsize


def _offloaded(use: ModelUse) -> dict[str, int]:
    """Returns the bytes of optimizer state in host memory: master weights, gradients and moments, and at stages 1 and 2
    the buffer that gradients pass through on their way there."""
    if not (use.offload_optimizer and use.learns):
        return {}
    parts = {"offloaded optimizer": 4 * FLOAT32 * kept_numel(use, 0)}
    return parts if use.zero_stage == 3 else parts | {"host gradient buffer": _largest_gradient(use)}


def _largest_gradient(use: ModelUse) -> int:
    return FLOAT32 * max(weight.numel for _, weight in stage_weights(use, 0))


def _while_loading(use: ModelUse, stage: int) -> int:
    """Returns the bytes of temporaries while weights are read: the largest tensor, or for FSDP2, which runs a first
    forward pass, the weights of the root group and of a layer, gathered flat and in place."""
    if use.engine == "none":
        return 0
    if is_sharded(use):
        root, layers = fsdp_groups(use, stage)
        return (root + 2 * max(layers)) * use.itemsize
    return max(weight.numel for _, weight in stage_weights(use, stage)) * use.kept_itemsize


def _transition(use: ModelUse, stage: int) -> tuple[int, int]:
    """Returns the bytes of generation weights during generation, and those of tensors that are gathered at a time
    before it."""
    rollout = use.rollout_engine
    shape, e = use.shape, use.itemsize
    idle = idle_parts(use, stage).get("generation weights", 0)
    if use.engine == "none":
        return idle, 0
    whole = max(weight.numel for _, weight in stage_weights(use, stage)) * use.kept_itemsize
    if use.engine != "3d":
        return idle, resharding_bytes(use) if rollout.is_shared else whole
    if use.generates_in_place:
        return idle, 0
    return idle, shape.layer_numel // rollout.tensor * (use.mesh[0] // rollout.pipeline) * e


def _forward(use: ModelUse, counts: acts.TokenCounts, stage: int) -> dict[str, int]:
    """Returns the bytes of a forward pass without gradients at its largest moment, by component.

    FSDP2 has three copies of groups while it gathers one, when there are hardly any activations: the one before, flat
    (`prev_all_gather_state` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py), the group itself, flat, and
    in place, or before on a CPU in gloo's own copy, beside the shards. Before the first layer there is the root group
    (embedding, norm and head), which also stays in place. On one rank FSDP2 casts one tensor at a time.
    """
    e, stream = use.itemsize, use.stream_itemsize
    hidden = counts.tokens * use.shape.hidden * stream
    is_last = stage == use.mesh[0] - 1
    # The last layer computes fewer tokens.
    num_whole = use.shape.layers // use.mesh[0] - (1 if is_last and use.packs else 0)
    in_layer = acts.rotary(use, counts.tokens) + acts.in_forward_of_layers(
        use, counts.tokens, counts.attended, is_only=num_whole == 1
    )
    in_head = hidden + acts.in_forward_of_head(use, counts.scored) if is_last else 0
    at_gather, at_layer, at_head = 0, 0, 0
    if is_sharded(use):
        root, layers = fsdp_groups(use, stage)
        is_cut = use.mesh[2] > 1
        at_gather = e * (root + max(layers) + _largest_of_layers(use))
        if is_cut:
            # The shards to gather, cast.
            cast = 1 / use.mesh[2] if e < use.kept_itemsize and not use.on_gpu else 0
            after = (before + (2 + cast) * each for before, each in pairwise((root, *layers)))
            at_gather = int(e * (root + max(after)))
        at_layer = e * (root + (2 if is_cut else 1) * max(layers))
        at_head = e * (root + (layers[-1] if is_cut else 0))
    elif use.engine == "zero":
        at_layer = zero_gathered(use)
        # Autocast's copies are dropped at the end of the last layer.
        at_head = at_layer if use.zero_stage == 3 else 0
    moments = [
        {"activations": hidden, "gathered weights": at_gather},
        {"activations": in_layer, "gathered weights": at_layer},
        {"activations": in_head, "gathered weights": at_head},
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def _largest_of_layers(use: ModelUse) -> int:
    return max(weight.numel for kind in use.shape.layer_kinds for weight in kind.weights)


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    """Returns the components that take any memory."""
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
