"""Safe-RLHF (Dai et al. 2024, arXiv 2310.12773): PPO for a reward under a limit on a cost, as in Figure 6 of
HybridFlow. The cost model is a second reward service with a critic of its own; a Lagrange multiplier weights the cost
against the reward, and a loss of pretraining texts may be added."""

from __future__ import annotations

import math

from pydantic import Field

from controller.advantage import KlController, kl_controller, sequence_scores, steer
from controller.advantage.safe import Multiplier, safe_advantage
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import CRITIC, KL_REWARD, POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.shaping import shaped
from controller.training.step import Step
from rlhf.errors import ConfigError
from settings.strict import Positive, Strict


class SafeRLHFOptions(Strict):
    """Options of Safe-RLHF: table `[algorithm.options]`."""

    cost_limit: float = 0.0
    """Limit d of the mean cost of a response."""
    initial_lambda: float = Field(default=1.0, gt=0)
    """Value of the Lagrange multiplier lambda before the first step."""
    lambda_learning_rate: float = Field(default=0.1, ge=0)
    """Step size of the gradient ascent on log lambda."""
    largest_lambda: float = Field(default=5.0, gt=0)
    """Upper bound of lambda."""
    episodes: Positive = 128
    """Number of newest responses over which the cost is averaged for the update of lambda."""
    score_clip: float = Field(default=50.0, gt=0)
    """Rewards and costs of tokens are clipped to [-score_clip, score_clip]."""


def check(config: Config, options: SafeRLHFOptions) -> None:
    """Raises ConfigError where `initial_lambda` is above `largest_lambda`."""
    if options.initial_lambda > options.largest_lambda:
        raise ConfigError(
            f"algorithm.options.initial_lambda: must not be above largest_lambda, {options.largest_lambda:g} "
            f"(given: {options.initial_lambda:g})"
        )


@algorithm(
    services={
        "actor": "actor",
        "critic": "critic",
        "cost_critic": "critic",
        "reference": "reference",
        "reward": "reward",
        "cost": "reward",
    },
    options=SafeRLHFOptions,
    defaults={
        "lam": 0.95,
        "value_clip": 5.0,
        "kl_reward_coefficient": 0.02,
        "whiten_advantages": False,
        "pretrain_coefficient": 16.0,
    },
    quickstart="safe_rlhf",
    reads=(
        *POLICY,
        *CRITIC,
        *REWARD,
        *SHAPING,
        *KL_REWARD,
        "gamma",
        "lam",
        "whiten_advantages",
        "pretrain_coefficient",
    ),
    check=check,
)
def safe_rlhf(run: Run, options: SafeRLHFOptions) -> None:
    """Runs Safe-RLHF, which needs services actor, reference, reward and cost, and a critic for each of the last two.
    The KL is in the reward and in the cost."""
    actor, reference, reward, cost = run.actor(), run.reference(), run.reward(), run.reward("cost")
    critic, cost_critic = run.critic(), run.critic("cost_critic")
    kl = run.keep("kl", kl_controller(run.config.algorithm))
    multiplier = run.keep("multiplier", Multiplier(math.log(options.initial_lambda)))
    for step in run.steps():
        batch = step.prompts | step.pretraining | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= cost_critic.compute_values(batch).rename(values="cost_values")
        batch |= reference.compute_ref_log_prob(batch)
        batch = reward.score(batch)
        batch = cost.score(batch, "costs")
        batch |= compute_advantage(run, step, batch, kl, multiplier, options)
        costs = batch.drop("values", "returns").rename(cost_values="values", cost_returns="returns")
        step.finish(
            batch, critic.update_critic(batch), cost_critic.update_critic(costs), actor.update_actor(batch)
        )


@future_columns("advantages", "returns", "cost_returns")
def compute_advantage(
    run: Run,
    step: Step,
    batch: FutureBatch,
    kl: KlController,
    multiplier: Multiplier,
    options: SafeRLHFOptions,
) -> FutureBatch:
    """Computes columns "advantages", "returns" and "cost_returns" of a batch. First updates `multiplier` with the costs
    of the batch, and uses the new value; afterwards adds metrics to `step` and updates `kl` for the next step. In a
    step that does not update the actor, the coefficients of both stay as they are."""
    config = run.config.algorithm
    updates_actor = config.updates_actor(step.number)
    names = ("log_probs", "ref_log_probs", "values", "cost_values", "rewards", "costs")
    columns = shaped(run, step, run.fetch(batch, *names))
    mean_cost = multiplier.update(
        sequence_scores(columns["costs"]),
        limit=options.cost_limit,
        learning_rate=options.lambda_learning_rate if updates_actor else 0.0,
        largest=options.largest_lambda,
        episodes=options.episodes,
    )
    made = step.compute(
        safe_advantage,
        *columns.values(),
        multiplier=multiplier.value,
        beta=kl.beta,
        kl_kind=config.kl_reward_estimator,
        gamma=config.gamma,
        lam=config.lam,
        clip=options.score_clip,
        whiten_advantages=config.whiten_advantages,
    )
    step.metrics |= {"cost/recent_mean": mean_cost, "lambda": multiplier.value}
    steer(kl, step.metrics, batch.rows, updates_actor=updates_actor)
    return made
