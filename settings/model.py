"""Settings that services with a model share: engine, mesh, precision and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from settings import meshes
from settings.engines import (
    TRAINING_ENGINES,
    EngineSpec,
    Spec,
    TrainingEngineName,
    ZeroTable,
    check_keys,
    check_options,
    training_engine,
)
from settings.hub import local_directory
from settings.service import ServiceTable
from settings.strict import Positive, Strict

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerTable(Strict):
    """Settings of the optimizer, AdamW (Loshchilov & Hutter 2019)."""

    learning_rate: float = Field(default=1e-5, ge=0)
    """Learning rate after warm-up."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates beta1 and beta2 of the first and second moment, each at least 0 and below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon, added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Weights that `weight_decay` applies to. matrices: all but biases, weights of norms, and weights of one
    dimension, as in Megatron and Hugging Face's Trainer (docs/engines.md#weight-decay)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this L2 norm, taken over all parameters."""
    reject_grad_norm: float = Field(default=0.0, ge=0)
    """L2 norm above which a gradient, before it is clipped, is refused: the run ends, with the weights as before and
    the rows kept (docs/integrity.md). 0: no limit; a gradient that is not finite is refused in any case."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """In place of `warmup_steps`: these steps as a fraction of `total_steps`, rounded to a whole number."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after warm-up: constant keeps it; cosine and linear decrease it to `min_ratio`
    times its value, along half a cosine or a line."""
    total_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps, warm-up included, after which the learning rate of schedule cosine and linear is at
    its lowest, and of which `warmup_ratio` is a fraction. Above the steps of the warm-up. 0: the controller computes
    those of the run (docs/engines.md#learning-rate); a service that it does not start needs the number."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """For schedule cosine and linear: lowest learning rate, as a fraction of `learning_rate`."""

    @property
    def lacks_total_steps(self) -> bool:
        """Whether the learning rate depends on `total_steps`, which are not given."""
        return not self.total_steps and (self.schedule != "constant" or self.warmup_ratio > 0)

    @property
    def num_warmup_steps(self) -> int:
        """Optimizer steps of the warm-up: `warmup_steps`, or those that `warmup_ratio` says."""
        return self.warmup_steps or round(self.warmup_ratio * self.total_steps)

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        warmup = self.num_warmup_steps
        if self.schedule != "constant" and 0 < self.total_steps <= warmup:
            raise ValueError(
                f"schedule {self.schedule} needs more total_steps than those of the warm-up, "
                f"given are {self.total_steps} and {warmup}"
            )
        if self.schedule == "constant" and (self.min_ratio or (self.total_steps and not self.warmup_ratio)):
            raise ValueError(
                "min_ratio is for schedule cosine and linear, and total_steps for these and for warmup_ratio"
            )
        return self


def optimizer_without_end(table: ServiceTable) -> OptimizerTable | None:
    """Returns the optimizer of a service whose learning rate depends on `total_steps`, which are not given; None for
    any other service."""
    optimizer = getattr(table, "optimizer", None)
    return optimizer if isinstance(optimizer, OptimizerTable) and optimizer.lacks_total_steps else None


class LoadedModelTable(ServiceTable):
    """Settings common to services that compute with a model of a Hugging Face directory."""

    model: Path
    """Hugging Face directory of the model and its tokenizer; or, where there is no such directory, a
    model on the Hugging Face hub, as owner/name or owner/name@revision (docs/models.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type that the model is computed in. auto: bfloat16 on a GPU, float32 on a CPU; Describe says which. On a
    GPU, matrix products of float32 are computed in TF32."""

    @property
    def model_directory(self) -> Path:
        """Directory of the model that the service loads: `model`, or its copy in the hub's cache (`settings.hub`)."""
        return local_directory(self.model)

    @property
    def needs_torch(self) -> bool:
        """Whether the ranks use torch; here always true, since the service has a model."""
        return True


class ModelTable(LoadedModelTable):
    """Settings common to services whose model is in a training engine."""

    engine: TrainingEngineName = "fsdp"
    """Training engine: fsdp shards every weight over all ranks (FSDP2); 3d uses pipeline, tensor and data parallelism
    as `mesh` says; zero is DeepSpeed ZeRO, which the extra `deepspeed` installs. Or a plug-in: the name of an entry
    point, or module:object; see docs/engines-of-your-own.md."""
    engine_options: dict[str, Any] = Field(default={}, validate_default=True)
    """For an engine that is a plug-in: its options."""
    mesh: str = ""
    """For engine 3d: mesh p-t-d of training, for example 1-2-2: pipeline, tensor and data size, whose product must be
    `ranks`."""
    shards_over_data: bool = False
    """For engine 3d: shards weights, gradients and optimizer state over the data ranks (FSDP2), which are replicas
    otherwise. Takes less memory and more communication; an actor generates with a copy of its weights."""
    zero: ZeroTable = ZeroTable()
    """For engine zero: its stage, and whether it offloads the optimizer."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of exported weights. Weights that learn are kept in float32 and exported as they are, or rounded
    once; weights that do not learn have no more precision than `dtype`."""
    micro_batch_tokens: Positive = 16384
    """Maximum number of tokens in one forward pass of a rank, which bounds memory whatever the size of the batch. On
    a CPU with matmul library oneDNN, engine 3d uses at most 2,048, or the length of the longest row."""
    sequence_parallel: Positive = 1
    """For engine fsdp: size of the groups of consecutive ranks that have the same rows and shard the tokens of each
    micro-batch (DeepSpeed-Ulysses), so that a row may have up to `sequence_parallel * micro_batch_tokens` tokens. Must
    divide `ranks` and the attention heads of the model; needs `packing`. See docs/engines.md#sequence-parallelism."""
    packing: bool = True
    """Concatenates the sequences of a micro-batch, so that no padding is computed and `micro_batch_tokens` counts
    real tokens. false pads sequences of similar length to the longest. Models that do not support packing are padded;
    docs/engines.md says which."""
    activation_checkpointing: bool = False
    """For engines fsdp and 3d, of a service that learns: recomputes each layer in the backward pass of an update, so
    that only its input is kept. Takes less memory and one more forward pass; results are equal bit by bit."""

    @property
    def training_sizes(self) -> meshes.Sizes:
        """Pipeline, tensor and data size of training: those of `mesh`, or without a mesh (1, `sequence_parallel`,
        `ranks / sequence_parallel`), since sequence-parallel ranks have the same rows, as tensor-parallel ones do."""
        if self.mesh:
            return meshes.parse(self.mesh)
        return 1, self.sequence_parallel, self.ranks // self.sequence_parallel

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel shares that the rows of an update are divided into."""
        return self.training_sizes[2]

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of a micro-batch, over all ranks of a sequence-parallel group."""
        return self.micro_batch_tokens * self.sequence_parallel

    @property
    def row_limits(self) -> dict[str, int]:
        """Limits on the tokens of a prompt and its response together, by the key or the product of keys that sets
        each: `micro_batch_tokens`, times `sequence_parallel` if that is not 1, since a row must fit into one
        micro-batch."""
        key = "micro_batch_tokens"
        return {key if self.sequence_parallel == 1 else f"{key} * sequence_parallel": self.token_budget}

    @property
    def engine_spec(self) -> EngineSpec:
        """Spec of the training engine."""
        return training_engine(self.engine)

    @property
    def engine_specs(self) -> dict[str, Spec]:
        """Specs of the engines that the service needs, by the key that names each: `engine`."""
        return {"engine": self.engine_spec}

    @field_validator("engine_options")
    @classmethod
    def _check_engine_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        engine = info.data.get("engine")
        return (
            options if engine is None else check_options(training_engine(engine), "engine_options", options)
        )

    @model_validator(mode="after")
    def _check_engine_keys(self) -> Self:
        check_keys(self, "engine", self.engine_spec, TRAINING_ENGINES)
        if "mesh" in self.engine_spec.keys:
            meshes.check(self.mesh, self.ranks)
            if self.shards_over_data and self.data_ranks == 1:
                raise ValueError(f"shards_over_data needs more than one data rank, and mesh is {self.mesh}")
        return self

    @model_validator(mode="after")
    def _check_sequence_parallel(self) -> Self:
        if self.ranks % self.sequence_parallel:
            allowed = [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} does not divide ranks, which is {self.ranks}; allowed: "
                f"{', '.join(map(str, allowed))}"
            )
        if self.sequence_parallel > 1 and not self.packing:
            raise ValueError("sequence_parallel divides packed micro-batches, and packing is false")
        return self
