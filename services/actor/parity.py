"""How far the training engine's log-probabilities are from those that the rollout engine sampled with."""

from __future__ import annotations

from torch import Tensor

from rlhf.v1 import actor_pb2
from services.roles.losses import kl_penalty


def rollout_parity(rollout_log_probs: Tensor, log_probs: Tensor) -> actor_pb2.RolloutParity:
    """Largest and summed differences, in float64.

    Args:
        rollout_log_probs: what tokens were sampled with, [tokens].
        log_probs: what the training engine finds for the same tokens at the same temperature, [tokens].

    Raises:
        ValueError: there is not one value of each per token.
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
