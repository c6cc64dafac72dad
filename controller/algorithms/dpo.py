"""DPO (Rafailov et al. 2023, arXiv 2305.18290): a policy learns from pairs of responses of which one was preferred,
without a reward model and without generation. With loss ipo: IPO (Azar et al. 2023, arXiv 2310.12036).

The loss of a pair is a function of h, the difference of the log-ratios of its responses to the reference
(`log_ratios`). Its gradient is therefore that of the log-probabilities of the responses, times dL/dh and -dL/dh. The
controller computes dL/dh, and the actor makes an ordinary update whose advantages are -dL/dh and dL/dh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from controller.advantage import Advantage, FloatColumn
from controller.advantage.columns import mean, row_sums
from controller.algorithms.reward_model import pair_accuracy
from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import algorithm
from controller.training.evaluation import Evaluation, Measured
from controller.training.run import Run
from rlhf.errors import ConfigError
from settings.strict import Strict

LOSS = {"aggregation": "seq-mean-token-sum", "rollout_correction": "none"}
"""Keys of `[algorithm]` with which the loss of an update is the sum of the losses of its responses' tokens."""


class DPOOptions(Strict):
    """Options of DPO: table `[algorithm.options]`."""

    beta: float = Field(default=0.1, gt=0)
    """Coefficient beta of the KL to the reference, for which the policy of lowest loss is the optimal one. The implicit
    reward of a response is beta times its log-ratio to the reference."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair: sigmoid is that of DPO; ipo is the squared difference of h and 1 / (2 beta); hinge is
    max(0, 1 - beta h) (SLiC, Zhao et al. 2023)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For loss sigmoid: probability that the preference of a pair is wrong (conservative DPO, Mitchell 2023)."""


def check(config: Config, options: DPOOptions) -> None:
    """Raises ConfigError where log-probabilities would be those of another temperature than 1, pairs would be repeated,
    a key of `LOSS` has another value, or an option is set that the loss does not read."""
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature: dpo compares the log-probabilities of the policy itself, so it has to be 1 (given: "
            f"{config.rollout.temperature:g})"
        )
    if config.rollout.samples_per_prompt != 1:
        raise ConfigError(
            "rollout.samples_per_prompt: dpo generates no responses, so it has to be 1 (given: "
            f"{config.rollout.samples_per_prompt})"
        )
    for key, value in LOSS.items():
        if (given := getattr(config.algorithm, key)) != value:
            raise ConfigError(
                f"algorithm.{key}: has to be {value}: the loss of dpo is one of whole responses (given: {given})"
            )
    if options.label_smoothing and options.loss != "sigmoid":
        raise ConfigError(
            f"algorithm.options.label_smoothing: only loss sigmoid reads it (given: {options.loss})"
        )


@algorithm(
    services=("actor", "reference"),
    options=DPOOptions,
    columns=("chosen", "rejected"),
    quickstart="pairs",
    defaults=LOSS,
    reads=("mini_batch_size", *LOSS),
    check=check,
)
def dpo(run: Run, options: DPOOptions) -> None:
    """Runs DPO, which needs services actor and reference, and rows with prompt, chosen and rejected. A mini-batch is
    `mini_batch_size` pairs, and one optimizer step."""
    actor, reference = run.actor(), run.reference()

    def measure(heldout: FutureBatch) -> Measured:
        """Measures the margin of each held-out pair: the implicit reward of its chosen response minus that of the
        other."""
        batch = responses_of(heldout)
        batch |= actor.tokenize(batch)
        batch |= actor.log_likelihood(batch)
        batch |= reference.compute_ref_log_prob(batch)
        chosen, rejected = log_ratios(*run.fetch(batch, "log_probs", "ref_log_probs").values())
        return {"margins": options.beta * (chosen - rejected)}, [batch]

    for step in run.steps(Evaluation(measure, pair_accuracy)):
        pairs = step.prompts.rows
        batch = responses_of(step.prompts)
        batch |= actor.tokenize(batch)
        batch |= reference.compute_ref_log_prob(batch)
        updates, metrics = [], []
        for rows in np.array_split(np.arange(pairs), run.config.mini_batches(pairs)):
            part = batch.take(np.concatenate([rows, pairs + rows]))
            part |= actor.log_likelihood(part)
            columns = run.fetch(part, "log_probs", "ref_log_probs")
            part |= step.compute(dpo_advantage, *columns.values(), **options.model_dump())
            updates.append(actor.update_actor(part, mini_batches=1))
            metrics.append(dict(step.metrics))
        step.metrics |= means(metrics)
        step.finish(batch, *updates)


