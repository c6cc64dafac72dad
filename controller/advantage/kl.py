"""KL divergence between policy and reference policy: estimators, and controllers of its coefficient in the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from controller.advantage.columns import FloatColumn, float64, make_column, require_equal_lengths
from controller.config.algorithm import MAX_KL_ERROR, AlgorithmTable

KL_KINDS = ("k1", "k2", "k3")
_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def kl_estimate(log_probs: FloatColumn, ref_log_probs: FloatColumn, kind: str) -> FloatColumn:
    """Estimates KL(policy || reference) at every sampled token, in nats (Schulman 2020, "Approximating KL
    Divergence").

    With d = log_probs - ref_log_probs: k1 = d (unbiased), k2 = d^2 / 2 (low variance), k3 = exp(-d) + d - 1
    (unbiased, low variance, not negative); k3 clamps d to +-20 and its result to +-10.

    Raises:
        ValueError: `kind` is unknown, or the columns have different lengths.
    """
    require_equal_lengths(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_ratio = float64(log_probs) - float64(ref_log_probs)
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
    return make_column(kl, log_probs.lengths)


class KlController(Protocol):
    """Protocol of objects that choose the coefficient `beta` of the KL penalty in the reward, step by step."""

    beta: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Updates `beta` after a step, from the mean KL of its `num_sequences` responses."""
        ...


@dataclass
class FixedKL:
    """KL controller with a constant coefficient `beta`."""

    beta: float = 0.001

    def update(self, kl: float, num_sequences: int) -> None:
        """Does nothing: `beta` is constant."""


@dataclass
class AdaptiveKL:
    """KL controller that adapts the coefficient so that the KL approaches a target (Ziegler et al. 2019, section
    2.2); `beta` is its whole state.

    Args:
        beta: Initial coefficient, above 0.
        target: Target of the KL, above 0, in the unit of the KL given to `update` (per token or per response).
        horizon: Number of responses over which the coefficient adapts, above 0.

    Raises:
        ValueError: An argument is not above 0.
    """

    beta: float = 0.001
    target: float = 0.1
    horizon: int = 10_000

    def __post_init__(self) -> None:
        for name in ("beta", "target", "horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} of an adaptive KL must be above 0, got {getattr(self, name)}")

    def update(self, kl: float, num_sequences: int) -> None:
        """Multiplies `beta` by 1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon.

        Raises:
            ValueError: `num_sequences` is so much larger than the horizon that `beta` could become negative.
        """
        if MAX_KL_ERROR * num_sequences >= self.horizon:
            raise ValueError(f"{num_sequences} responses are too many for a KL horizon of {self.horizon}")
        error = float(np.clip(kl / self.target - 1, -MAX_KL_ERROR, MAX_KL_ERROR))
        self.beta *= 1 + error * num_sequences / self.horizon


def steer(
    controller: KlController, metrics: dict[str, float], num_sequences: int, *, updates_actor: bool = True
) -> None:
    """Adds `controller.beta` to the metrics of a step as `kl/coefficient`, and then updates the controller, for the
    next step, with the mean KL per response in these metrics, `kl/sequence_mean`, which must be there.

    Args:
        controller: The KL controller.
        metrics: Metrics of the step, changed in place.
        num_sequences: Number of responses in the step.
        updates_actor: Whether the step updates the policy. If not, the controller stays as it is: its coefficient
            would drift without any effect on the KL.
    """
    metrics["kl/coefficient"] = controller.beta
    if updates_actor:
        controller.update(metrics["kl/sequence_mean"], num_sequences)


def kl_controller(algorithm: AlgorithmTable) -> KlController:
    """Makes the KL controller of a configuration: `AdaptiveKL` where `kl_target` is not 0, else `FixedKL`."""
    if algorithm.kl_target:
        return AdaptiveKL(algorithm.kl_reward_coefficient, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKL(algorithm.kl_reward_coefficient)
