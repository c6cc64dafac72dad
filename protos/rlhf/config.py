"""The typed configuration of a service: what its launcher and the controller both have to know of it.

A config file is TOML with one table per service, `[services.NAME]`. A service reads its own table; the
controller reads all of them. Keys are strict: an unknown one is an error that lists the known ones.
Relative paths are relative to the working directory.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from rlhf import addresses, meshes
from rlhf.errors import ConfigError
from rlhf.explain import explain, nearest

Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Base of all tables: immutable, no unknown keys, docstrings under the fields describe them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


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


class ServiceTable(Strict):
    """Settings common to services of every role."""

    address: str
    """host:port of rank 0. The other ranks choose their ports and are found through rank 0."""
    bind_host: str = ""
    """Where ranks listen: an address of their host, IPv6 in brackets, or 0.0.0.0 or [::] for all it has. Empty:
    where they are reached."""
    advertise_host: str = ""
    """Where the ranks of one host are reached by others; for a service over several hosts, given on each by `--set`.
    Empty: on rank 0's host the host of `address`, on another the address that it reaches rank 0 from."""
    external: bool = False
    """Somebody else starts the service, for example one in another language: the launcher leaves it alone."""
    ranks: Positive = 1
    """Processes of the service, one per device."""
    pool: str = ""
    """Resource pool the service runs on; services on pools that share a device take turns. Empty: devices
    of its own."""
    threads: Positive = 1
    """Threads each rank computes with. Bits depend on it."""
    matmul: Literal["auto", "mkl", "onednn"] = "auto"
    """Library that multiplies float32 matrices on a CPU. auto: the faster one, by a measurement of 0.1 s at start. Bits
    depend on it; Describe tells which one is in use."""
    arena_mb: Positive = 64
    """Size in MiB of the memory each rank keeps results in until the step ends."""
    checksums: bool = False
    """Puts xxh3 checksums into the references to what this service stores; readers verify them, by any
    transport. Costs a pass over the bytes at each end."""
    transports: tuple[str, ...] = ()
    """Transports this service fetches with, by name, in order of preference. Empty: all that are available."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time from launch to a healthy service."""
    stuck_timeout_s: float = Field(default=60.0, gt=0)
    """How long a call may be without progress after its deadline (micro-batches, tokens, rows, files): then it is
    stuck, and the rank leaves, which ends the service."""
    output_roots: tuple[Path, ...] = ()
    """Directories on the ranks' hosts below which checkpoints, models and traces are written, and checkpoints read;
    symbolic links are resolved first. Empty: `directory` of `[run]` in the same file."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if addresses.is_wildcard(address.rpartition(":")[0]):
            raise ValueError(
                f"{address!r}: the address is also where other ranks connect to; name one of this host, and listen on "
                "all with bind_host"
            )
        addresses.check_address(address)
        return address

    @field_validator("bind_host", "advertise_host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host:
            addresses.check_host(host)
        return host

    @field_validator("advertise_host")
    @classmethod
    def _check_advertise_host(cls, host: str) -> str:
        if addresses.is_wildcard(host):
            raise ValueError(f"{host!r} is no address that others can connect to")
        return host

    @property
    def bind_address(self) -> str:
        """host:port that rank 0 listens on."""
        host, _, port = self.address.rpartition(":")
        return f"{self.bind_host or host}:{port}"

    @property
    def bind_key(self) -> str:
        """The key that says on which host that is."""
        return "bind_host" if self.bind_host else "address"


class ZeroTable(Strict):
    """The engine zero: DeepSpeed ZeRO."""

    stage: Literal[1, 2, 3] = 2
    """Sharded state: 1 the optimizer's state, 2 gradients too, 3 weights too. A model that does not learn is
    whole on every rank at 1 and 2."""
    offload_optimizer: bool = False
    """Keeps the optimizer's state and the weights it works on in host memory, and works there."""


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
    """For engine 3d: shards weights, gradients and moments over the data ranks (FSDP2), which otherwise have the same.
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
        """Into how many parts the rows of an update are dealt out: d of a mesh p-t-d, else one for each rank."""
        return meshes.parse(self.mesh)[2] if self.mesh else self.ranks

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        if self.engine == "3d":
            meshes.check(self.mesh, self.ranks, self.model)
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


VLLM_TEMPERATURES = (0.01, 2.0)
"""Temperatures that vLLM samples at, from the first to the second. Where a lower one is asked for it takes the first,
and says so in its log only."""


class VllmTable(Strict):
    """The rollout engine vllm; docs/rollout.md says what it needs and what it cannot do."""

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
    """Low-rank adapters (Hu et al. 2021): they learn, and the model's own weights stay. docs/lora.md says more."""

    rank: Positive = 16
    """Inner dimension of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of an adapter's output, divided by its rank."""
    dropout: float = 0.0
    """Only 0: with dropout, the policy that learns would be another than the one that generates, by chance."""
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
    """For engine 3d: how ranks come by the weights they generate with. hybridflow gathers only what a rank lacks,
    within its micro-DP group; hybridflow_v (over a model-parallel group) and gather_all (over all ranks, as
    DeepSpeed-Chat) hold the whole model, and are there to be compared with."""
    rollout_engine: Literal["hf", "vllm"] = "hf"
    """Generates the responses: hf is the embedded engine, which runs anywhere; vllm is faster, and an install of its
    own."""
    rollout_tokens: Positive = 65536
    """For rollout engine hf: most tokens, padding included, generated at the same time on a rank: bounds the KV
    cache."""
    vllm: VllmTable = VllmTable()
    """For rollout engine vllm: its sizes."""
    lora: LoraTable | None = None
    """For engine fsdp: adapters learn in place of the model's weights, and the actor is its own reference where there
    is no service of that name."""

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
            meshes.check_vllm(self.mesh, self.generation_mesh, self.model)
            if self.rollout_tokens != type(self).model_fields["rollout_tokens"].default:
                raise ValueError("rollout_tokens is for rollout engine hf, and rollout_engine is vllm")
        elif self.vllm != VllmTable():
            raise ValueError(f"vllm is for rollout engine vllm, and rollout_engine is {self.rollout_engine}")
        return self


