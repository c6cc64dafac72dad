"""GRPO (Shao et al. 2024, arXiv 2402.03300): the baseline is the mean score of the responses to the same prompt."""

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
    services=("actor", "reference", "reward"),
    options=GroupOptions,
    defaults={"aggregation": "seq-mean-token-mean", "kl_loss_coefficient": 0.001},
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD, *SHAPING),
    only_for={"reference": "kl_loss_coefficient"},
    check=check_sampling,
    further=responses_of_rounds,
)
def grpo(run: Run, options: GroupOptions) -> None:
    """Runs GRPO, which needs services actor and reward, and reference for the KL in the loss, where
    `kl_loss_coefficient` is not 0."""
    actor, reward = run.actor(), run.reward()
    reference = run.reference() if run.config.algorithm.kl_loss_coefficient else None
    for step in run.steps():
        batch = sample(run, step, actor, reward, options)
        batch |= actor.compute_log_prob(batch)
        if reference:
            batch |= reference.compute_ref_log_prob(batch)
        batch = batch if "rewards" in batch else reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))


@future_columns("advantages", by_group=True)
def compute_advantage(run: Run, step: Step, batch: FutureBatch) -> FutureBatch:
    """Computes column "advantages" of a batch: (s - mean) / (std + 1e-6), for the reward s of each response and mean
    and standard deviation of its group. Adds metrics to `step`."""
    columns = shaped(run, step, run.fetch(batch, "rewards", "group"))
    return step.compute(group_advantage, columns["rewards"], run.lengths(batch), columns["group"])
