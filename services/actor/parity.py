"""Measures the difference between the log-probabilities of the training engine and those of the rollout engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.v1 import actor_pb2
from services.roles.losses import kl_penalty

DRIFT = "log-probabilities of rollout and training are too far apart"
"""Why rows are kept whose log-probabilities drift."""


def rollout_parity(rollout_log_probs: Tensor, log_probs: Tensor) -> actor_pb2.RolloutParity:
    """Returns the largest and the summed absolute difference of the log-probabilities, and the summed k3 estimate of
    KL(rollout || training), computed in float64, in nats.

    Args:
        rollout_log_probs: log-probabilities of the rollout engine when it sampled the tokens, [tokens].
        log_probs: log-probabilities of the training engine for the same tokens at the same temperature, [tokens].

    Raises:
        ValueError: the two tensors have different lengths.
    """
    if len(rollout_log_probs) != len(log_probs):
        raise ValueError(
            f"rollout_log_probs has {len(rollout_log_probs)} values for {len(log_probs)} response tokens"
        )
    rollout, training = rollout_log_probs.double(), log_probs.double().to(rollout_log_probs.device)
    differences = (training - rollout).abs()
    largest = differences.max() if len(differences) else differences.sum()
    measured = torch.stack((largest, differences.sum(), kl_penalty(rollout, training, "k3").sum()))
    max_abs, sum_abs, sum_kl = measured.tolist()
    return actor_pb2.RolloutParity(tokens=len(differences), max_abs=max_abs, sum_abs=sum_abs, sum_kl=sum_kl)


def drifting_rows(rollout: Jagged[Tensor], log_probs: Jagged[Tensor], limit: float) -> np.ndarray:
    """Returns the indices of the rows with a token whose two log-probabilities are further apart than `limit` nats, or
    of which one is NaN, [n] int64.

    Args:
        rollout, log_probs: Log-probabilities of the rollout engine and of the training engine, of equal lengths.
        limit: Largest absolute difference allowed. 0: any is.
    """
    if not limit:
        return np.empty(0, np.int64)
    differences = (log_probs.values.double().to(rollout.values.device) - rollout.values.double()).abs()
    is_far = (~(differences <= limit)).cpu().numpy()
    return np.unique(np.repeat(np.arange(rollout.rows), rollout.lengths)[is_far])
