"""Memory of generation: KV cache, decoding steps, and vLLM's workspace."""

from __future__ import annotations

import math

from settings.memory.activations import in_forward_of_layers
from settings.memory.shape import VOCABULARY_MULTIPLE, ModelShape, WeightSize
from settings.memory.shards import cut_shape
from settings.memory.use import FLOAT32, ModelUse, RowSizes

CHOOSING, TRUNCATING = 16, 33
"""Bytes per logit of a decoding step of rollout engine hf, beside the logits (`services.rollout.sampling`): in
choosing a token, log-probabilities and probabilities in float32 and their sums in float64; in top-p, sorted
log-probabilities and tokens, and float64 probabilities and sums."""

ROUND_BYTES, LEAST_BUCKET_BYTES, TOGETHER_BYTES = 32 << 20, 4096, 64 << 20
"""Bytes that a rank without a mesh of training receives at a time for its generation shard, least bytes of those from
one rank, and bytes of the tensors that arrive together (`services.weights.resharding`)."""


def rows_together(use: ModelUse, rows: RowSizes) -> int:
    """Returns the rows that a rank of rollout engine hf generates at a time: those of its generation replica, as far
    as `rollout_tokens` allows."""
    length = rows.prompt_tokens + rows.response_tokens
    share = -(-rows.rows // use.generation_replicas)
    return max(1, min(share, use.rollout_engine.cache_tokens // length))


def cache_bytes(use: ModelUse, rows: RowSizes) -> int:
    """Returns the bytes of a rank's KV cache: keys and values of all positions of the rows that are generated at a
    time; for vllm, what the table gives it."""
    rollout = use.rollout_engine
    if rollout.engine != "hf":
        return rollout.cache_bytes
    return use.shape.layers // rollout.pipeline * _cache_of_layer(use, rows)


def _cache_of_layer(use: ModelUse, rows: RowSizes) -> int:
    tokens = rows_together(use, rows) * (rows.prompt_tokens + rows.response_tokens)
    per_token = cache_bytes_per_token(use.shape, use.rollout_engine.tensor, use.itemsize)
    return tokens * per_token // use.shape.layers


def cache_bytes_per_token(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Returns the bytes of the keys and values of one token in all layers, on each of `tensor` ranks that share the
    model by tensor parallelism, with elements of `itemsize` bytes."""
    return shape.layers * (2 * shape.key // tensor) * itemsize


def decoding_bytes(use: ModelUse, rows: RowSizes) -> int:
    """Returns the bytes of temporaries while rollout engine hf generates: in the pass over the prompts, with the mask
    of their padding, or later, in choosing tokens from their logits and in copying one layer of the cache to drop
    finished rows; 0 for other engines."""
    rollout = use.rollout_engine
    if rollout.engine != "hf":
        return 0
    together, prompt, e = rows_together(use, rows), rows.prompt_tokens, use.itemsize
    mask = together * prompt * prompt * (1 + e)
    prefill = in_forward_of_layers(use, together * prompt, together * prompt) + mask
    vocabulary = -(-use.shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    work = TRUNCATING if rollout.truncates else CHOOSING
    # The parts that tensor ranks gather, beside the logits.
    gathered = e if rollout.tensor > 1 else 0
    choosing = together * vocabulary * (e + gathered + work)
    return max(prefill, choosing, _cache_of_layer(use, rows) + together * vocabulary * e)


def vllm_workspace(use: ModelUse) -> int:
    """Returns an estimate of vLLM's activations: one step of `max_num_batched_tokens` in one layer, and logits of as
    many rows as a step has (`max_num_seqs`), twice in float32. 0 for other engines. vLLM's own graphs and kernels'
    workspaces are not counted."""
    rollout = use.rollout_engine
    if rollout.engine != "vllm":
        return 0
    layer = (2 * use.shape.hidden + 3 * use.shape.units_per_token // rollout.tensor) * use.itemsize
    return rollout.batched_tokens * layer + rollout.sequences * use.shape.vocabulary * 2 * FLOAT32


def freed_by_sleep(use: ModelUse) -> frozenset[str]:
    """Returns the components of what a rank always holds that its rollout engine frees while the actor trains and
    infers: the KV cache, and generation weights that are no part of the training engine's memory. On a CPU vLLM keeps
    its weights, which it has repacked."""
    rollout = use.rollout
    if rollout is None or not rollout.sleeps:
        return frozenset()
    keeps_weights = use.generates_in_place or (rollout.engine == "vllm" and not use.on_gpu)
    return frozenset({"KV cache"} if keeps_weights else {"KV cache", "generation weights"})


def resharding_bytes(use: ModelUse) -> int:
    """Returns the bytes in which the ranks of engines without a mesh move weights to generation shards: the bucket that
    a rank sends, and one of each rank; for vllm also the tensors that arrive together and are fused then."""
    rollout, ranks = use.rollout_engine, use.ranks
    buckets = (1 + ranks) * max(LEAST_BUCKET_BYTES, ROUND_BYTES // ranks)
    if rollout.engine == "hf":
        return buckets
    largest = max(math.prod(cut_shape(weight, rollout.tensor)) for _, weight in use.shape.weights())
    return buckets + 2 * max(TOGETHER_BYTES, largest * use.itemsize)


def merged_bytes(use: ModelUse) -> int:
    """Returns the bytes of host memory in which the rank that has most keeps weights with merged adapters until they
    are sent to generation shards: every n-th tensor in the order of names."""
    sizes = {_name(group, weight): weight.numel for group, weight in use.shape.weights()}
    if use.shape.tied:
        sizes["lm_head.weight"] = use.shape.embedding.numel
    in_order = [sizes[name] for name in sorted(sizes)]
    return use.itemsize * max(sum(in_order[rank :: use.ranks]) for rank in range(use.ranks))


def _name(group: str, weight: WeightSize) -> str:
    """Returns the name of a weight in the checkpoint."""
    within = f"layers.{group.removeprefix('layer ')}." if group.startswith("layer") else ""
    return weight.name if weight.name == "lm_head.weight" else f"model.{within}{weight.name}"
