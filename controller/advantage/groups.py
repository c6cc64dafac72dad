"""Baselines without a critic: a group, all responses to one prompt, is compared with its own mean.

`group` [rows] int64 has the number of each response's group. The rows of a group need not be neighbours, and groups
may differ in size, as they do where responses were dropped. All functions compute in float64.
"""

from __future__ import annotations

import numpy as np

from controller.advantage.columns import (
    Advantage,
    Scores,
    advantage_metrics,
    mean,
    require_finite,
    sequence_scores,
    spread,
)

STD_EPS = 1e-6


def group_sizes(group: np.ndarray) -> np.ndarray:
    """Returns for each response the number of responses in its group [rows] int64."""
    numbers, counts = _numbered(group)
    return counts[numbers]


def group_means(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns for each response the mean score of its group [rows], exactly where all are equal; 0 for a response that
    is alone in its group."""
    sizes = group_sizes(group)
    # A mean that is rounded would give equal scores advantages, which a standard deviation close to 0 makes large.
    means = np.where(differs_within(scores, group), _group_sums(scores, group) / sizes, scores)
    return np.where(sizes > 1, means, 0.0)


def group_stds(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns for each response the unbiased standard deviation of the scores of its group [rows]; 1 for a response
    that is alone in its group."""
    sizes = group_sizes(group)
    squares = _group_sums((scores - group_means(scores, group)) ** 2, group)
    return np.where(sizes > 1, np.sqrt(squares / np.maximum(sizes - 1, 1)), 1.0)


def centred(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Computes the advantages of Dr. GRPO [rows]: s - mean(group), for the score s of each response (Liu et al. 2025,
    arXiv 2503.20783, section 3.2)."""
    return scores - group_means(scores, group)


def standardized(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Computes the advantages of GRPO [rows]: (s - mean(group)) / (std(group) + 1e-6), for the score s of each
    response (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)."""
    return centred(scores, group) / (group_stds(scores, group) + STD_EPS)


def leave_one_out(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Computes the advantages of RLOO [rows]: the score s of each response minus the mean score of the other n - 1 in
    its group, which is n / (n - 1) (s - mean(group)) (Ahmadian et al. 2024, arXiv 2402.14740). For a response that
    is alone in its group it is s."""
    sizes = group_sizes(group)
    return centred(scores, group) * np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 1.0)


def differs_within(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns for each response whether the scores of its group differ [rows] bool; where they are all equal, its
    advantage is 0."""
    numbers, counts = _numbered(group)
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, numbers, scores)
    np.maximum.at(highest, numbers, scores)
    return (highest > lowest)[numbers]


def group_advantage(
    scores: Scores, lengths: np.ndarray, group: np.ndarray, *, normalize_std: bool = True
) -> Advantage:
    """Computes the advantages of GRPO or Dr. GRPO: one per response, which applies to all of its tokens.

    Args:
        scores: One score per response [rows], or one per token (jagged), which are summed.
        lengths: Tokens per response [rows] int64.
        group: Number of each response's group, that is its prompt [rows] int64.
        normalize_std: Whether to divide by the group's standard deviation (GRPO), or not (Dr. GRPO).

    Returns:
        Advantages [rows], and metrics: `score/mean` and `reward/mean` (per response, here equal), `group/same_score`
        (share of the responses in groups whose scores are all equal, so that their advantages are 0),
        `advantage/mean` and `advantage/std` (per token).

    Raises:
        ValueError: A score is not finite, or there is not one score and one group for each response.
    """
    per_row = sequence_scores(scores)
    require_rows(len(lengths), scores=per_row, group=group)
    values = standardized(per_row, group) if normalize_std else centred(per_row, group)
    metrics = {"score/mean": mean(per_row), "reward/mean": mean(per_row)}
    metrics |= group_metrics(per_row, group) | advantage_metrics(spread(values, lengths))
    return Advantage(values, metrics)


def group_metrics(scores: np.ndarray, group: np.ndarray) -> dict[str, float]:
    """Returns the metric `group/same_score`: the share of the responses in groups whose scores are all equal."""
    return {"group/same_score": mean((~differs_within(scores, group)).astype(np.float64))}


def require_rows(rows: int, **columns: np.ndarray) -> None:
    """Raises ValueError where a column, given as NAME=COLUMN, does not have one number for each of `rows` responses, or
    has a number that is not finite."""
    for name, column in columns.items():
        if column.shape != (rows,):
            raise ValueError(f"expected one {name} for each of {rows} responses, got shape {column.shape}")
        require_finite(column)


def _numbered(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Renumbers groups from 0. Returns the new number of each response's group [rows] and each group's size
    [groups]."""
    _, numbers, counts = np.unique(group, return_inverse=True, return_counts=True)
    return numbers, counts


def _group_sums(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    numbers, counts = _numbered(group)
    return np.bincount(numbers, weights=values, minlength=len(counts))[numbers]
