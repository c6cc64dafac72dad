"""`compute_advantage`: from scores, values and log-probabilities to advantages and returns, in numpy.

Everything is a function of jagged columns of response tokens [sum(lengths)]; there is no padding and no mask.
Sums run in float64 in the order of the rows, so equal columns give equal bits; columns come back as float32,
the type in which they travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from controller.config import MAX_KL_ERROR
from nccl_transfer.columns import Jagged

FloatColumn = Jagged[np.ndarray]

EPS = 1e-8
KL_KINDS = ("k1", "k2", "k3")
_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def kl_estimate(log_probs: FloatColumn, ref_log_probs: FloatColumn, kind: str) -> FloatColumn:
    """Estimate KL(policy || reference) at every sampled token (Schulman 2020, "Approximating KL Divergence").

    With d = log_probs - ref_log_probs: k1 = d (unbiased), k2 = d^2 / 2 (low variance), k3 = exp(-d) + d - 1
    (unbiased, low variance, not negative); k3 clamps d to +-20 and its result to +-10.

    Raises:
        ValueError: an unknown kind, or columns of different lengths.
    """
    _require_equal_lengths(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_ratio = _float64(log_probs) - _float64(ref_log_probs)
    match kind:
        case "k1":
            kl = log_ratio
        case "k2":
            kl = log_ratio**2 / 2
        case "k3":
            inverse = np.clip(-log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            kl = np.clip(np.expm1(inverse) - inverse, -_MAX_K3, _MAX_K3)
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_KINDS)}")
    return _column(kl, log_probs.lengths)


def token_rewards(
    scores: np.ndarray | FloatColumn,
    lengths: np.ndarray,
    kl: FloatColumn | None = None,
    beta: float = 0.0,
) -> FloatColumn:
    """The reward of every response token: its score minus `beta` times its KL (Ouyang et al. 2022, eq. 2).

    Args:
        scores: one score per response [rows], which goes to its last token (an empty response has none: its
            score is dropped), or jagged, one score per token.
        lengths: tokens per response [rows] int64.
        kl: the KL at each token; None when there is no reference policy.
        beta: the price of one nat of KL.

    Raises:
        ValueError: a score that is not finite (a failed reward must not train anything), `beta` without `kl`,
            or columns of different lengths.
    """
    _require_finite_scores(scores)
    if isinstance(scores, Jagged):
        _require_lengths(lengths, scores=scores)
        rewards = _float64(scores)
    else:
        rewards = _on_last_tokens(scores, lengths)
    if kl is not None:
        _require_lengths(lengths, kl=kl)
        rewards = rewards - beta * _float64(kl)
    elif beta != 0:
        raise ValueError(f"a KL penalty of {beta} in the reward needs a reference policy")
    return _column(rewards, lengths)


def gae(
    rewards: FloatColumn, values: FloatColumn, gamma: float = 1.0, lam: float = 1.0
) -> tuple[FloatColumn, FloatColumn]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) over each response.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; past the last token V = A = 0.

    Args:
        gamma: discount per token.
        lam: 0 trusts the values (one-step TD), 1 trusts the rewards (Monte Carlo).

    Returns:
        The advantages A and the returns A + V that the critic regresses to.
    """
    _require_equal_lengths(rewards=rewards, values=values)
    value = _float64(values)
    deltas = _float64(rewards) + gamma * _next_in_row(value, values.lengths) - value
    advantages = _discounted_sums(deltas, values.lengths, gamma * lam)
    return _column(advantages, values.lengths), _column(advantages + value, values.lengths)


def whiten(x: FloatColumn) -> FloatColumn:
    """Bring all tokens to mean 0 and standard deviation 1: (x - mean) / sqrt(var + 1e-8), var unbiased.

    Tokens that are all equal become 0: the epsilon keeps rounding errors from being blown up.

    Raises:
        ValueError: fewer than 2 tokens, of which there is no variance.
    """
    tokens = _float64(x)
    if tokens.size < 2:
        raise ValueError(f"whitening needs at least 2 tokens, got {tokens.size}")
    return _column((tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + EPS), x.lengths)


@dataclass(frozen=True)
class PpoAdvantage:
    """What PPO trains on, one number per response token, and what to log about it."""

    advantages: FloatColumn
    returns: FloatColumn
    metrics: dict[str, float]


def ppo_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn | None,
    values: FloatColumn,
    scores: np.ndarray | FloatColumn,
    *,
    beta: float,
    kl_kind: str = "k1",
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> PpoAdvantage:
    """The whole of `compute_advantage` for PPO: KL-penalised token rewards, GAE, whitening.

    Args:
        log_probs: of the policy that sampled the responses.
        ref_log_probs: of the reference policy, or None where the reward carries no KL (`beta` 0).
        values: of the critic, before each token.
        scores: per response [rows] or per token, see `token_rewards`.
        beta: the price of one nat of KL.
        kl_kind: see `kl_estimate`.
        gamma: see `gae`.
        lam: see `gae`.
        whiten_advantages: over all tokens of the batch; the returns never are.

    Returns:
        Advantages and returns, and as metrics: `kl/mean` (per token) and `kl/sequence_mean` (per response),
        both only with a reference; `score/mean` (per response, as the reward gave it) and `reward/mean` (per
        response, after the KL); `advantage/mean` and `advantage/std` (per token, before whitening);
        `returns/mean` (per token); `value/explained_variance` (1: perfect, 0: no better than a constant).

    Raises:
        ValueError: columns of different lengths, or what `token_rewards`, `kl_estimate` and `whiten` refuse.
    """
    _require_equal_lengths(values=values, log_probs=log_probs)
    kl = None if ref_log_probs is None else kl_estimate(log_probs, ref_log_probs, kl_kind)
    rewards = token_rewards(scores, values.lengths, kl, beta)
    advantages, returns = gae(rewards, values, gamma, lam)
    metrics = {
        "score/mean": _mean(_row_sums(scores) if isinstance(scores, Jagged) else scores.astype(np.float64)),
        "reward/mean": _mean(_row_sums(rewards)),
        "advantage/mean": _mean(_float64(advantages)),
        "advantage/std": _std(_float64(advantages)),
        "returns/mean": _mean(_float64(returns)),
        "value/explained_variance": _explained_variance(_float64(values), _float64(returns)),
    }
    if kl is not None:
        metrics |= {"kl/mean": _mean(_float64(kl)), "kl/sequence_mean": _mean(_row_sums(kl))}
    return PpoAdvantage(whiten(advantages) if whiten_advantages else advantages, returns, metrics)


