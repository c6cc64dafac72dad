"""Sampling of tokens by pure functions of logits and (seed, step, call, row), without a generator that has state."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.rollout.base import SamplingOptions

_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)

_CANDIDATES = 1024
"""Most probable tokens of a row among which top-p is looked for first; mostly it ends among far fewer."""


def row_seeds(seed: int, step: int, call: str, rows: np.ndarray) -> np.ndarray:
    """Returns one seed per row of a call, [rows] non-negative int64, for the row's own stream of random numbers.

    Args:
        seed: seed of the training run.
        step: number of the training step.
        call: name of the call within the step; different names give different seeds.
        rows: number of each row in the call's whole batch over all ranks, [rows] int64.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{call}".encode()).digest()
    key = np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)
    counter = rows.astype(np.uint64)
    low, high, *_ = _philox4x32((counter & _LOW_32, counter >> _SHIFT_32, np.uint64(0), np.uint64(0)), key)
    return ((high << _SHIFT_32 | low) >> np.uint64(1)).astype(np.int64)


def uniforms(row_seeds: np.ndarray, n: int) -> np.ndarray:
    """Returns the first `n` random numbers of each row's stream, [rows, n] float64, uniform in the open interval (0,
    1).

    Number i of a row is the same for every `n` and independent of other rows.
    """
    blocks = np.arange((n + 3) // 4, dtype=np.uint64)
    zero = np.uint64(0)
    words = _philox4x32((blocks, zero, zero, zero), row_seeds.astype(np.uint64)[:, None])
    bits = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(len(row_seeds), -1)[:, :n]
    return (bits.astype(np.float64) + 0.5) / 2**32


def log_distribution(logits_BV: Tensor, sampling: SamplingOptions) -> Tensor:
    """Returns the log-probabilities that tokens are drawn with, [B, V] float32; -inf for excluded tokens.

    Applies temperature, then min-p, then top-k, then top-p to the rest, and normalizes (the order of vLLM).
    """
    log_probs_BV = (logits_BV.float() / sampling.temperature).log_softmax(dim=-1)
    if sampling.min_p:
        least_B1 = log_probs_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        log_probs_BV = _keep(log_probs_BV, log_probs_BV >= least_B1)
    if 0 < sampling.top_k < log_probs_BV.shape[-1]:
        kth_B1 = log_probs_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        log_probs_BV = _keep(log_probs_BV, log_probs_BV >= kth_B1)
    if sampling.top_p < 1:
        log_probs_BV = _keep(log_probs_BV, _nucleus(log_probs_BV, sampling.top_p))
    return log_probs_BV


def _nucleus(log_probs_BV: Tensor, top_p: float) -> Tensor:
    """Returns which tokens are in the smallest set of most probable ones whose probability reaches `top_p`, [B, V];
    of equally probable tokens, those of lower ids come first.

    Only the most probable tokens are sorted, and summed in float64: at first _CANDIDATES of each row, and more until
    each row's set ends before the last of them. The set is that of a sort of the whole row.
    """
    vocabulary = log_probs_BV.shape[-1]
    num_candidates = min(_CANDIDATES, vocabulary)
    while True:
        if num_candidates < vocabulary:
            ids_BK = log_probs_BV.topk(num_candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
        else:
            ids_BK = torch.arange(vocabulary, device=log_probs_BV.device).expand_as(log_probs_BV)
        sorted_BK, order_BK = log_probs_BV.gather(1, ids_BK).sort(dim=-1, descending=True, stable=True)
        probs_BK = sorted_BK.double().exp()
        kept_BK = probs_BK.cumsum(dim=-1) - probs_BK < top_p
        # Tokens as probable as the last candidate may be missing.
        is_whole = num_candidates == vocabulary or not (kept_BK & (sorted_BK <= sorted_BK[:, -1:])).any()
        if is_whole:
            kept_BV = torch.zeros_like(log_probs_BV, dtype=torch.bool)
            return kept_BV.scatter(1, ids_BK.gather(1, order_BK), kept_BK)
        num_candidates = min(16 * num_candidates, vocabulary)


def draw(log_probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draws one token per row by inversion of the cumulative distribution, which is summed in float64. A token of
    probability 0 is never drawn.

    Args:
        log_probs_BV: log-probabilities of all tokens.
        uniforms_B: one number from (0, 1) per row.

    Returns:
        Token ids, [B] int64.
    """
    cumulative_BV = log_probs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    # The first token whose cumulative probability is above the target; nan, which is above nothing, is clamped.
    tokens_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0]
    return tokens_B.clamp(max=log_probs_BV.shape[-1] - 1)


def _penalized(logits_BV: Tensor, penalty: float, context_BT: Tensor) -> Tensor:
    """Returns logits, [B, V] float32, with those of the tokens in each row's context divided by `penalty` where they
    are positive, and multiplied where they are negative (Keskar et al. 2019, arXiv 1909.05858, section 4.1, as in
    Hugging Face and vLLM). A token that is there several times is penalized once."""
    logits_BV = logits_BV.float()
    seen_BT = logits_BV.gather(1, context_BT)
    return logits_BV.scatter(1, context_BT, torch.where(seen_BT < 0, seen_BT * penalty, seen_BT / penalty))


def padded_context(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the token ids of rows for `choose`, [B, T] int64 in host memory: each is padded with its first token,
    which changes nothing."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows])


def choose(
    logits_BV: Tensor, sampling: SamplingOptions, uniforms_B: Tensor, context_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses the next token of each row, greedily or by sampling.

    Args:
        logits_BV: logits of all tokens.
        sampling: options of sampling.
        uniforms_B: one number from (0, 1) per row; ignored if greedy.
        context_BT: token ids of the prompt and the response so far, such as `padded_context` returns. None: the engine
            has no repetition penalty.

    Returns:
        Token ids, [B] int64, and their log-probabilities as `Generation` defines them, [B] float32.

    Raises:
        ValueError: there is a repetition penalty, and no context.
    """
    if sampling.repetition_penalty != 1:
        if context_BT is None:
            raise ValueError("the rollout engine does not support repetition_penalty")
        logits_BV = _penalized(logits_BV, sampling.repetition_penalty, context_BT)
    if sampling.greedy:
        log_probs_BV = logits_BV.float().log_softmax(dim=-1)
        tokens_B = logits_BV.argmax(dim=-1)
    else:
        log_probs_BV = log_distribution(logits_BV, sampling)
        tokens_B = draw(log_probs_BV, uniforms_B)
    return tokens_B, log_probs_BV.gather(1, tokens_B[:, None])[:, 0]


def _keep(log_probs_BV: Tensor, kept_BV: Tensor) -> Tensor:
    """Returns the log-probabilities with -inf where `kept_BV` is False, normalized again."""
    return log_probs_BV.masked_fill(~kept_BV, -torch.inf).log_softmax(dim=-1)


def _philox4x32(counter: tuple[np.ndarray | np.uint64, ...], key: np.ndarray) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), one block per element.

    Args:
        counter: four 32-bit words, as uint64 arrays that broadcast.
        key: 64 bits each.

    Returns:
        Four random 32-bit words as uint64 arrays.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key & _LOW_32, key >> _SHIFT_32
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> _SHIFT_32) ^ c1 ^ k0, product1 & _LOW_32
        c2, c3 = (product0 >> _SHIFT_32) ^ c3 ^ k1, product0 & _LOW_32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW_32, (k1 + np.uint64(0xBB67AE85)) & _LOW_32
    return c0, c1, c2, c3
