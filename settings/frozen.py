"""Settings of a model that is not trained."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from settings.model import ModelTable


class FrozenTable(ModelTable):
    """Settings of a service with a model that it does not train."""

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        for option, is_set in (
            ("activation_checkpointing", self.activation_checkpointing),
            ("zero.offload_optimizer", self.zero.offload_optimizer),
        ):
            if is_set:
                raise ValueError(f"{option} is for services that learn, and role {self.role} does not")
        return self
