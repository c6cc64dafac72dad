"""PPO (Schulman et al. 2017) for language models, as in Figure 6 of HybridFlow."""

from __future__ import annotations

from controller.advantage import AdaptiveKL, FixedKL, KlController, ppo_advantage
from controller.config import AlgorithmTable
from controller.dataflow import FutureBatch
from controller.run import Run, Step
from rlhf.errors import InvalidRequest


def ppo(run: Run) -> None:
    """Actor, critic, reference and reward; KL in the reward, in the loss, or both."""
    actor, critic, reference, reward = run.actor(), run.critic(), run.reference(), run.reward()
    kl = _kl_controller(run.config.algorithm)
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= compute_advantage(run, step, batch, kl)
        step.finish(batch, critic.update_critic(batch), actor.update_actor(batch))


def compute_advantage(run: Run, step: Step, batch: FutureBatch, kl: KlController) -> FutureBatch:
    """Columns advantages and returns, from rewards, values and log-probabilities: the only numbers of a batch
    that the controller reads."""
    algorithm = run.config.algorithm
    columns = run.fetch(batch, "log_probs", "ref_log_probs", "values", "rewards")
    try:
        result = ppo_advantage(
            columns["log_probs"],
            columns["ref_log_probs"],
            columns["values"],
            columns["rewards"],
            beta=kl.beta,
            kl_kind=algorithm.kl_reward_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten_advantages=algorithm.whiten_advantages,
        )
    except ValueError as error:
        raise InvalidRequest(f"compute_advantage, step {step.number}: {error}") from error
    step.metrics |= {**result.metrics, "kl/coefficient": kl.beta}
    kl.update(result.metrics["kl/sequence_mean"], batch.rows)
    return FutureBatch.of(advantages=result.advantages, returns=result.returns)


def _kl_controller(algorithm: AlgorithmTable) -> KlController:
    if algorithm.kl_target:
        return AdaptiveKL(algorithm.kl_reward_coefficient, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKL(algorithm.kl_reward_coefficient)
