"""Settings of the actor: its rollout engine, its adapters and the mesh of generation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from settings import meshes
from settings.model import ModelTable, OptimizerTable
from settings.strict import Positive, Strict

VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest temperature that vLLM samples at. vLLM raises a lower one to the lowest, and says so in its log
only."""


class VllmTable(Strict):
    """Sizes of the rollout engine vllm; docs/rollout.md has its requirements and limits."""

    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Size in GiB of each rank's KV cache. Rows that do not fit wait."""
    max_num_seqs: Positive = 256
    """Most rows generated at the same time on a rank."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and response together, in tokens; the KV cache must hold one such row. 0: all positions of the
    model."""
    enforce_eager: bool = True
    """Runs the model as it is. False has vLLM compile it and, on a GPU, capture graphs: a slower start, and faster
    steps."""


class LoraTable(Strict):
    """Low-rank adapters (Hu et al. 2021), which learn in place of the model's own weights; see docs/lora.md."""

    rank: Positive = 16
    """Inner dimension of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of an adapter's output, divided by its rank."""
    dropout: float = 0.0
    """Only 0: with dropout, the policy that learns would differ at random from the one that generates."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter: names, or ends of names such as q_proj; all-linear means all but the output
    layer."""
    seed: int = Field(default=0, ge=0)
    """Seed of the adapters' first weights."""

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
    """The policy."""

    role: Literal["actor"]
    """actor"""
    optimizer: OptimizerTable = OptimizerTable()
    """How the policy learns."""
    generation_mesh: str = ""
    """For engine 3d: pipeline, tensor, micro-data and data size of generation on the same ranks, pg-tg-dg-d, for
    example 1-1-2-2. pg divides the pipeline size, tg the tensor size, and dg is what is left of both. Empty: as
    `mesh`."""
    transition: Literal["hybridflow", "hybridflow_v", "gather_all"] = "hybridflow"
    """For engine 3d: how ranks gather the weights that they generate with. hybridflow all-gathers only the missing
    shards, within a micro-DP group; hybridflow_v (over a model-parallel group) and gather_all (over all ranks, as
    DeepSpeed-Chat) hold the whole model, and serve for comparison."""
    rollout_engine: Literal["hf", "vllm"] = "hf"
    """Engine that generates the responses: hf is embedded and runs anywhere; vllm is faster, and an install of its
    own."""
    rollout_tokens: Positive = 65536
    """For rollout engine hf: most tokens, padding included, generated at the same time on a rank: bounds the KV
    cache."""
    vllm: VllmTable = VllmTable()
    """For rollout engine vllm: its sizes."""
    lora: LoraTable | None = None
    """For engine fsdp: adapters learn in place of the model's weights, and the actor is its own reference unless a
    service has that name."""

    @property
    def has_adapters(self) -> bool:
        """Whether there is a table `lora`."""
        return self.lora is not None

    @property
    def mini_batch_parts(self) -> int:
        """Parts that the rows of an update are dealt out to."""
        return self.data_ranks

    @property
    def row_limits(self) -> dict[str, int]:
        """As of every service with a model; a row has to fit into the KV cache too."""
        limits = super().row_limits
        if self.rollout_engine == "hf":
            limits["rollout_tokens"] = self.rollout_tokens
        elif self.vllm.max_model_len:
            limits["vllm.max_model_len"] = self.vllm.max_model_len
        return limits

    @property
    def temperatures(self) -> tuple[float, float]:
        """Those of the rollout engine."""
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
