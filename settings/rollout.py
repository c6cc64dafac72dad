"""Settings of a rollout service, which generates with weights that it receives from an actor."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from settings import meshes
from settings.engines import Spec
from settings.generation import GeneratingTable


class RolloutServiceTable(GeneratingTable):
    """Settings of a rollout service, whose ranks generate responses with weights that `sync_weights` moves there. Of
    the model directory it reads config and tokenizer alone."""

    role: Literal["rollout"]
    """Always rollout."""
    mesh: str = ""
    """Mesh p-t-d of generation, for example 1-2-2: pipeline, tensor and data size, whose product must be `ranks`. p t
    ranks share the model and generate the same rows. vllm takes no pipeline stages. Empty: each rank has the whole
    model."""
    second_buffer: bool = True
    """Receives new weights beside those that the ranks generate with, which are replaced when all ranks of the service
    have received all of theirs: until then, and after a transfer that has failed, it generates with the ones that it
    has. Takes the memory of the weights twice. false: receives them in place, and refuses to generate from the first
    byte on until a transfer has succeeded."""

    @property
    def engine_specs(self) -> dict[str, Spec]:
        """Specs of the engines that the service needs, by the key that names each: `rollout_engine`."""
        return {"rollout_engine": self.rollout_spec}

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on the tokens of a prompt and its response together: `rollout_limits`."""
        return self.rollout_limits

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        if not self.generates:
            raise ValueError("rollout_engine: none is not allowed: a rollout service generates responses")
        if self.mesh:
            meshes.check(self.mesh, self.ranks)
        self.check_generation_fits(self.mesh, "")
        return self