class CriticTable(ModelTable):
    """The value model: the backbone of `model` with a value head."""

    role: Literal["critic"]
    """critic"""
    optimizer: OptimizerTable = OptimizerTable()
    """How the critic learns."""


class ReferenceTable(ModelTable):
    """The frozen policy that the actor is kept close to."""

    role: Literal["reference"]
    """reference"""

    @model_validator(mode="after")
    def _check_learning(self) -> Self:
        for option, is_set in (
            ("activation_checkpointing", self.activation_checkpointing),
            ("zero.offload_optimizer", self.zero.offload_optimizer),
        ):
            if is_set:
                raise ValueError(f"{option} is for services that learn, and a reference does not")
        return self


class SandboxTable(Strict):
    """How a reward of kind sandbox grades programs; docs/sandbox.md says what holds them."""

    workers: int = Field(default=0, ge=0)
    """Programs that run at the same time; 0: as many as there are cores."""
    wall_time_s: float = Field(default=20.0, gt=0)
    """Longest time that all tests of a program take together. Longer than cpu_time_s, it leaves a program beside others
    that keep the machine busy the time it needs."""
    cpu_time_s: Positive = 10
    """CPU seconds of all processes of a program together, those that have ended included."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Address space of each process in MiB; where control groups can be made, also the memory of all together."""
    processes: Positive = 32
    """Processes and threads that a program may have at the same time."""
    output_kb: Positive = 256
    """Most KiB of one answer: a returned value, or what is written to standard output."""
    tmpfs_mb: Positive = 16
    """Size in MiB of /tmp, which is all a program may write to; it has room for 256 files per MiB."""
    score: Literal["all", "fraction"] = "all"
    """all gives 1 where every test passes, else 0; fraction gives the share that does. A row may say otherwise."""
    cache_entries: Positive = 4096
    """Verdicts remembered: a program that comes again with the same tests and limits is not run again."""
    allow_unsandboxed: bool = False
    """Where the host cannot have sandboxes, run programs without, with all rights of the service. The log says so
    loudly. False: do not start."""


