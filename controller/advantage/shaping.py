"""Shapes the scores of rewards before advantages are computed from them: normalization, then clipping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.advantage.columns import EPS, A, Scores, require_finite
from nccl_transfer.refs.columns import Jagged


@dataclass
class ScoreMoments:
    """Mean and variance of all scores that were added, by the update of Chan et al. (1979).

    Attributes:
        count: Number of scores.
        mean: Their mean.
        squares: Sum of their squared differences from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, scores: Scores) -> None:
        """Adds scores, one per response [rows].

        Raises:
            ValueError: There is one score per token, or one is not finite; nothing was added.
        """
        if isinstance(scores, Jagged):
            raise ValueError("rewards per token cannot be normalized, only one reward per response")
        require_finite(scores)
        values, before = scores.astype(np.float64), self.count
        if not values.size:
            return
        mean = float(values.mean())
        distance, self.count = mean - self.mean, before + values.size
        self.squares += float(((values - mean) ** 2).sum()) + distance**2 * before * values.size / self.count
        self.mean += distance * values.size / self.count

    @property
    def variance(self) -> float:
        """Unbiased variance of the scores; 0 where there are fewer than two."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


def shape_scores(
    scores: A, moments: ScoreMoments | None = None, clip: tuple[float, float] | None = None
) -> A:
    """Returns scores normalized by moments, (s - mean) / sqrt(variance + 1e-8), and then clipped.

    Args:
        scores: One score per response [rows], or one per token (jagged), which can only be clipped, each by itself.
        moments: Mean and variance; None: the scores are not normalized.
        clip: Lowest and highest score; None: the scores are not clipped.
    """
    if isinstance(scores, Jagged):
        return Jagged(_shaped(scores.values, moments, clip), scores.lengths)
    return _shaped(scores, moments, clip)


def _shaped(values: np.ndarray, moments: ScoreMoments | None, clip: tuple[float, float] | None) -> np.ndarray:
    if moments is not None:
        values = (values.astype(np.float64) - moments.mean) / np.sqrt(moments.variance + EPS)
    return values if clip is None else np.clip(values, *clip)
