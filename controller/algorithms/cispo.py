"""CISPO (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585): GRPO's advantages under a loss that clips the weight of a
token instead of its gradient, so rare tokens with large ratios still contribute. Only the upper clip has an effect."""

from __future__ import annotations

from controller.algorithms.grpo import compute_advantage
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample


@algorithm(
    services=("actor", "reward"),
    options=GroupOptions,
    defaults={"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
    check=check_sampling,
    further=responses_of_rounds,
)
def cispo(run: Run, options: GroupOptions) -> None:
    """Runs CISPO, which needs services actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))
