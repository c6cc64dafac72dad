"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases. The advantage is not divided by the
standard deviation, which favours prompts that are too easy or too hard, and the loss is the sum over a response divided
by a constant, where its mean favours long wrong responses."""

from __future__ import annotations

from controller.advantage.groups import group_advantage
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.sampling import GroupOptions, check_sampling, responses_of_rounds, sample
from controller.training.shaping import shaped
from controller.training.step import Step


@algorithm(
    services=("actor", "reward"),
    options=GroupOptions,
    defaults={"aggregation": "seq-mean-token-sum-norm"},
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
    check=check_sampling,
    further=responses_of_rounds,
)
def dr_grpo(run: Run, options: GroupOptions) -> None:
    """Runs Dr. GRPO, which needs services actor and reward."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages", by_group=True)
def compute_advantage(run: Run, step: Step, batch: FutureBatch) -> FutureBatch:
    """Computes column "advantages" of a batch: the reward of each response minus the mean of its group. Adds metrics to
    `step`."""
    rewards, group = shaped(run, step, run.fetch(batch, "rewards", "group")).values()
    return step.compute(group_advantage, rewards, run.lengths(batch), group, normalize_std=False)
