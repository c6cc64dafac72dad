"""A model's use by a service: its engine, mesh, types, rollout and rows, on which its memory depends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from settings.memory.shape import ModelShape
from settings.meshes import Sizes

BYTES_OF = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by type."""
FLOAT32 = 4


@dataclass(frozen=True)
class RowSizes:
    """Rows of a step, all of the same length: the longest that the configuration allows, so that no step needs more.

    Attributes:
        prompt_tokens, response_tokens: Tokens of a row's prompt and of its response.
        rows: Rows of the batch of a step, over all ranks.
        mini_batches: Optimizer steps of an update.
    """

    prompt_tokens: int = 1024
    response_tokens: int = 1024
    rows: int = 1024
    mini_batches: int = 1


@dataclass(frozen=True)
class AdapterSize:
    """Low-rank adapters of every linear layer named in `targets`, or of all but the output layer where it is empty."""

    rank: int = 16
    targets: tuple[str, ...] = ()


VLLM_BATCHED_TOKENS = 16384
"""Most tokens of a step of vLLM where its table does not set them, on GPUs of at least 70 GiB; elsewhere half as many
(`default_max_num_batched_tokens` in vllm/engine/arg_utils.py, usage context LLM_CLASS)."""


@dataclass(frozen=True)
class RolloutUse:
    """An actor's rollout engine.

    Attributes:
        engine: Name of the engine: hf or vllm.
        pipeline, tensor: Sizes pg and tg of the generation mesh; 1 and 1 where each rank generates alone.
        gathers_all: Whether the transition holds the whole model (hybridflow_v, gather_all).
        cache_tokens: For hf: `rollout_tokens`, the most tokens of the KV cache.
        cache_bytes: For vllm: bytes of the KV cache, `kv_cache_gb`.
        sequences: For vllm: `max_num_seqs`, the most rows of a decoding step.
        batched_tokens: For vllm: `max_num_batched_tokens`, the most tokens of a step.
        truncates: Whether top_k, top_p or min_p truncate the distribution.
        generates: Whether it generates: an actor's does not where a rollout service does.
        sleeps: Whether an actor's frees its memory while the actor trains and infers (`rollout_sleep`).
    """

    engine: str = "hf"
    pipeline: int = 1
    tensor: int = 1
    gathers_all: bool = False
    cache_tokens: int = 65536
    cache_bytes: int = 1 << 30
    sequences: int = 256
    batched_tokens: int = VLLM_BATCHED_TOKENS
    truncates: bool = False
    generates: bool = True
    sleeps: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share a model to generate."""
        return self.pipeline * self.tensor > 1


@dataclass(frozen=True)
class ModelUse:
    """Use of a model by the ranks of a service.

    Attributes:
        shape: Shape of the model, its head included.
        engine: Training engine; whole: every rank has the whole model and no engine (a reward that only scores); none:
            no engine but that of generation (a rollout service), whose mesh this is.
        mesh: Pipeline, tensor and data size; 1-1-ranks for engines without a mesh.
        sequence_parallel: For fsdp: size of the groups of ranks that have the same rows and shard the tokens of each
            micro-batch.
        shards_over_data: For 3d: whether data ranks shard weights, gradients and moments.
        zero_stage: For zero: its stage.
        offload_optimizer: For zero: whether optimizer state is in host memory.
        dtype: Type that the model is computed in; trained weights, gradients and moments are float32.
        learns: Whether the model is trained.
        adapters: Adapters that are trained in place of the model; None: the model is trained whole.
        activation_checkpointing, packing, micro_batch_tokens: As in the service's table.
        rollout: Rollout engine of an actor or a rollout service; None for other roles.
        receives: Whether weights of another service arrive beside those that it computes with.
        scores_with_copy: Whether each rank also has a whole copy of the model (a reward that learns).
        on_gpu: Whether ranks compute on GPUs; host memory is then other memory.
        arena_bytes: Bytes of a rank's arena, `arena_mb`, in host memory.
        device_arena_bytes: Bytes of its arena on the GPU, `arena_device_mb`.
    """

    shape: ModelShape
    engine: Literal["fsdp", "3d", "zero", "whole", "none"] = "fsdp"
    mesh: Sizes = (1, 1, 1)
    sequence_parallel: int = 1
    shards_over_data: bool = False
    zero_stage: int = 2
    offload_optimizer: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    learns: bool = True
    adapters: AdapterSize | None = None
    activation_checkpointing: bool = False
    packing: bool = True
    micro_batch_tokens: int = 16384
    rollout: RolloutUse | None = None
    scores_with_copy: bool = False
    receives: bool = False
    on_gpu: bool = True
    arena_bytes: int = 64 << 20
    device_arena_bytes: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    @property
    def row_parts(self) -> int:
        """Number of parts that the rows of a call are divided into."""
        return self.mesh[2] // self.sequence_parallel

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of a micro-batch, over all ranks of a sequence-parallel group."""
        return self.micro_batch_tokens * self.sequence_parallel

    @property
    def rollout_engine(self) -> RolloutUse:
        """Its rollout engine, which it must have."""
        assert self.rollout is not None, "it has a rollout engine"
        return self.rollout

    @property
    def generation_replicas(self) -> int:
        """Number of parts of the ranks that each generate with a whole model."""
        return self.ranks // (self.rollout_engine.pipeline * self.rollout_engine.tensor)

    @property
    def generates(self) -> bool:
        """Whether its ranks generate."""
        return self.rollout is not None and self.rollout.generates

    @property
    def generates_in_place(self) -> bool:
        """Whether training weights are views of the generation weights' memory."""
        rollout = self.rollout
        in_place = rollout is not None and rollout.engine == "hf" and not rollout.gathers_all
        return in_place and self.engine == "3d" and not self.shards_over_data

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the type of computation."""
        return BYTES_OF[self.dtype]

    @property
    def kept_itemsize(self) -> int:
        """Bytes of an element of the weights that the engine keeps, those that adapters leave frozen aside."""
        return FLOAT32 if self.learns and self.adapters is None else self.itemsize

    @property
    def packs(self) -> bool:
        """Whether the engine concatenates the rows of a micro-batch."""
        return self.packing and self.engine in ("fsdp", "3d") and self.shape.head != "score"

    @property
    def stream_itemsize(self) -> int:
        """Bytes of an element of the hidden states between layers: float32 under autocast, which casts for matrix
        products alone."""
        return self.kept_itemsize if self.engine == "zero" else self.itemsize

    @property
    def fused_norms(self) -> bool:
        """Whether norms are those of `services.compute.norms`, which save their input alone: float32 on a CPU. Mixtures
        of experts have those of transformers."""
        return not self.on_gpu and self.stream_itemsize == FLOAT32 and self.shape.experts is None
