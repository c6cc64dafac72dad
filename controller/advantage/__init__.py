"""`compute_advantage` in numpy: advantages and returns from scores, values and log-probabilities.

All functions take jagged columns of response tokens [sum(lengths)], without padding and masks. All stages compute in
float64, and sums follow the order of the rows, so equal columns give equal bits. Columns of an update are rounded once,
to float32, when they are sent (`Advantage.columns`), so differences of large scores keep their precision.
"""

from controller.advantage.columns import Advantage, FloatColumn, Scores, sequence_scores, spread, whiten
from controller.advantage.gae import (
    discounted_returns,
    gae,
    penalized_rewards,
    ppo_advantage,
    token_rewards,
)
from controller.advantage.kl import AdaptiveKL, FixedKL, KlController, kl_controller, kl_estimate, steer

__all__ = [
    "AdaptiveKL",
    "Advantage",
    "FixedKL",
    "FloatColumn",
    "KlController",
    "Scores",
    "discounted_returns",
    "gae",
    "kl_controller",
    "kl_estimate",
    "penalized_rewards",
    "ppo_advantage",
    "sequence_scores",
    "spread",
    "steer",
    "token_rewards",
    "whiten",
]
