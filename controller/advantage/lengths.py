"""Rewards that depend on the length of a response alone."""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """Computes DAPO's soft overlong punishment of responses close to the maximum length [rows] float64, from -1 to 0
    (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    With L = max_length and B = buffer: 0 up to L - B tokens, (L - B - length) / B from there to L, and -1 beyond.

    Args:
        lengths: Tokens per response [rows] int64.
        max_length: Maximum length of a response, in tokens.
        buffer: Number of tokens over which the punishment grows, from 1 to `max_length`.

    Raises:
        ValueError: `buffer` is outside of this range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the overlong buffer must be from 1 to {max_length} tokens, got {buffer}")
    return np.clip((max_length - buffer - lengths) / buffer, -1.0, 0.0)
