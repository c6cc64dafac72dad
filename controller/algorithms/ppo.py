"""PPO (Schulman et al. 2017, arXiv 1707.06347) for language models, as in Figure 6 of HybridFlow."""

from __future__ import annotations

from controller.advantage import KlController, kl_controller, ppo_advantage, steer
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import CRITIC, KL_REWARD, POLICY, REWARD, SHAPING, algorithm
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.shaping import shaped
from controller.training.step import Step


@algorithm(
    services=("actor", "critic", "reference", "reward"),
    reads=(*POLICY, *CRITIC, *REWARD, *SHAPING, *KL_REWARD, "gamma", "lam", "whiten_advantages"),
)
def ppo(run: Run) -> None:
    """Runs PPO, which needs services actor, critic, reference and reward. The KL may be in the reward, in the loss,
    or in both."""
    actor, critic, reference, reward = run.actor(), run.critic(), run.reference(), run.reward()
    kl = run.keep("kl", kl_controller(run.config.algorithm))
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch, kl)
        step.finish(batch, critic.update_critic(batch), actor.update_actor(batch))


@future_columns("advantages", "returns")
def compute_advantage(run: Run, step: Step, batch: FutureBatch, kl: KlController) -> FutureBatch:
    """Computes columns "advantages" and "returns" of a batch from its rewards, values and log-probabilities, the only
    columns that the controller reads. Then adds metrics to `step`, and updates `kl` for the next step."""
    config = run.config.algorithm
    columns = shaped(run, step, run.fetch(batch, "log_probs", "ref_log_probs", "values", "rewards"))
    made = step.compute(
        ppo_advantage,
        *columns.values(),
        beta=kl.beta,
        kl_kind=config.kl_reward_estimator,
        gamma=config.gamma,
        lam=config.lam,
        whiten_advantages=config.whiten_advantages,
    )
    steer(kl, step.metrics, batch.rows, updates_actor=config.updates_actor(step.number))
    return made