class KlController(Protocol):
    """Who sets the price of KL in the reward, from one step to the next."""

    beta: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Take note of the KL measured on a batch of `num_sequences` responses."""
        ...


@dataclass
class FixedKL:
    """A constant price of KL."""

    beta: float = 0.001

    def update(self, kl: float, num_sequences: int) -> None:
        """A constant does not learn."""


@dataclass
class AdaptiveKL:
    """A price that steers the KL to a target (Ziegler et al. 2019, section 2.2); `beta` is all its state.

    Args:
        beta: where the price starts, above 0.
        target: the wanted KL, above 0, in the unit of what `update` is given (per token or per response).
        horizon: over how many responses the price follows, above 0.

    Raises:
        ValueError: an argument that is not above 0.
    """

    beta: float = 0.001
    target: float = 0.1
    horizon: int = 10_000

    def __post_init__(self) -> None:
        for name in ("beta", "target", "horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} of an adaptive KL must be above 0, got {getattr(self, name)}")

    def update(self, kl: float, num_sequences: int) -> None:
        """beta *= 1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon.

        Raises:
            ValueError: a batch so much larger than the horizon that the price could turn negative.
        """
        if MAX_KL_ERROR * num_sequences >= self.horizon:
            raise ValueError(f"{num_sequences} responses are too many for a KL horizon of {self.horizon}")
        error = float(np.clip(kl / self.target - 1, -MAX_KL_ERROR, MAX_KL_ERROR))
        self.beta *= 1 + error * num_sequences / self.horizon


def _float64(x: FloatColumn) -> np.ndarray:
    return x.values.astype(np.float64)


def _column(values: np.ndarray, lengths: np.ndarray) -> FloatColumn:
    return Jagged(values.astype(np.float32), lengths)


def _last_tokens(lengths: np.ndarray) -> np.ndarray:
    """Index of the last token of every row that has one."""
    return np.cumsum(lengths)[lengths > 0] - 1


def _on_last_tokens(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if scores.shape != lengths.shape:
        raise ValueError(f"expected one score for each of {len(lengths)} responses, got shape {scores.shape}")
    rewards = np.zeros(lengths.sum())
    rewards[_last_tokens(lengths)] = scores[lengths > 0]
    return rewards


def _next_in_row(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """x_{t+1} at each t, 0 at the last token of a row."""
    shifted = np.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[_last_tokens(lengths)] = 0
    return shifted


def _discounted_sums(values: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """y_t = x_t + discount y_{t+1} within every row.

    One step per time from the right, for all rows that reach it at once: sorted by length they are a prefix,
    so that a few long rows cost no padding.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[longest_first]
    times = np.arange(lengths.max(initial=0))
    num_reaching = len(lengths) - np.searchsorted(np.sort(lengths), times, side="right")
    sums = np.empty_like(values)
    carry = np.zeros(len(lengths))
    for t in reversed(times):
        active = carry[: num_reaching[t]]
        tokens = starts[: num_reaching[t]] + t
        active *= discount
        active += values[tokens]
        sums[tokens] = active
    return sums


def _row_sums(x: FloatColumn) -> np.ndarray:
    """[rows] float64, added from left to right."""
    row_of_token = np.repeat(np.arange(len(x.lengths)), x.lengths)
    return np.bincount(row_of_token, weights=x.values, minlength=len(x.lengths))


def _mean(x: np.ndarray) -> float:
    return float(x.sum() / max(x.size, 1))


def _std(x: np.ndarray) -> float:
    return float(x.std(ddof=1)) if x.size > 1 else 0.0


def _explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary: nothing to be explained."""
    variance = _std(returns) ** 2
    return 1 - _std(returns - values) ** 2 / variance if variance > EPS else 0.0


def _require_finite_scores(scores: np.ndarray | FloatColumn) -> None:
    finite = np.isfinite(scores.values if isinstance(scores, Jagged) else scores)
    if not finite.all():
        unit = "token" if isinstance(scores, Jagged) else "response"
        bad = np.flatnonzero(~finite)
        raise ValueError(f"{bad.size} of {finite.size} scores are not finite, the first at {unit} {bad[0]}")


def _require_lengths(lengths: np.ndarray, **columns: FloatColumn) -> None:
    for name, column in columns.items():
        if not np.array_equal(column.lengths, lengths):
            raise ValueError(
                f"{name} does not fit the responses row by row: "
                f"{len(column.values)} tokens in {column.rows} rows against {lengths.sum()} in {len(lengths)}"
            )


def _require_equal_lengths(**columns: FloatColumn) -> None:
    first = next(iter(columns.values()))
    _require_lengths(first.lengths, **columns)
