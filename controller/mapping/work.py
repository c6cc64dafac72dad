"""Operations and bytes that the passes of a model need, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from controller.mapping.workload import Workload
from settings.memory.shape import ModelShape

ID_BYTES, FLOAT_BYTES = 4, 4
KERNELS_PER_LAYER, KERNELS_OF_EXPERTS = 34, 18
"""Operators of a layer in a decoding step of transformers' Llama: 12 of norms, 3 projections, 9 of rotary positions and
the cache, 3 of attention, 1 output projection, 4 of the feed-forward layer, 2 residuals. A sparse layer has, in place
of the 4, 4 of the router, 9 of sorting tokens and their weights by experts, 4 of the experts, and 5 of weighing their
outputs and adding them up."""


@dataclass(frozen=True)
class RowMeans:
    """Means over the rows of a workload.

    Attributes:
        tokens: Tokens of prompt and response.
        pairs: Pairs of tokens that attend to each other.
        scored: Tokens of the response.
    """

    tokens: float
    pairs: float
    scored: float


@lru_cache
def row_means(workload: Workload) -> RowMeans:
    """Returns the means over rows whose prompts and responses have independent lengths."""
    pairs = sum(
        prompt_share * response_share * (prompt + response) * (prompt + response + 1) / 2
        for prompt, prompt_share in workload.prompts.shares
        for response, response_share in workload.responses.shares
    )
    return RowMeans(workload.prompts.mean + workload.responses.mean, pairs, workload.responses.mean)


def forward_flops(shape: ModelShape, tokens: float, pairs: float, scored: float) -> float:
    """Returns the operations of a forward pass: two for each token and weight that computes it (Kaplan et al. 2020,
    section 2.1), for each pair of tokens two products of the size of the queries, and logits of scored tokens."""
    in_layers = 2 * shape.read_by(1) * tokens + 4 * shape.layers * shape.query * pairs
    head = 2 * shape.vocabulary * shape.hidden * scored if shape.head == "lm" else 0
    return in_layers + head


def decoded_weights(shape: ModelShape, rows: float) -> float:
    """Returns the parameters that a decoding step of `rows` rows reads, which for one row are those that compute each
    row: the layers' without experts that no row chooses, and all others but the embedding, unless it computes the
    logits."""
    ends = sum(weight.numel for weight in shape.end) + (
        shape.embedding.numel if shape.shares_embedding else 0
    )
    return ends + shape.read_by(rows)


def kernels(shape: ModelShape) -> int:
    """Returns the operators of all layers in a decoding step."""
    sparse = sum(len(kind.numbers) for kind in shape.layer_kinds if kind.is_sparse)
    return shape.layers * KERNELS_PER_LAYER + sparse * KERNELS_OF_EXPERTS


def column_bytes(name: str, workload: Workload) -> float:
    """Returns the mean bytes per row of a column: ids, one number per row, or one per response token. Texts take
    four bytes per token."""
    if name in ("prompt", "prompt_ids"):
        return ID_BYTES * workload.prompts.mean
    per_row = ("rewards", "costs", "baselines", "group", "prompt_number", "response_tokens")
    if name in (*per_row, "metadata", "ground_truth"):
        return 2 * FLOAT_BYTES
    return FLOAT_BYTES * workload.responses.mean
