"""Settings of the reference policy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from settings.model import ModelTable


class ReferenceTable(ModelTable):
    """Settings of the reference policy: a frozen model that a KL penalty keeps the actor close to."""

    role: Literal["reference"]
    """Always reference."""

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        for option, is_set in (
            ("activation_checkpointing", self.activation_checkpointing),
            ("zero.offload_optimizer", self.zero.offload_optimizer),
        ):
            if is_set:
                raise ValueError(f"{option} is for services that learn, and a reference does not")
        return self
