"""Activations of a micro-batch: tensors that autograd saves for the backward pass, and temporary ones at the moments
that need most.

Counted from the operators of the layers (transformers' Llama, Mistral, Qwen2 and Qwen3 on the attention of
`services.compute.packing`), tensor by tensor; every figure is a number of elements per token or of bytes. q and k are
the numbers of a token's queries and of its keys on this rank, f its feed-forward units, h the hidden size.
`settings.memory.experts` has the feed-forward parts of sparse layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from settings.memory import experts
from settings.memory.use import FLOAT32, ModelUse, RowSizes

MOST_LOGITS, CACHED_LOGITS, POSITIONS_TOGETHER = 1 << 25, 1 << 18, 256
"""Logits that are computed at a time, and on CPUs fewer (`services.compute.logits`)."""
TILE = 16
"""Tokens that attention kernels compute together (`services.compute.packing`)."""


@dataclass(frozen=True)
class TokenCounts:
    """Sizes of the largest micro-batch of a rank.

    Attributes:
        micro_batches: Micro-batches of an optimizer step on this rank.
        tokens: Tokens that layers compute.
        scored: Tokens that the last layer computes, and whose logits or values are computed.
        attended: Tokens of the grids that attention computes, padding included.
        rows: Rows.
    """

    micro_batches: int
    tokens: int
    scored: int
    attended: int
    rows: int


def token_counts(use: ModelUse, rows: RowSizes) -> TokenCounts:
    """Returns the sizes of a rank's largest micro-batch, for rows that are all of the same length and do not share
    prompts. With sequence parallelism, each rank has 1/S of the tokens, also of the scored ones. A rank computes
    attention over all tokens for 1/S of the heads; this is counted as 1/S of the tokens for all heads."""
    length = rows.prompt_tokens + rows.response_tokens
    per_rank = -(-rows.rows // (use.row_parts * rows.mini_batches))
    most = max(1, min(use.token_budget // length, per_rank))
    count = -(-per_rank // most)
    together = -(-per_rank // count) if use.packs else most
    if not use.packs:
        grid = together * length
        scored = together * rows.response_tokens if use.shape.head == "lm" else grid
        return TokenCounts(count, grid, scored, grid, together)
    # The last token of a response predicts nothing.
    read = length - 1
    padded = read + -read % TILE if read % TILE > TILE // 2 else read
    tokens, scored, attended = (
        -(-together * each // use.sequence_parallel) for each in (read, rows.response_tokens, padded)
    )
    return TokenCounts(count, tokens, scored, attended, together)


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer on a rank, of t that share it.

    Attributes:
        hidden, query, key, units: h, q, k and f.
        heads: Attention heads on this rank.
    """

    hidden: int
    query: int
    key: int
    units: int
    heads: int

    @staticmethod
    def of(use: ModelUse) -> LayerSizes:
        """Returns the sizes for a use of a model."""
        shape, tensor = use.shape, use.mesh[1]
        return LayerSizes(
            shape.hidden,
            shape.query // tensor,
            shape.key // tensor,
            shape.intermediate // tensor,
            shape.heads // tensor,
        )


def saved_by_norm(use: ModelUse, numbers: int) -> int:
    """Returns the bytes per token that RMS norms of `numbers` numbers save, beside their output: with the norms of
    `services.compute.norms` their input; with transformers' the input in float32, and the normalized input, which the
    gradient of a trained weight needs. One scale more is left out."""
    learned = use.stream_itemsize * numbers if use.learns and use.adapters is None else 0
    return FLOAT32 * numbers + (0 if use.fused_norms else learned)


def saved_by_layer(use: ModelUse, is_sparse: bool, tokens: int, attended: int, scored: int) -> int:
    """Returns the bytes that autograd saves in one layer.

    Args:
        use: Use of the model.
        is_sparse: Whether the layer has experts.
        tokens: Tokens of the layer's input.
        attended: Tokens of the grids that attention computes.
        scored: Tokens that the layer computes after its attention: fewer than `tokens` in the last one.
    """
    sizes, e = LayerSizes.of(use), use.itemsize
    h, q, k = sizes.hidden, sizes.query, sizes.key
    before = saved_by_norm(use, h) + e * h
    if use.shape.qk_norm:
        before += saved_by_norm(use, q + k)
    # Queries, keys, values and outputs, and the logarithm of each head's normalizer in float32.
    attention = e * (2 * q + 2 * k) + FLOAT32 * sizes.heads
    return tokens * before + attended * attention + scored * _saved_after_attention(use, sizes, is_sparse)


