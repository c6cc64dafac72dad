"""Settings that services share whose ranks generate responses: the rollout engine and its options."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from settings import meshes
from settings.engines import (
    NO_ROLLOUT,
    ROLLOUT_ENGINES,
    RolloutEngineName,
    RolloutSpec,
    VllmTable,
    check_keys,
    check_options,
    rollout_engine,
)
from settings.model import LoadedModelTable
from settings.strict import Positive

RESPONSE_TOKENS = 128
"""Default of `rollout.max_response_tokens`."""


class GeneratingTable(LoadedModelTable):
    """Settings common to services whose ranks generate responses."""

    rollout_engine: RolloutEngineName = "hf"
    """Engine that generates responses: hf is part of this package and runs anywhere; vllm is faster, and is installed
    separately; none, for an actor whose responses a rollout service generates, takes no memory. Or a plug-in: the name
    of an entry point, or module:object; see docs/engines-of-your-own.md."""
    rollout_options: dict[str, Any] = Field(default={}, validate_default=True)
    """For a rollout engine that is a plug-in: its options."""
    rollout_tokens: Positive = 65536
    """For rollout engine hf: maximum number of tokens, padding included, in the batch that a rank generates, which
    bounds the size of its KV cache."""
    vllm: VllmTable = VllmTable()
    """For rollout engine vllm: sizes of its KV cache and batches, and further arguments."""

    @property
    def rollout_spec(self) -> RolloutSpec:
        """Spec of the rollout engine."""
        return rollout_engine(self.rollout_engine)

    @property
    def generates(self) -> bool:
        """Whether the ranks generate responses: unless the rollout engine is none."""
        return self.rollout_engine != NO_ROLLOUT

    @property
    def rollout_limits(self) -> dict[str, int]:
        """Limit of the rollout engine on the tokens of a prompt and its response together, by the key that sets it,
        such as `rollout_tokens` or `vllm.max_model_len`; empty without a limit."""
        key = self.rollout_spec.row_limit
        most = self._value(key) if key else 0
        return {key: most} if most else {}

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest sampling temperature that the rollout engine allows."""
        return self.rollout_spec.temperatures

    def check_generation_fits(
        self, mesh: str, generation_mesh: str, shape: meshes.Shape = meshes.NO_SHAPE
    ) -> None:
        """Checks that the rollout engine can generate on a mesh.

        Args:
            mesh, generation_mesh: As in `settings.meshes.check_vllm`.
            shape: Shape of the model. Default: unknown, which passes.

        Raises:
            ValueError: It cannot; the text says why.
        """
        spec = self.rollout_spec
        if not spec.takes_shards:
            meshes.check_alone(self.rollout_engine, mesh, generation_mesh)
        spec.check_model(mesh, generation_mesh, shape)

    @field_validator("rollout_options")
    @classmethod
    def _check_rollout_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        engine = info.data.get("rollout_engine")
        return (
            options if engine is None else check_options(rollout_engine(engine), "rollout_options", options)
        )

    @model_validator(mode="after")
    def _check_rollout_keys(self) -> Self:
        check_keys(self, "rollout_engine", self.rollout_spec, ROLLOUT_ENGINES)
        return self

    def _value(self, key: str) -> int:
        """Returns the value of a key such as "rollout_tokens" or "vllm.max_model_len"; 0 of an option that is not
        set."""
        first, _, rest = key.partition(".")
        found = getattr(self, first)
        return (
            found if not rest else found.get(rest, 0) if isinstance(found, dict) else attrgetter(rest)(found)
        )
