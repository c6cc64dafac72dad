"""Differences between the log-probabilities of the training engine and those of the rollout engine."""

from __future__ import annotations

from torch import Tensor

from rlhf.v1 import actor_pb2
from services.roles.losses import kl_penalty


def rollout_parity(rollout_log_probs: Tensor, log_probs: Tensor) -> actor_pb2.RolloutParity:
    """Largest and summed absolute differences and the summed k3 estimate of the KL, in float64.

    Args:
        rollout_log_probs: log-probabilities that the tokens were sampled with, [tokens].
        log_probs: the training engine's, for the same tokens at the same temperature, [tokens].

    Raises:
        ValueError: the two have different lengths.
    """
    if len(rollout_log_probs) != len(log_probs):
        raise ValueError(
            f"rollout_log_probs has {len(rollout_log_probs)} values for {len(log_probs)} response tokens"
        )
    rollout, training = rollout_log_probs.double(), log_probs.double().to(rollout_log_probs.device)
    differences = (training - rollout).abs()
    return actor_pb2.RolloutParity(
        tokens=len(differences),
        max_abs=float(differences.max()) if len(differences) else 0.0,
        sum_abs=float(differences.sum()),
        sum_kl=float(kl_penalty(rollout, training, "k3").sum()),
    )
