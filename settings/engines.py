"""Declarations of engines: a spec names an implementation and has the facts that a configuration is checked by, so that
names and options are checked where neither torch nor the engine is imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from rlhf.plugins import find_plugin
from settings import meshes
from settings.explain import explain
from settings.strict import Positive, Strict, check_table_type

TRAINING_GROUP = "rlhf_cluster.training_engines"
"""Entry-point group of training engines: NAME = "module:object", where the object is an `EngineSpec`."""
ROLLOUT_GROUP = "rlhf_cluster.rollout_engines"
"""Entry-point group of rollout engines: NAME = "module:object", where the object is a `RolloutSpec`."""

NO_ROLLOUT = "none"
"""Name of the rollout engine of an actor whose responses a rollout service generates."""

LOWEST_TEMPERATURE = 1e-6
"""Lowest sampling temperature: quotients of logits and smaller ones leave the range of float32."""

REPETITION_PENALTIES = (1e-6, 1e6)
"""Lowest and highest repetition penalty: quotients and products of logits and others leave the range of float32."""

VLLM_TEMPERATURES = (0.01, 2.0)
"""Lowest and highest sampling temperature allowed with vLLM, which replaces lower ones by the lowest with no more
than a line in its log."""


class NoEngineOptions(Strict):
    """Empty type of options, for an engine without options."""


class ZeroTable(Strict):
    """Settings of training engine zero, which is DeepSpeed ZeRO."""

    stage: Literal[1, 2, 3] = 2
    """ZeRO stage: 1 shards the optimizer's state over the ranks, 2 gradients too, 3 weights too. At 1 and 2, a model
    that does not learn is replicated on every rank."""
    offload_optimizer: bool = False
    """Keeps the optimizer's state and its copy of the weights in host memory, and computes optimizer steps on the
    CPU."""


SET_FOR_VLLM: Mapping[str, str] = {
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "vllm.max_model_len",
    "max_num_seqs": "vllm.max_num_seqs",
    "kv_cache_memory_bytes": "vllm.kv_cache_gb",
    "enforce_eager": "vllm.enforce_eager",
    "tensor_parallel_size": "the mesh of generation",
    "pipeline_parallel_size": "the mesh of generation",
    "data_parallel_size": "the mesh of generation",
    **dict.fromkeys(
        (
            "load_format",
            "skip_tokenizer_init",
            "generation_config",
            "gpu_memory_utilization",
            "enable_sleep_mode",
            "logprobs_mode",
            "distributed_executor_backend",
            "additional_config",
            "speculative_config",
            "stream_interval",
            "disable_log_stats",
            "use_tqdm_on_load",
        ),
        "the service",
    ),
}
"""Arguments of vLLM's engine that a table may not give, and what sets each."""


