"""GSPO (Zheng et al. 2025, arXiv 2507.18071): GRPO with the probability ratio of the whole response, to the power of
one over its length, since the reward is that of the whole response. Its clip range is far narrower."""

from __future__ import annotations

from controller.algorithms.grpo import compute_advantage
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample


@algorithm(
    services=("actor", "reward"),
    options=GroupOptions,
    defaults={
        "surrogate": "gspo",
        "aggregation": "seq-mean-token-mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
    check=check_sampling,
    further=responses_of_rounds,
)
def gspo(run: Run, options: GroupOptions) -> None:
    """Runs GSPO, which needs services actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))
