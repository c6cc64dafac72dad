"""Hyper-parameters that algorithms share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from settings.strict import Positive, Strict

MAX_KL_ERROR = 0.2
"""An adaptive KL coefficient changes by at most this share per horizon (Ziegler et al. 2019)."""

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class AlgorithmTable(Strict):
    """Hyper-parameters that algorithms share; each algorithm reads some of them, and may have defaults of its own."""

    epochs: Positive = 1
    """Passes of the actor over a step's rows."""
    critic_epochs: Positive = 1
    """Passes of the critic over a step's rows."""
    mini_batch_size: Positive = 128
    """Rows, over all ranks, of one optimizer step."""
    gamma: Fraction = 1.0
    """Discount of later rewards (GAE, Schulman et al. 2016)."""
    lam: Fraction = 1.0
    """Weight of longer returns (lambda in GAE)."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""
    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Use of the probability ratio in the actor's loss: ppo clips that of each token, gspo that of the whole
    response, and cispo weighs each token's log-probability by it, clipped."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped at 1 plus this."""
    dual_clip: NotNegative = 3.0
    """Bound of the loss where the advantage is negative (Ye et al. 2020), above 1; 0: off. For surrogate ppo of every
    algorithm, though their papers have none."""
    value_clip: NotNegative = 0.5
    """New values are clipped to within this range of the old; 0: off."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus in the actor's loss."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How the losses of tokens become one number."""
    kl_reward_coefficient: NotNegative = 0.001
    """Weight of the KL penalty in the reward."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty in the reward."""
    kl_target: NotNegative = 0.0
    """KL per response that an adaptive coefficient steers to (Ziegler et al. 2019); 0: the coefficient is fixed."""
    kl_horizon: Positive = 10_000
    """Responses over which the adaptive coefficient moves."""
    kl_loss_coefficient: NotNegative = 0.0
    """Weight of the KL term in the actor's loss."""
    kl_loss_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the KL term in the actor's loss; + takes the gradient of k2."""
    recompute_log_probs: bool = True
    """Recompute the log-probabilities of the responses with the training engine, instead of taking the
    rollout engine's."""
    rollout_correction: Literal["none", "truncate", "mask"] = "none"
    """Correction of the difference between the training engine's probabilities and those that the rollout engine
    sampled with: the loss is weighted by their ratio, which truncate bounds from above; mask drops ratios out of
    bounds. Not with rollout.top_k or rollout.top_p."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """Level of that ratio: each token or the whole response."""
    rollout_correction_low: NotNegative = 0.5
    """Smallest ratio that mask keeps."""
    rollout_correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio that mask keeps, and the bound of truncate."""
    max_log_prob_drift: NotNegative = 0.0
    """Largest difference between a token's log-probability in the training engine and in the rollout engine; beyond it
    the run ends. 0: no bound."""
    pretrain_coefficient: NotNegative = 0.0
    """Weight of the loss of the texts of data.pretrain in the actor's loss."""
    on_failed_reward: Literal["stop", "retry", "drop_group"] = "stop"
    """Policy for rows without a score: stop ends the run with the cause; retry sends those rows again, and then
    stops; drop_group trains without them and the other responses to their prompts. They never count as zero."""
    reward_retries: Positive = 2
    """Most times that retry sends a row again."""
    options: dict[str, Any] = {}
    """Options of one algorithm; see the tables of the algorithms below."""

    @field_validator("dual_clip")
    @classmethod
    def _check_dual_clip(cls, dual_clip: float) -> float:
        if 0 < dual_clip <= 1:
            raise ValueError(f"must be above 1, or 0 for off (given: {dual_clip})")
        return dual_clip