class VllmTable(Strict):
    """Options of the rollout engine vllm; docs/rollout.md has its requirements and limits."""

    kv_cache_gb: float = Field(default=1.0, gt=0)
    """Size of each rank's KV cache, in GiB. Rows that do not fit wait until others are finished."""
    max_num_seqs: Positive = 256
    """Maximum number of rows that a rank generates at the same time."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum length of a prompt and its response together, in tokens; the KV cache must hold one such row. 0:
    `data.max_prompt_tokens` and `rollout.max_response_tokens` together, or, where the former is not set, the number of
    positions of the model."""
    enforce_eager: bool | None = None
    """Runs the model in eager mode. false lets vLLM compile it and, on a GPU, capture CUDA graphs: a slower start and
    faster steps. Not given: true on a CPU, false on a GPU; the Describe RPC says which."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's engine, by the names of vLLM's EngineArgs, for example
    `engine_args.max_num_batched_tokens = 8192`; as they are, without a check of what they do to weights that are
    replaced after each update."""

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, given: dict[str, Any]) -> dict[str, Any]:
        for key in given:
            if key in SET_FOR_VLLM:
                raise ValueError(f"{key} is set by {SET_FOR_VLLM[key]}, and cannot be given here")
        return given


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Declaration of an engine; see its two kinds, `EngineSpec` and `RolloutSpec`.

    Attributes:
        implementation: Class of the engine, as "module:Class". Only the service imports it.
        options: Type of the engine's table of options.
        options_key: Key of the service's table that holds these options.
        keys: Other keys of the service's table that some engines do not read and this one does. A key that is set and
            that the engine does not read is an error.
        package: Package that the implementation imports and that has an install of its own; empty for none.
        install: Sentence that says how to install it, for messages.
    """

    implementation: str
    options: type[Strict] = NoEngineOptions
    options_key: str
    keys: frozenset[str] = frozenset()
    package: str = ""
    install: str = ""

    def __post_init__(self) -> None:
        check_table_type(self.options, "an engine")

    @property
    def reads(self) -> frozenset[str]:
        """Keys of the service's table that this engine reads and that some other engines do not read."""
        return self.keys | {self.options_key}


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """Declaration of a training engine.

    Attributes:
        implementation: Subclass of `services.engines.base.TrainEngine`.
        keys: Those of mesh, shards_over_data, generation_mesh, transition, activation_checkpointing and
            sequence_parallel that the engine reads. Where it reads mesh, the table must set it. Where it reads
            generation_mesh alone, generation shards are made of `TrainEngine.local_shards`.
        adapters: Class of the engine that trains low-rank adapters (table `lora`), as "module:Class", with a method
            `without_adapters` as `services.engines.fsdp.lora.LoRAEngine`; empty: the engine trains none.
    """

    options_key: str = "engine_options"
    adapters: str = ""

    @property
    def reads(self) -> frozenset[str]:
        return super().reads | ({"lora"} if self.adapters else frozenset())