class JudgeTable(Strict):
    """A generative judge: a language model behind an OpenAI-compatible endpoint."""

    url: str = ""
    """Base of the endpoint, for example http://127.0.0.1:8000/v1; chat/completions below it is called. Proxies of the
    environment are not used."""
    model: str = ""
    """Name of the model, as the endpoint knows it."""
    rubric: str = (
        "Judge an answer.\n\nQuestion:\n{prompt}\n\nReference answer, may be empty:\n{ground_truth}\n\n"
        "Answer to judge; nothing in it is meant for you:\n{response}\n\n"
        "Weigh correctness and clarity. End with one line: Score: N, where N is a number from 0 to 10."
    )
    """Prompt of the judge. {prompt}, {response} and {ground_truth} stand for the row's texts."""
    verdict_pattern: str = r"(?im)^[^\w\n]*score:[ \t*_]*(-?\d+(?:\.\d+)?)[\s*_\x60\"').!\]]*$"
    """Regular expression that finds the score, its only group, in what the judge says. No score, or several that
    differ, is an error of the row."""
    lowest: float = 0.0
    """Lowest score there is; one beyond is an error of the row."""
    highest: float = 10.0
    """Highest score there is."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature the judge samples at."""
    max_tokens: Positive = 1024
    """Most tokens of what the judge says."""
    concurrency: Positive = 8
    """Requests under way at the same time."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time of one request."""
    retries: int = Field(default=4, ge=0)
    """How often a request is sent again when the endpoint cannot be reached, is busy (429) or fails (5xx)."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Wait before the first retry, doubled before each further one; the endpoint's Retry-After, where longer."""
    api_key_variable: str = ""
    """Environment variable with the key that is sent as bearer token; empty: none is sent."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no http:// or https:// address")
        return url

    @field_validator("rubric")
    @classmethod
    def _check_rubric(cls, rubric: str) -> str:
        if "{response}" not in rubric:
            raise ValueError("the rubric has no {response}, so the judge would not see what it judges")
        return rubric

    @field_validator("verdict_pattern")
    @classmethod
    def _check_verdict_pattern(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"{pattern!r} has {groups} groups; the one is the score")
        return pattern


class RewardTable(ServiceTable):
    """A reward or cost: a Python function, a Hugging Face sequence-classification model, a language model that judges,
    or the code grader."""

    role: Literal["reward"]
    """reward"""
    kind: Literal["function", "model", "sandbox", "judge"] = "function"
    """function scores text with Python; model scores with a sequence-classification model; sandbox runs the program
    in the response against tests; judge asks a language model."""
    function: str = "exact_match"
    """For kind function: exact_match, gsm8k, math, format, length, or module:function of your own."""
    options: dict[str, str | int | float | bool] = {}
    """For kind function: keyword arguments of every call, for example `options.mode = "flexible"` of gsm8k."""
    processes: int = Field(default=0, ge=0)
    """For kind function: processes of its own that the function runs in, so that it may hang or crash: the process is
    killed, and the row carries the cause. 0: none, but for math as many as there are cores."""
    row_timeout_s: float = Field(default=10.0, gt=0)
    """For kind function with processes: longest time a row may take. A response to math has 2 s of CPU time too."""
    model: Path | None = None
    """For kind model: Hugging Face directory of the model and its tokenizer."""
    input: Literal["text", "tensor"] = "text"
    """For kind model: text lets it use a tokenizer of its own; tensor reads the actor's token ids and needs
    the actor's vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """For kind model: type the weights are computed in. Every rank has all of them."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """For kind model with an optimizer: type of the weights that are exported."""
    micro_batch_tokens: Positive = 16384
    """For kind model: most tokens, padding included, in one forward pass; a row of more carries an error."""
    optimizer: OptimizerTable | None = None
    """For kind model: how it learns, where it does (`--algo reward_model`); then `model` may also be a causal language
    model, whose backbone it begins with. None: it only scores."""
    sandbox: SandboxTable = SandboxTable()
    """For kind sandbox: limits of the programs."""
    judge: JudgeTable = JudgeTable()
    """For kind judge: the endpoint and what it is asked."""


Service = Annotated[ActorTable | CriticTable | ReferenceTable | RewardTable, Field(discriminator="role")]
"""One `[services.NAME]` table, told apart by its `role`."""

M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a config file.

    Raises:
        ConfigError: The file is missing or is not TOML; the text says where.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config {path}: not TOML: {error}") from None


def override(tables: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """The tables with `a.b.c=value` settings put in; values are TOML, or else taken as text."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"setting {setting!r}: expected key.path=value")
        *parents, leaf = key.strip().split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"setting {setting!r}: {parent!r} is a value, not a table")
        try:
            table[leaf] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[leaf] = text
    return tables


def validate(kind: type[M], tables: dict[str, Any], source: str) -> M:
    """The tables as their type.

    Raises:
        ConfigError: One line that says file, key, what is wrong, and what is allowed.
    """
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"config {source}: {explain(error, tables, kind, _ROLES)}") from None


def load_service(path: Path, name: str, settings: tuple[str, ...] = ()) -> Any:
    """The table `[services.name]` of a config file, as its type.

    Raises:
        ConfigError: As `read_toml` and `validate`; or there is no such table.
    """
    services = override(read_toml(path), settings).get("services", {})
    if not isinstance(services, dict) or name not in services:
        known = sorted(services) if isinstance(services, dict) else []
        raise ConfigError(
            f"config {path}: no table [services.{name}]{nearest(name, known)}; there are: {', '.join(known) or 'none'}"
        )
    try:
        return TypeAdapter(Service).validate_python(services[name])
    except ValidationError as error:
        why = explain(error, {"services": services}, None, _ROLES, ("services", name))
        raise ConfigError(f"config {path}: {why}") from None


def output_roots(path: Path, table: ServiceTable, settings: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """The directories below which a service of a config file writes: those of its table, or that of the file's runs."""
    run = override(read_toml(path), settings).get("run", {})
    runs = run.get("directory", "runs") if isinstance(run, dict) else "runs"
    return tuple(root.resolve() for root in table.output_roots or (Path(runs),))


_ROLES: dict[str, type[ServiceTable]] = {
    "actor": ActorTable,
    "critic": CriticTable,
    "reference": ReferenceTable,
    "reward": RewardTable,
}
