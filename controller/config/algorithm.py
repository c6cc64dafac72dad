"""Hyper-parameters that algorithms share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from settings.strict import Positive, Strict

MAX_KL_ERROR = 0.2
"""Bound of the relative error |KL / target - 1| from which an adaptive KL coefficient is updated (Ziegler et al.
2019), so that it changes by at most this share per horizon."""

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class AlgorithmTable(Strict):
    """Hyper-parameters that algorithms share; each algorithm reads some of them, and may have defaults of its own."""

    epochs: Positive = 1
    """Number of passes over the rows of a step in an update of the actor."""
    critic_epochs: Positive = 1
    """Number of passes over the rows of a step in an update of the critic."""
    mini_batch_size: Positive = 128
    """Number of rows of one optimizer step, over all ranks."""
    gamma: Fraction = 1.0
    """Discount gamma of later rewards, per token (GAE, Schulman et al. 2016)."""
    lam: Fraction = 1.0
    """Lambda of GAE: 0 uses one-step returns, 1 the whole return."""
    whiten_advantages: bool = True
    """Shifts and scales the advantages of a batch to mean 0 and variance 1."""
    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Use of the probability ratio in the actor's loss: ppo clips the ratio of each token, gspo that of the whole
    response, and cispo multiplies each token's log-probability by the clipped ratio, without its gradient."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    dual_clip: NotNegative = 3.0
    """Dual clip (Ye et al. 2020): where the advantage A is negative, the loss of a token is at most -dual_clip A.
    Above 1, or 0 for off. With surrogate ppo it is on in every algorithm, though their papers do not have it."""
    value_clip: NotNegative = 0.5
    """New values of the critic are clipped to within +-value_clip of the old ones in its loss. 0: off."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus in the actor's loss."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Reduction of the losses of tokens to one number: token-mean is the mean over all tokens; the others reduce each
    response first, to the sum, the mean, or the sum divided by rollout.max_response_tokens, and average these."""
    kl_reward_coefficient: NotNegative = 0.001
    """Coefficient of the KL penalty in the reward."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty in the reward."""
    kl_target: NotNegative = 0.0
    """KL per response that an adaptive coefficient steers to (Ziegler et al. 2019); 0: the coefficient is fixed."""
    kl_horizon: Positive = 10_000
    """Number of responses over which the adaptive coefficient changes."""
    kl_loss_coefficient: NotNegative = 0.0
    """Coefficient of the KL term in the actor's loss."""
    kl_loss_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the KL term in the actor's loss; k1+ and k3+ have the value of k1 and k3 and the gradient of
    k2."""
    recompute_log_probs: bool = True
    """Recomputes the log-probabilities of the responses with the training engine. false uses those of the rollout
    engine."""
    rollout_correction: Literal["none", "truncate", "mask"] = "none"
    """Correction for the difference between the probabilities of the training engine and those that the rollout
    engine sampled with: the loss is weighted by their ratio. truncate bounds the ratio from above; mask replaces
    ratios that are out of bounds by 0. Cannot be combined with rollout.top_k or rollout.top_p."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """Level of the ratio of the rollout correction: one per token, or one per response."""
    rollout_correction_low: NotNegative = 0.5
    """Smallest ratio that rollout correction mask keeps."""
    rollout_correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio that rollout correction mask keeps, and the upper bound with truncate."""
    max_log_prob_drift: NotNegative = 0.0
    """Largest difference allowed between a token's log-probabilities in training and rollout engine, in nats; a
    larger one ends the run. 0: no bound."""
    pretrain_coefficient: NotNegative = 0.0
    """Coefficient of the loss on the texts of data.pretrain in the actor's loss."""
    on_failed_reward: Literal["stop", "retry", "drop_group"] = "stop"
    """Handling of rows that could not be scored. stop ends the run with the cause; retry sends them again, up to
    `reward_retries` times, and then ends the run; drop_group trains without them and the other responses to their
    prompts. They never count as a score of 0."""
    reward_retries: Positive = 2
    """Maximum number of times that a row is sent again with on_failed_reward retry."""
    options: dict[str, Any] = {}
    """Options of the chosen algorithm; see the tables of the algorithms below."""

    @field_validator("dual_clip")
    @classmethod
    def _check_dual_clip(cls, dual_clip: float) -> float:
        if 0 < dual_clip <= 1:
            raise ValueError(f"must be above 1, or 0 for off (given: {dual_clip})")
        return dual_clip
