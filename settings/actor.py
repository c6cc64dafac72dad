"""Settings of the actor: rollout engine, adapters, and the mesh that it generates on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from settings import meshes
from settings.engines import Spec
from settings.generation import GeneratingTable
from settings.model import ModelTable, OptimizerTable
from settings.strict import Positive, Strict


class LoraTable(Strict):
    """Low-rank adapters (Hu et al. 2021), which learn in place of the model's own weights; see docs/lora.md."""

    rank: Positive = 16
    """Rank r of an adapter, the inner dimension of its two matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of an adapter's output, which is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout of the adapters' input. Only 0 is allowed: with dropout, the policy that learns would differ at random
    from the one that generates."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter: their names, or the ends of their names such as q_proj. all-linear: all
    linear layers except the output layer."""
    seed: int = Field(default=0, ge=0)
    """Seed of the adapters' initial weights."""

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"{dropout:g} is not allowed, only 0: the trained policy would differ from the one that generates"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _check_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("must name at least one layer")
        return targets


class ActorTable(GeneratingTable, ModelTable):
    """Settings of the policy: the model that generates responses and is trained."""

    role: Literal["actor"]
    """Always actor."""
    optimizer: OptimizerTable = OptimizerTable()
    """Optimizer of the policy."""
    generation_mesh: str = ""
    """Mesh of generation on the same ranks. For engine 3d pg-tg-dg-d, for example 1-1-2-2: pipeline, tensor,
    micro-data and data size. pg divides p of `mesh`, tg divides t, dg is p t / (pg tg), and d is the same; empty: the
    sizes of `mesh`. For engines fsdp and zero p-t-d, as `mesh` of a rollout service, for example 1-2-2, whose product
    is `ranks`: p t ranks share the model and generate the same rows; empty: each rank has the whole model."""
    transition: Literal["hybridflow", "hybridflow_v", "gather_all"] = "hybridflow"
    """For engine 3d: how ranks gather the weights that they generate with. hybridflow all-gathers only the missing
    shards, within a micro-DP group. hybridflow_v (all-gather over a model-parallel group) and gather_all (over all
    ranks, as DeepSpeed-Chat) hold the whole model on each rank, and are there for comparison."""
    rollout_sleep: bool = False
    """Frees the memory of the rollout engine while the actor trains and computes log-probabilities: its KV cache, and
    the weights that it has beside those of training. They come back with the next generation; numbers do not change.
    See docs/hybrid.md#memory-of-generation-while-the-actor-trains."""
    lora: LoraTable | None = None
    """For engine fsdp: low-rank adapters that learn in place of the model's weights. The actor without its adapters
    is then the reference policy, unless a service is named reference."""

    @property
    def has_adapters(self) -> bool:
        """Whether the table has a table `lora`, so that adapters learn in place of the model's weights."""
        return self.lora is not None

    @property
    def mini_batch_parts(self) -> int:
        """Number of data-parallel ranks that the rows of a mini-batch are divided over: `data_ranks`."""
        return self.data_ranks

    @property
    def engine_specs(self) -> dict[str, Spec]:
        """Specs of the engines that the service needs, by the key that names each: `engine` and `rollout_engine`."""
        return {**super().engine_specs, "rollout_engine": self.rollout_spec}

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on the tokens of a prompt and its response together, by the key that sets each:
        `micro_batch_tokens`, and the one of the rollout engine, such as `rollout_tokens` or `vllm.max_model_len`."""
        return {**super().row_limits, **self.rollout_limits}

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        if self.rollout_sleep and not self.generates:
            raise ValueError("rollout_sleep: is for an actor that generates, and rollout_engine is none")
        return self

    @model_validator(mode="after")
    def _check_meshes(self) -> Self:
        if self.generation_mesh and self.mesh:
            meshes.check_generation(self.generation_mesh, self.mesh)
        elif self.generation_mesh:
            meshes.check(self.generation_mesh, self.ranks, key=meshes.GENERATION_KEY)
        self.check_generation_fits(self.mesh, self.generation_mesh)
        return self
