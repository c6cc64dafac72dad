"""Hyper-parameters that algorithms share."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf.errors import ConfigError
from settings.losses import (
    LOSSES,
    PolicyLossTable,
    PpoOptions,
    ValueClipOptions,
    ValueLossTable,
)
from settings.strict import Fraction, NotNegative, Positive, Strict, validate

MAX_KL_ERROR = 0.2
"""Bound of the relative error |KL / target - 1| from which an adaptive KL coefficient is updated (Ziegler et al.
2019), so that it changes by at most this share per horizon."""


class AlgorithmTable(ValueClipOptions, ValueLossTable, PpoOptions, PolicyLossTable):
    """Hyper-parameters that algorithms share; each algorithm reads some of them, and may have defaults of its own."""

    epochs: Positive = 1
    """Number of passes over the rows of a step in an update of the actor."""
    critic_epochs: Positive = 1
    """Number of passes over the rows of a step in an update of the critic."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start of a run in which critics are updated and actors are not (docs/algorithms.md). They
    do not count in the schedule of an actor's learning rate."""
    mini_batch_size: Positive = 128
    """Number of rows of one optimizer step, over all ranks. Must divide `data.prompts_per_step` x
    `rollout.samples_per_prompt`, and be a multiple of the data-parallel ranks of actors and critics."""
    gamma: Fraction = 1.0
    """Discount gamma of later rewards, per token (GAE, Schulman et al. 2016)."""
    lam: Fraction = 1.0
    """Lambda of GAE: 0 uses one-step returns, 1 the whole return."""
    whiten_advantages: bool = True
    """Shifts and scales the advantages of a batch to mean 0 and variance 1."""
    kl_reward_coefficient: NotNegative = 0.001
    """Coefficient of the KL penalty in the reward."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty in the reward."""
    kl_target: NotNegative = 0.0
    """KL per response that an adaptive coefficient steers to (Ziegler et al. 2019); 0: the coefficient is fixed."""
    kl_horizon: Positive = 10_000
    """Number of responses over which the adaptive coefficient changes."""
    recompute_log_probs: bool = True
    """Recomputes the log-probabilities of the responses with the training engine. false uses those of the rollout
    engine."""
    max_log_prob_drift: NotNegative = 0.0
    """Largest difference allowed between a token's log-probabilities in training and rollout engine, in nats; a
    larger one ends the run. 0: no bound."""
    on_failed_reward: Literal["stop", "retry", "drop_group"] = "stop"
    """Handling of rows that could not be scored. stop ends the run with the cause; retry sends them again, up to
    `reward_retries` times, and then ends the run; drop_group trains without them and the other responses to their
    prompts. They never count as a score of 0."""
    on_truncated: Literal["train", "drop"] = "train"
    """Handling of responses that reached rollout.max_response_tokens without an end, and of episodes whose last turn
    was cut off. drop: the policy is not trained on them (overlong filtering); they count in the baseline of their
    prompt."""
    reward_retries: Positive = 2
    """Maximum number of times that a row is sent again with on_failed_reward retry."""
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Normalization of the rewards of responses to mean 0 and standard deviation 1 before advantages are computed from
    them. batch: those of the rewards of the step; running: those of all rewards of the run so far."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward of a response, to which others are clipped after normalization; for a reward with a
    score per token, those of a token. Default: no clipping."""
    options: dict[str, Any] = {}
    """Options of the chosen algorithm; see the tables of the algorithms below."""

    def updates_actor(self, step: int) -> bool:
        """Returns whether actors are updated in a step: in all but steps 1 to `critic_warmup_steps`. Step 0 is what a
        run calls before its first step."""
        return not 1 <= step <= self.critic_warmup_steps

    @property
    def shapes_rewards(self) -> bool:
        """Whether advantages are computed from other rewards than those that the services give."""
        return self.reward_normalization != "none" or self.reward_clip is not None

    @property
    def learns_by_chunk(self) -> bool:
        """Whether an update can begin with the gradients of rows before the others have their rewards, where
        advantages are computed by group."""
        return self.adds_up_by_rows and self.reward_normalization == "none"

    def loss_options(self, key: str) -> Strict:
        """Returns all options of the loss per token that the value of `key`, surrogate or value_loss, names. An option
        that is also a key of `[algorithm]` has that key's value.

        Raises:
            ConfigError: An option is unknown or wrong, or is given in its table although it is a key of `[algorithm]`.
        """
        name, given = getattr(self, key), getattr(self, f"{key}_options")
        kind = LOSSES[key](name).options
        shared = self.shared_options(key)
        where = f"algorithm.{key}_options of {name}"
        for option in sorted(shared.intersection(given)):
            raise ConfigError(f"config {where}: {option}: is a key of [algorithm]; set algorithm.{option}")
        return validate(kind, {**given, **{option: getattr(self, option) for option in shared}}, where)

    def shared_options(self, key: str) -> set[str]:
        """Returns the names of those options that are also keys of `[algorithm]`, of the loss per token that the value
        of `key`, surrogate or value_loss, names."""
        kind = LOSSES[key](getattr(self, key)).options
        return kind.model_fields.keys() & type(self).model_fields.keys()

    @field_validator("reward_clip")
    @classmethod
    def _check_reward_clip(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip and not clip[0] < clip[1]:
            raise ValueError(f"the first number has to be below the second (given: {clip[0]:g}, {clip[1]:g})")
        return clip

    @model_validator(mode="after")
    def _check_loss_options(self) -> Self:
        # Where no loss is named, it is that of the algorithm, which checks the options.
        for loss in LOSSES.keys() & self.model_fields_set:
            self.loss_options(loss)
        return self