def _saved_after_attention(use: ModelUse, sizes: LayerSizes, is_sparse: bool) -> int:
    """Returns the bytes per token that a layer saves after its attention: the attention's output where it is packed
    again, norm and its output, and gate, its activation, up and their product."""
    e = use.itemsize
    packed_again = e * sizes.query if use.packs else 0
    adapters = use.adapters.rank * 7 * FLOAT32 if use.adapters else 0
    units = experts.saved_per_token(use) if is_sparse else 4 * e * sizes.units
    feed_forward = saved_by_norm(use, sizes.hidden) + e * sizes.hidden + units
    return packed_again + feed_forward + adapters


def in_backward_of_layer(use: ModelUse, is_sparse: bool, tokens: int) -> int:
    """Returns the bytes of temporaries at the largest moment of a layer's backward pass, when its feed-forward layer
    computes gradients: of its output, of the product of gate and up, and of the down projection's weight; or of its
    output and of both factors, in place of one of which the product is gone."""
    if is_sparse:
        return experts.in_backward(use, tokens)
    sizes, e = LayerSizes.of(use), use.itemsize
    h, f = sizes.hidden, sizes.units
    of_weight = e * h * f if use.learns and use.adapters is None else 0
    return max(tokens * e * (h + f) + of_weight, tokens * e * (h + 2 * f))


def in_forward_of_layers(use: ModelUse, tokens: int, attended: int, *, is_only: bool = False) -> int:
    """Returns the bytes of the tensors of the layer that has most at the largest moment of a forward pass without
    gradients: the embedding's output, the layer's input, the residual and the norm's output, with activated gate, up
    and their product in the feed-forward layer; or, before, with queries, keys and values, rotated, unpacked, and the
    attention's output.

    Args:
        use: Use of the model.
        tokens: Tokens that the layer computes.
        attended: Tokens of the grids that attention computes.
        is_only: Whether the embedding's output, or what a pipeline stage has received, is the layer's input.
    """
    sizes, e = LayerSizes.of(use), use.itemsize
    h, q, k = sizes.hidden * use.stream_itemsize, sizes.query, sizes.key
    # An adapter's output and its scaled copy are there beside the layer's own.
    dense = tokens * e * (4 if use.adapters else 3) * sizes.units
    units = (experts.in_forward(use, tokens) if kind.is_sparse else dense for kind in use.shape.layer_kinds)
    feed_forward = tokens * (3 if is_only else 4) * h + max(units)
    attention = tokens * (3 * h + e * (q + 2 * k)) + attended * e * (2 * q + 2 * k)
    return max(feed_forward, attention)


def rotary(use: ModelUse, tokens: int) -> int:
    """Returns the bytes of sine and cosine of each token's position, which all layers share."""
    return 2 * tokens * use.shape.head_dim * use.stream_itemsize


def logits_at_a_time(use: ModelUse, scored: int) -> int:
    """Returns the number of logits on this rank that are computed at a time: of a share of the scored tokens."""
    vocabulary = vocabulary_of_rank(use)
    positions = max(1, MOST_LOGITS // vocabulary)
    if not use.on_gpu:
        positions = min(positions, max(CACHED_LOGITS // vocabulary, POSITIONS_TOGETHER))
    return min(positions, scored) * vocabulary


def vocabulary_of_rank(use: ModelUse) -> int:
    """Returns the tokens of the vocabulary whose logits a rank computes: a part of t, rounded up."""
    return -(-use.shape.vocabulary // use.mesh[1])


def in_forward_of_head(use: ModelUse, scored: int) -> int:
    """Returns the bytes of temporaries while the head computes log-probabilities without gradients: hidden states of
    the scored positions, as the norm gives them and selected; logits of one chunk and their exponentials in float32."""
    if use.shape.head != "lm":
        return scored * FLOAT32
    hidden = 2 * scored * use.shape.hidden * use.itemsize
    return hidden + logits_at_a_time(use, scored) * 2 * FLOAT32


def in_backward_of_head(use: ModelUse, scored: int) -> int:
    """Returns the bytes of temporaries in the head's backward pass: gradients of the scored hidden states; two chunks
    of logits in float32, and rounded for products; the gradient of the output layer, summed in float32, and one
    chunk's product, which on a CPU is cast to be added."""
    if use.shape.head != "lm":
        return scored * use.shape.hidden * use.itemsize
    e, logits = use.itemsize, logits_at_a_time(use, scored)
    weight = vocabulary_of_rank(use) * use.shape.hidden
    rounded = e if e < FLOAT32 else 0
    of_weight = weight * (FLOAT32 + e + (FLOAT32 if rounded and not use.on_gpu else 0))
    trains_output = use.learns and use.adapters is None
    return (
        scored * use.shape.hidden * e + logits * (2 * FLOAT32 + rounded) + (of_weight if trains_output else 0)
    )
