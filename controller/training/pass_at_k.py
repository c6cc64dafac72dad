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
        return {"/scores": scores, "/solved": np.sum(scores >= solved_at, axis=1)}, (responses | scored,)

    def summarize(values: Mapping[str, np.ndarray]) -> dict[str, float]:
        solved = values["/solved"]
        ks = [2**power for power in range(samples.bit_length()) if 2**power < samples]
        shares = {f"pass_at_{k}": float(np.mean(pass_at_k(solved, samples, k))) for k in (*ks, samples)}
        return {"sampled_reward": mean_of_scored(values["/scores"]), **shares}

    return Evaluation(measure, summarize)


def pass_at_k(solved: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Estimates for each prompt the probability that at least one of k responses solves it, without bias (Chen et al.
    2021, arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        solved: Number c of responses that solve each prompt [prompts] int64.
        samples: Number n of responses to each prompt.
        k: Number of attempts, at most `samples`.

    Returns:
        Probabilities [prompts] float64.
    """
    table = np.array([1 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)])
    return table[np.asarray(solved, np.int64)]
