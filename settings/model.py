"""Settings that services with a model share: engine, mesh, precision and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from settings import meshes
from settings.service import ServiceTable
from settings.strict import Positive, Strict


class OptimizerTable(Strict):
    """AdamW (Loshchilov & Hutter 2019)."""

    learning_rate: float = Field(default=1e-5, ge=0)
    """Learning rate after warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm over all parameters."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up: as it is, or down to `min_ratio` of it along half a cosine or a line."""
    total_steps: int = Field(default=0, ge=0)
    """For schedule cosine and linear: optimizer steps until the learning rate is at its lowest, warm-up included."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """For schedule cosine and linear: lowest learning rate, as a share of the highest."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule} needs total_steps above warmup_steps, "
                f"given are {self.total_steps} and {self.warmup_steps}"
            )
        if self.schedule == "constant" and (self.total_steps or self.min_ratio):
            raise ValueError("total_steps and min_ratio are for schedule cosine and linear")
        return self


class ZeroTable(Strict):
    """The engine zero: DeepSpeed ZeRO."""

    stage: Literal[1, 2, 3] = 2
    """Sharded state: 1 the optimizer's state, 2 gradients too, 3 weights too. At 1 and 2 a model that does not learn is
    replicated on every rank."""
    offload_optimizer: bool = False
    """Keeps the optimizer's state and its copy of the weights in host memory, and steps there."""


class ModelTable(ServiceTable):
    """Settings common to services with a model."""

    model: Path
    """Hugging Face directory of the model and its tokenizer."""
    engine: Literal["fsdp", "3d", "zero"] = "fsdp"
    """Training engine that holds the model: fsdp shards every weight over all ranks (FSDP2); 3d has pipeline stages,
    tensor parallelism and replicas, as `mesh` says; zero is DeepSpeed ZeRO, an extra."""
    mesh: str = ""
    """For engine 3d: pipeline, tensor and data size, for example 1-2-2. Their product is `ranks`."""
    shards_over_data: bool = False
    """For engine 3d: shards weights, gradients and moments over the data ranks (FSDP2), which are replicas otherwise.
    Less memory, more communication; an actor generates with a copy of its weights."""
    zero: ZeroTable = ZeroTable()
    """For engine zero: its stage."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the weights are computed in."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are exported. Those that learn are kept in float32 and exported as they are, or rounded
    once; those that do not learn have no more precision than `dtype`."""
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward pass: bounds memory whatever the batch. Where oneDNN multiplies, engine 3d stops at
    2,048 on a CPU, or at the longest row."""
    packing: bool = True
    """Lays sequences end to end, so that no padding is computed and `micro_batch_tokens` counts real tokens. False pads
    sequences of like length to the longest. Models that cannot be packed are padded; docs/engines.md says which."""
    activation_checkpointing: bool = False
    """For engines fsdp and 3d: computes each layer again in the backward pass of an update, so that only its input is
    kept. Less memory, one more forward pass, the same bits."""

    @property
    def data_ranks(self) -> int:
        """Number of parts that the rows of an update are dealt out to: d of a mesh p-t-d, else one for each rank."""
        return meshes.parse(self.mesh)[2] if self.mesh else self.ranks

    @property
    def model_directory(self) -> Path:
        """`model`."""
        return self.model

    @property
    def needs_torch(self) -> bool:
        """True."""
        return True

    @property
    def row_limits(self) -> dict[str, int]:
        """As of every service: a row has to fit into a micro-batch."""
        return {"micro_batch_tokens": self.micro_batch_tokens}

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        if self.engine == "3d":
            meshes.check(self.mesh, self.ranks)
            if self.shards_over_data and self.data_ranks == 1:
                raise ValueError(f"shards_over_data needs more than one data rank, and mesh is {self.mesh}")
        elif self.mesh:
            raise ValueError(f"mesh is for engine 3d, and engine is {self.engine}")
        elif self.shards_over_data:
            raise ValueError(f"shards_over_data is for engine 3d, and engine is {self.engine}")
        return self

    @model_validator(mode="after")
    def _check_zero(self) -> Self:
        if self.engine != "zero" and self.zero != ZeroTable():
            raise ValueError(f"zero is for engine zero, and engine is {self.engine}")
        if self.engine == "zero" and self.activation_checkpointing:
            raise ValueError("activation_checkpointing is for engines fsdp and 3d, and engine is zero")
        return self
