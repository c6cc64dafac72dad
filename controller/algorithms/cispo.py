"""CISPO (MiniMax-M1, Chen et al. 2025, arXiv 2506.13585): GRPO's advantages under a loss that clips the weight of a
token instead of its gradient, so rare tokens with large ratios still contribute. Only the upper clip has an effect."""

from __future__ import annotations

from controller.algorithms.grpo import compute_advantage
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.run import Run


@algorithm(
    services=("actor", "reward"),
    defaults={"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
)
def cispo(run: Run) -> None:
    """Runs CISPO, which needs services actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))
