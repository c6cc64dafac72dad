"""Losses of policy and value: declarations of losses per token, and the tables of the knobs around them, which the
config file, requests and services share. Without torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rlhf.plugins import find_plugin
from settings.strict import Fraction, NotNegative, Strict, check_table_type

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True)
class LossSpec:
    """Declares a loss per token. docs/losses.md has an example.

    Attributes:
        function: The function, as "module:function". Only services import it, so it may use torch.
        options: Type of its options. An option that has the name of a key of `[algorithm]` has that key's value.
            Default: no options.
    """

    function: str
    options: type[Strict] = Strict

    def __post_init__(self) -> None:
        check_table_type(self.options, "a loss")


class ClipOptions(Strict):
    """Options of a policy loss that clips the probability ratio."""

    clip_low: Fraction = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""


class PpoOptions(ClipOptions):
    """Options of policy loss ppo."""

    dual_clip: NotNegative = 3.0
    """Dual clip (Ye et al. 2020): where the advantage A is negative, the loss of a token is at most -dual_clip A.
    Above 1, or 0 for off. With surrogate ppo it is on in every algorithm, though their papers do not have it."""

    @field_validator("dual_clip")
    @classmethod
    def _check_dual_clip(cls, dual_clip: float) -> float:
        if 0 < dual_clip <= 1:
            raise ValueError(f"must be above 1, or 0 for off (given: {dual_clip})")
        return dual_clip


class ValueClipOptions(Strict):
    """Options of value loss clipped."""

    value_clip: NotNegative = 0.5
    """New values of the critic are clipped to within +-value_clip of the old ones in its loss. 0: off."""


POLICY_LOSSES = {
    "ppo": LossSpec("services.actor.surrogates:ppo_clip_loss", PpoOptions),
    "gspo": LossSpec("services.actor.surrogates:gspo_loss", ClipOptions),
    "cispo": LossSpec("services.actor.surrogates:cispo_loss", ClipOptions),
}
VALUE_LOSSES = {"clipped": LossSpec("services.critic.losses:clipped_squared_error", ValueClipOptions)}


@functools.cache
def find_policy_loss(name: str) -> LossSpec:
    """Returns the spec of a policy loss by its name: one of `POLICY_LOSSES`, an entry point of group
    rlhf_cluster.policy_losses, or "module:object". Raises PluginError where there is none."""
    return find_plugin("rlhf_cluster.policy_losses", name, LossSpec, POLICY_LOSSES)


@functools.cache
def find_value_loss(name: str) -> LossSpec:
    """Returns the spec of a value loss by its name: one of `VALUE_LOSSES`, an entry point of group
    rlhf_cluster.value_losses, or "module:object". Raises PluginError where there is none."""
    return find_plugin("rlhf_cluster.value_losses", name, LossSpec, VALUE_LOSSES)


LOSSES = {"surrogate": find_policy_loss, "value_loss": find_value_loss}
"""Functions that find the losses per token, by the key of `[algorithm]` that names one. The options of each are in a
table that is named like the key, with _options."""


class LossTable(Strict):
    """Knobs that the losses of policy and value share."""

    aggregation: Aggregation = "token-mean"
    """Reduction of the losses of tokens to one number: token-mean is the mean over all tokens; the others reduce each
    response first, to the sum, the mean, or the sum divided by rollout.max_response_tokens, and average these."""


class PolicyLossTable(LossTable):
    """Knobs of the policy loss."""

    surrogate: str = "ppo"
    """Use of the probability ratio in the actor's loss: ppo clips the ratio of each token, gspo that of the whole
    response, and cispo multiplies each token's log-probability by the clipped ratio, without its gradient. Or a loss
    of an installed package, by name, or one of yours, as `module:object`; see [losses.md](losses.md)."""
    surrogate_options: dict[str, Any] = {}
    """Options of the surrogate that are not keys of `[algorithm]`."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus in the actor's loss."""
    kl_loss_coefficient: NotNegative = 0.0
    """Coefficient of the KL term in the actor's loss."""
    kl_loss_estimator: KlEstimator = "k3"
    """Estimator of the KL term in the actor's loss; k1+ and k3+ have the value of k1 and k3 and the gradient of
    k2."""
    rollout_correction: Literal["none", "truncate", "mask", "taper"] = "none"
    """Correction for the difference between the probabilities of the training engine and those that the rollout
    engine sampled with: the loss is weighted by their ratio. truncate bounds the ratio from above; mask replaces
    ratios that are out of bounds by 0; taper bounds it by 1, and is 1 where the advantage is not negative. Cannot be
    combined with rollout.top_k, rollout.top_p or rollout.min_p."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """Level of the ratio of the rollout correction: one per token, or one per response."""
    rollout_correction_low: NotNegative = 0.5
    """Smallest ratio that rollout correction mask keeps."""
    rollout_correction_high: float = Field(default=2.0, gt=0, validate_default=True)
    """Largest ratio that rollout correction mask keeps, and the upper bound with truncate."""
    pretrain_coefficient: NotNegative = 0.0
    """Coefficient of the loss on the texts of data.pretrain in the actor's loss."""

    @property
    def adds_up_by_rows(self) -> bool:
        """Whether a row's share of the loss depends on the other rows only through their number."""
        return self.aggregation != "token-mean" and not self.pretrain_coefficient

    @field_validator("surrogate")
    @classmethod
    def _check_surrogate(cls, name: str) -> str:
        find_policy_loss(name)
        return name

    @field_validator("rollout_correction_high")
    @classmethod
    def _check_bounds(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("rollout_correction_low", 0.0)
        if info.data.get("rollout_correction") != "none" and low >= high:
            raise ValueError(f"must be above rollout_correction_low, {low:g} (given: {high:g})")
        return high


class ValueLossTable(LossTable):
    """Knobs of the value loss."""

    value_loss: str = "clipped"
    """Loss of the critic: clipped is the squared error, clipped by `value_clip`. Or a loss of an installed package, by
    name, or one of yours, as `module:object`; see [losses.md](losses.md)."""
    value_loss_options: dict[str, Any] = {}
    """Options of the value loss that are not keys of `[algorithm]`."""

    @field_validator("value_loss")
    @classmethod
    def _check_value_loss(cls, name: str) -> str:
        find_value_loss(name)
        return name
