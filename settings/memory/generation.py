"""Memory of generation: KV cache, decoding steps, and vLLM's workspace."""

from __future__ import annotations

from settings.memory.activations import in_forward_of_layer
from settings.memory.shape import VOCABULARY_MULTIPLE
from settings.memory.use import FLOAT32, ModelUse, RolloutUse, RowSizes

CHOOSING, TRUNCATING = 16, 33
"""Bytes per logit of a decoding step of rollout engine hf, beside the logits (`services.rollout.sampling`): in
choosing a token, log-probabilities and probabilities in float32 and their sums in float64; in top-p, sorted
log-probabilities and tokens, and float64 probabilities and sums."""

VLLM_BATCHED_TOKENS = 16384
"""Most tokens of a step of vLLM on GPUs of at least 70 GiB, elsewhere half as many (`default_max_num_batched_tokens` in
vllm/engine/arg_utils.py, usage context LLM_CLASS)."""


def rows_together(use: ModelUse, rows: RowSizes) -> int:
    """Returns the rows that a rank of rollout engine hf generates at a time: those of its generation replica, as far
    as `rollout_tokens` allows."""
    rollout = _rollout(use)
    replicas = use.ranks // (rollout.pipeline * rollout.tensor)
    length = rows.prompt_tokens + rows.response_tokens
    return max(1, min(-(-rows.rows // replicas), rollout.cache_tokens // length))


def cache_bytes(use: ModelUse, rows: RowSizes) -> int:
    """Returns the bytes of a rank's KV cache: keys and values of all positions of the rows that are generated at a
    time; for vllm, what the table gives it."""
    rollout = _rollout(use)
    if rollout.engine != "hf":
        return rollout.cache_bytes
    return use.shape.layers // rollout.pipeline * _cache_of_layer(use, rows)


def _cache_of_layer(use: ModelUse, rows: RowSizes) -> int:
    tokens = rows_together(use, rows) * (rows.prompt_tokens + rows.response_tokens)
    return tokens * (2 * use.shape.key // _rollout(use).tensor) * use.itemsize


def decoding_bytes(use: ModelUse, rows: RowSizes) -> int:
    """Returns the bytes of temporaries while rollout engine hf generates: in the pass over the prompts, with the mask
    of their padding, or later, in choosing tokens from their logits and in copying one layer of the cache to drop
    finished rows; 0 for other engines."""
    rollout = _rollout(use)
    if rollout.engine != "hf":
        return 0
    together, prompt, e = rows_together(use, rows), rows.prompt_tokens, use.itemsize
    mask = together * prompt * prompt * (1 + e)
    prefill = in_forward_of_layer(use, together * prompt, together * prompt) + mask
    vocabulary = -(-use.shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    work = TRUNCATING if rollout.truncates else CHOOSING
    # The parts that tensor ranks gather, beside the logits.
    gathered = e if rollout.tensor > 1 else 0
    choosing = together * vocabulary * (e + gathered + work)
    return max(prefill, choosing, _cache_of_layer(use, rows) + together * vocabulary * e)


def vllm_workspace(use: ModelUse) -> int:
    """Returns an estimate of vLLM's activations: one step of `VLLM_BATCHED_TOKENS` in one layer, and logits of its
    rows in float32. 0 for other engines. vLLM's own graphs and kernels' workspaces are not counted."""
    if _rollout(use).engine != "vllm":
        return 0
    tensor = _rollout(use).tensor
    layer = (2 * use.shape.hidden + 3 * use.shape.intermediate // tensor) * use.itemsize
    return VLLM_BATCHED_TOKENS * layer + 256 * use.shape.vocabulary * 2 * FLOAT32


def _rollout(use: ModelUse) -> RolloutUse:
    assert use.rollout is not None, "only actors generate"
    return use.rollout
