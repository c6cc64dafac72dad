"""Evaluation of a policy by sampled responses: the share of prompts that k attempts solve."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from controller.role_groups.dataflow import FutureBatch
from controller.training.evaluation import Evaluation, Measured, mean_of_scored, row_scores
from controller.training.rewards import Reward
from controller.training.roles import Actor


def sampled_evaluation(actor: Actor, reward: Reward, samples: int, solved_at: float) -> Evaluation:
    """Returns the `Evaluation` that samples several responses to each held-out prompt and scores them.

    Args:
        actor: The policy.
        reward: The reward.
        samples: Number of responses to each prompt.
        solved_at: Lowest score of a response that solves its prompt.
    """

    def measure(prompts: FutureBatch) -> Measured:
        rows = prompts.repeat(samples)
        responses = actor.generate_sequences(rows)
        scored = reward.score_for_eval(rows | responses)
        scores = row_scores(scored).reshape(-1, samples)
        counts = {
            "/scored": np.sum(~np.isnan(scores), axis=1),
            "/solved": np.sum(scores >= solved_at, axis=1),
        }
        return {"/scores": scores} | counts, (responses | scored,)

    def summarize(values: Mapping[str, np.ndarray]) -> dict[str, float]:
        scores = values["/scores"]
        count = int(np.sum(np.isnan(scores)))
        ks = [2**power for power in range(samples.bit_length()) if 2**power < samples]
        shares = {
            f"pass_at_{k}": mean_of_scored(pass_at_k(values["/solved"], values["/scored"], k))
            for k in (*ks, samples)
        }
        dropped = {"sampled_rows_dropped": float(count)} if count else {}
        return {"sampled_reward": mean_of_scored(scores)} | shares | dropped

    return Evaluation(measure, summarize)


def pass_at_k(solved: np.ndarray, scored: np.ndarray, k: int) -> np.ndarray:
    """Estimates for each prompt the probability that at least one of k responses solves it, without bias (Chen et al.
    2021, arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        solved: Number c of responses that solve each prompt [prompts] int64.
        scored: Number n of responses to each prompt that were scored [prompts] int64.
        k: Number of attempts.

    Returns:
        Probabilities [prompts] float64; NaN for a prompt with fewer than k responses that were scored.
    """
    estimates = [
        1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for c, n in zip(solved.tolist(), scored.tolist(), strict=True)
    ]
    return np.array(estimates, np.float64)
