"""Settings of the actor: rollout engine, adapters, and the mesh that it generates on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from settings import meshes
from settings.model import ModelTable, OptimizerTable
from settings.strict import Positive, Strict

VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest sampling temperature allowed with vLLM, which replaces lower ones by the lowest with no more
than a line in its log."""


class VllmTable(Strict):
    """Sizes of the rollout engine vllm; docs/rollout.md has its requirements and limits."""

    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Size of each rank's KV cache, in GiB. Rows that do not fit wait until others are finished."""
    max_num_seqs: Positive = 256
    """Maximum number of rows that a rank generates at the same time."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum length of a prompt and its response together, in tokens; the KV cache must hold one such row. 0: the
    number of positions of the model."""
    enforce_eager: bool = True
    """Runs the model in eager mode. false lets vLLM compile it and, on a GPU, capture CUDA graphs: a slower start and
    faster steps."""


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
                f"{dropout:g} would have another policy learn than the one that generates; only 0"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _check_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("there have to be layers that learn")
        return targets


class ActorTable(ModelTable):
    """Settings of the policy: the model that generates responses and is trained."""

    role: Literal["actor"]
    """Always actor."""
    optimizer: OptimizerTable = OptimizerTable()
    """Optimizer of the policy."""
    generation_mesh: str = ""
    """For engine 3d: mesh pg-tg-dg-d of generation on the same ranks, for example 1-1-2-2: pipeline, tensor,
    micro-data and data size. pg divides p of `mesh`, tg divides t, dg is p t / (pg tg), and d is the same. Empty: the
    sizes of `mesh`."""
    transition: Literal["hybridflow", "hybridflow_v", "gather_all"] = "hybridflow"
    """For engine 3d: how ranks gather the weights that they generate with. hybridflow all-gathers only the missing
    shards, within a micro-DP group. hybridflow_v (all-gather over a model-parallel group) and gather_all (over all
    ranks, as DeepSpeed-Chat) hold the whole model on each rank, and are there for comparison."""
    rollout_engine: Literal["hf", "vllm"] = "hf"
    """Engine that generates responses: hf is part of this package and runs anywhere; vllm is faster, and is installed
    separately."""
    rollout_tokens: Positive = 65536
    """For rollout engine hf: maximum number of tokens, padding included, in the batch that a rank generates, which
    bounds the size of its KV cache."""
    vllm: VllmTable = VllmTable()
    """For rollout engine vllm: sizes of its KV cache and batches."""
    lora: LoraTable | None = None
    """For engine fsdp: low-rank adapters that learn in place of the model's weights. The actor without its adapters
    is then the reference policy, unless a service is named reference."""

    @property
    def has_adapters(self) -> bool:
        """Whether the table has a table `lora`, so that adapters learn in place of the model's weights."""
        return self.lora is not None

    @property
    def mini_batch_parts(self) -> int:
        """Number of data-parallel ranks that the rows of a mini-batch are divided over."""
        return self.data_ranks

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on the tokens of a prompt and its response together, by the key that sets each:
        `micro_batch_tokens`, and `rollout_tokens` or `vllm.max_model_len`."""
        limits = super().row_limits
        if self.rollout_engine == "hf":
            limits["rollout_tokens"] = self.rollout_tokens
        elif self.vllm.max_model_len:
            limits["vllm.max_model_len"] = self.vllm.max_model_len
        return limits

    @property
    def temperatures(self) -> tuple[float, float]:
        """Lowest and highest sampling temperature that the rollout engine allows."""
        return VLLM_TEMPERATURES if self.rollout_engine == "vllm" else super().temperatures

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora and self.engine != "fsdp":
            raise ValueError(f"lora: engine {self.engine} has no adapters; they need engine fsdp")
        return self

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        if self.engine != "3d" and (self.generation_mesh or self.transition != "hybridflow"):
            raise ValueError(f"generation_mesh and transition are for engine 3d, and engine is {self.engine}")
        if self.generation_mesh:
            meshes.check_generation(self.generation_mesh, self.mesh)
        if self.rollout_engine == "vllm":
            meshes.check_vllm(self.mesh, self.generation_mesh)
            if self.rollout_tokens != type(self).model_fields["rollout_tokens"].default:
                raise ValueError("rollout_tokens is for rollout engine hf, and rollout_engine is vllm")
        elif self.vllm != VllmTable():
            raise ValueError(f"vllm is for rollout engine vllm, and rollout_engine is {self.rollout_engine}")
        return self