def fits_any_model(mesh: str, generation_mesh: str, shape: meshes.Shape = meshes.NO_SHAPE) -> None:
    """Does nothing: the default of `RolloutSpec.check_model`, for a rollout engine that generates with any model on any
    mesh."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(Spec):
    """Declaration of a rollout engine.

    Attributes:
        implementation: Subclass of `services.rollout.base.RolloutEngine`.
        temperatures: Lowest and highest sampling temperature that the engine allows.
        row_limit: Key that limits the tokens of a prompt and its response together, such as "rollout_tokens" or
            "rollout_options.max_tokens"; value 0 of this key means no limit. Empty: the engine has no such key.
        takes_shards: Whether the engine generates with weight shards on a generation mesh. If not, it is given whole
            weights, and each rank generates alone.
        in_training_memory: Whether the engine can generate with weights in the training engine's memory (engine 3d,
            transition hybridflow). If not, it keeps a copy.
        check_model: Function of `mesh`, `generation_mesh` and the integers of the model's config.json by key (none
            where it cannot be read). Raises ValueError where the engine cannot generate with such a model.
    """

    options_key: str = "rollout_options"
    temperatures: tuple[float, float] = (LOWEST_TEMPERATURE, math.inf)
    row_limit: str = ""
    takes_shards: bool = False
    in_training_memory: bool = False
    check_model: Callable[[str, str, meshes.Shape], None] = fits_any_model


TRAINING_ENGINES: Mapping[str, EngineSpec] = {
    "fsdp": EngineSpec(
        implementation="services.engines.fsdp.engine:FSDPEngine",
        adapters="services.engines.fsdp.lora:LoRAEngine",
        keys=frozenset({"activation_checkpointing", "generation_mesh", "sequence_parallel"}),
    ),
    "3d": EngineSpec(
        implementation="services.engines.three_d.engine:ThreeDParallelEngine",
        keys=frozenset(
            {"mesh", "shards_over_data", "generation_mesh", "transition", "activation_checkpointing"}
        ),
    ),
    "zero": EngineSpec(
        implementation="services.engines.zero.engine:ZeROEngine",
        options=ZeroTable,
        options_key="zero",
        keys=frozenset({"generation_mesh"}),
        package="deepspeed",
        install="install it: pip install 'rlhf-cluster[deepspeed]'",
    ),
}
"""Training engines of this project, by name."""

ROLLOUT_ENGINES: Mapping[str, RolloutSpec] = {
    "hf": RolloutSpec(
        implementation="services.rollout.hf:HFRollout",
        keys=frozenset({"rollout_tokens"}),
        row_limit="rollout_tokens",
        takes_shards=True,
        in_training_memory=True,
    ),
    "vllm": RolloutSpec(
        implementation="services.rollout.vllm:VLLMRollout",
        options=VllmTable,
        options_key="vllm",
        package="vllm",
        install="docs/rollout.md says how to install it",
        temperatures=VLLM_TEMPERATURES,
        row_limit="vllm.max_model_len",
        takes_shards=True,
        check_model=meshes.check_vllm,
    ),
    NO_ROLLOUT: RolloutSpec(implementation="services.rollout.none:NoRollout", takes_shards=True),
}
"""Rollout engines of this project, by name."""


def training_engine(name: str) -> EngineSpec:
    """Returns the spec of a training engine, by the name of one of this project or of an entry point, or as
    "module:object".

    Raises:
        PluginError: There is none; the text lists the known names.
    """
    return find_plugin(TRAINING_GROUP, name, EngineSpec, TRAINING_ENGINES)


def rollout_engine(name: str) -> RolloutSpec:
    """Returns the spec of a rollout engine, by the name of one of this project or of an entry point, or as
    "module:object". Raises PluginError where there is none."""
    return find_plugin(ROLLOUT_GROUP, name, RolloutSpec, ROLLOUT_ENGINES)


def _known(find: Callable[[str], Spec]) -> AfterValidator:
    def check(name: str) -> str:
        find(name)
        return name

    return AfterValidator(check)


TrainingEngineName = Annotated[str, _known(training_engine)]
RolloutEngineName = Annotated[str, _known(rollout_engine)]
"""Types of the keys `engine` and `rollout_engine`: names for which there is a spec."""


def check_options(spec: Spec, key: str, given: Any) -> dict[str, Any]:
    """Checks the table `engine_options` or `rollout_options` of a service; returns it with all defaults except None,
    or empty for an engine whose options are in another table.

    Args:
        spec: Spec of the service's engine.
        key: Key of the table.
        given: The table.

    Raises:
        ValueError: An option is unknown or wrong, or `given` is not empty and the engine's options are in another
        table.
    """
    if spec.options_key != key:
        if given:
            raise ValueError(f"the options of this engine are in the table {spec.options_key}")
        return {}
    try:
        return spec.options.model_validate(given).model_dump(mode="json", exclude_none=True)
    except ValidationError as error:
        raise ValueError(explain(error, given, spec.options)) from None


def check_keys(table: BaseModel, key: str, spec: Spec, built_in: Mapping[str, Spec]) -> None:
    """Checks that no key of a service's table that is only for other engines differs from its default.

    Args:
        table: Table of the service.
        key: Key that names the engine: engine or rollout_engine.
        spec: Spec of that engine.
        built_in: Engines of this project, by name: all keys that only some engines read are read by one of them.

    Raises:
        ValueError: There is one; the text names it and the engines that it is for.
    """
    readers: dict[str, list[str]] = {}
    for name, other in built_in.items():
        for each in other.reads - spec.reads:
            readers.setdefault(each, []).append(name)
    for name, field in type(table).model_fields.items():
        if name in readers and getattr(table, name) != field.default:
            kind = key.replace("_", " ") + ("s" if len(readers[name]) > 1 else "")
            raise ValueError(
                f"{name} is for {kind} {' and '.join(readers[name])}, and {key} is {getattr(table, key)}"
            )
