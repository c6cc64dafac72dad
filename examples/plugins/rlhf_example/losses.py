"""A policy loss, declared without torch, so that the controller checks its options."""

from pydantic import Field

from settings.losses import LossSpec
from settings.strict import Strict


class DppoOptions(Strict):
    delta: float = Field(default=0.2, gt=0, lt=1)
    """Largest total variation to which an update may move the probability of a token."""


dppo = LossSpec("rlhf_example.dppo:dppo_loss", DppoOptions)