def responses_of(pairs: FutureBatch) -> FutureBatch:
    """Returns both responses of pairs as rows with column response: the chosen ones of all pairs, then the rejected
    ones."""
    chosen = pairs.drop("rejected").rename(chosen="response")
    return FutureBatch.concat([chosen, pairs.drop("chosen").rename(rejected="response")])


def log_ratios(log_probs: FloatColumn, ref_log_probs: FloatColumn) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-ratios log(pi(y|x) / pi_ref(y|x)) of chosen and of rejected responses, each [pairs] float64, in
    nats.

    Args:
        log_probs: Log-probabilities of the tokens of all chosen responses, then of all rejected ones.
        ref_log_probs: Those under the reference.
    """
    ratios = row_sums(log_probs) - row_sums(ref_log_probs)
    return ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]


def dpo_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    *,
    beta: float,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Advantage:
    """Computes the advantages with which a policy-gradient update of one optimizer step is one of DPO: -2 dL/dh for the
    chosen response of a pair and 2 dL/dh for the other (equation 7 and the gradient below it), where h is the
    difference of their `log_ratios`. The factor is 2 because the loss of an update is a mean over responses.

    Args:
        log_probs: Log-probabilities of the tokens of all chosen responses, then of all rejected ones, under the
            weights before the update.
        ref_log_probs: Those under the reference.
        beta, loss, label_smoothing: See `DPOOptions`.

    Returns:
        Advantages, one per response [2 pairs], and metrics: dpo/loss, the mean loss; dpo/accuracy, the share of pairs
        whose margin, beta h, is above 0; dpo/margin, its mean; dpo/chosen_reward and dpo/rejected_reward, the mean
        implicit rewards; dpo/chosen_log_prob and dpo/rejected_log_prob, the mean log-probabilities of responses.
    """
    chosen, rejected = log_ratios(log_probs, ref_log_probs)
    losses, slopes = pair_loss(chosen - rejected, beta, loss, label_smoothing)
    responses = row_sums(log_probs)
    metrics = {
        "dpo/loss": mean(losses),
        "dpo/accuracy": mean(chosen > rejected),
        "dpo/margin": beta * mean(chosen - rejected),
        "dpo/chosen_reward": beta * mean(chosen),
        "dpo/rejected_reward": beta * mean(rejected),
        "dpo/chosen_log_prob": mean(responses[: len(chosen)]),
        "dpo/rejected_log_prob": mean(responses[len(chosen) :]),
    }
    return Advantage(2 * np.concatenate([-slopes, slopes]), metrics)


def pair_loss(h: np.ndarray, beta: float, loss: str, label_smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the loss L of each pair and its derivative dL/dh, each [pairs] float64; see `DPOOptions`.

    Args:
        h: Difference of the log-ratios of each pair's responses [pairs] float64.
        beta, loss, label_smoothing: See `DPOOptions`.
    """
    match loss:
        case "sigmoid":
            # -log sigmoid(x) = log(1 + exp(-x)), and sigmoid(-x) = exp(-log(1 + exp(x))).
            right, wrong = np.logaddexp(0, -beta * h), np.logaddexp(0, beta * h)
            slopes = (1 - label_smoothing) * np.exp(-wrong) - label_smoothing * np.exp(-right)
            return (1 - label_smoothing) * right + label_smoothing * wrong, -beta * slopes
        case "ipo":
            short = h - 1 / (2 * beta)
            return short**2, 2 * short
        case _:
            short = np.maximum(1 - beta * h, 0)
            return short, -beta * (short > 0)


def means(metrics: list[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over mini-batches, by name."""
    return {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}
