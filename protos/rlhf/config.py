"""The typed configuration of a service: what its launcher and the controller both have to know of it.

A config file is TOML with one table per service, `[services.NAME]`. A service reads its own table; the
controller reads all of them. Keys are strict: an unknown one is an error that lists the known ones.
Relative paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from rlhf.errors import ConfigError

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


class ServiceTable(Strict):
    """What services of every role have in common."""

    address: str
    """host:port of rank 0. The other ranks choose their ports and are found through rank 0."""
    external: bool = False
    """Somebody else starts the service, for example one in another language: the launcher leaves it alone."""
    ranks: Positive = 1
    """Processes of the service, one per device."""
    pool: str = ""
    """Resource pool the service runs on; services on pools that share a device take turns. Empty: devices
    of its own."""
    threads: Positive = 1
    """Threads each rank computes with. Bits depend on it."""
    arena_mb: Positive = 64
    """Size in MiB of the memory each rank keeps results in until the step ends."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time from launch to a healthy service."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r} is not host:port with a port from 1 to 65535")
        if host in ("0.0.0.0", "[::]", "*"):
            raise ValueError(
                f"{address!r}: the address is also where other ranks connect to; name one of this host"
            )
        return address


class ModelTable(ServiceTable):
    """What services with a model have in common."""

    model: Path
    """Hugging Face directory of the model and its tokenizer."""
    engine: Literal["fsdp"] = "fsdp"
    """Training engine that holds the model: FSDP2 over the service's ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the weights are computed in."""
    micro_batch_tokens: Positive = 16384
    """Most tokens, padding included, in one forward pass: bounds memory whatever the batch."""


class ActorTable(ModelTable):
    """The policy."""

    role: Literal["actor"]
    """actor"""
    optimizer: OptimizerTable = OptimizerTable()
    """How the policy learns."""
    rollout_engine: Literal["hf"] = "hf"
    """Generates the responses: hf is the embedded engine, which runs anywhere."""
    rollout_tokens: Positive = 65536
    """Most tokens, padding included, generated at the same time on a rank: bounds the KV cache."""


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


class RewardTable(ServiceTable):
    """A reward or cost: a Python function, or a Hugging Face sequence-classification model."""

    role: Literal["reward"]
    """reward"""
    kind: Literal["function", "model"] = "function"
    """function scores text with Python; model scores with a sequence-classification model."""
    function: str = "exact_match"
    """For kind function: exact_match, or module:function of your own."""
    model: Path | None = None
    """For kind model: Hugging Face directory of the model and its tokenizer."""
    input: Literal["text", "tensor"] = "text"
    """For kind model: text lets it use a tokenizer of its own; tensor reads the actor's token ids and needs
    the actor's vocabulary."""
    micro_batch_tokens: Positive = 16384
    """For kind model: most tokens, padding included, in one forward pass."""


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
        raise ConfigError(f"config {source}: {_explain(error, kind)}") from None


def load_service(path: Path, name: str, settings: tuple[str, ...] = ()) -> Any:
    """The table `[services.name]` of a config file, as its type.

    Raises:
        ConfigError: As `read_toml` and `validate`; or there is no such table.
    """
    services = override(read_toml(path), settings).get("services", {})
    if not isinstance(services, dict) or name not in services:
        known = ", ".join(sorted(services)) if isinstance(services, dict) else ""
        raise ConfigError(f"config {path}: no table [services.{name}]; there are: {known or 'none'}")
    try:
        return TypeAdapter(Service).validate_python(services[name])
    except ValidationError as error:
        raise ConfigError(f"config {path}: {_explain(error, None, ('services', name))}") from None


def _explain(error: ValidationError, kind: type[BaseModel] | None, prefix: tuple[str, ...] = ()) -> str:
    details = error.errors()
    lines = []
    for detail in details[:3]:
        path = [*prefix, *(str(part) for part in detail["loc"])]
        # The union's tag stands in the location after the service's name and is not a key of the file.
        shown = ".".join(
            part for i, part in enumerate(path) if not (i == 2 and path[0] == "services" and part in _ROLES)
        )
        if detail["type"] == "extra_forbidden":
            known = _known_keys(kind, path)
            close = difflib.get_close_matches(path[-1], known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            lines.append(
                f"{shown}: unknown key{hint} Known keys: {', '.join(known)}"
                if known
                else f"{shown}: unknown key"
            )
        else:
            message = detail["msg"].removeprefix("Value error, ")
            given = "" if detail["type"] in ("missing", "value_error") else f" (given: {detail['input']!r})"
            lines.append(f"{shown + ': ' if shown else ''}{message}{given}")
    if len(details) > 3:
        lines.append(f"and {len(details) - 3} more")
    return "; ".join(lines)


_ROLES: dict[str, type[ServiceTable]] = {
    "actor": ActorTable,
    "critic": CriticTable,
    "reference": ReferenceTable,
    "reward": RewardTable,
}


def _known_keys(kind: type[BaseModel] | None, path: list[str]) -> list[str]:
    """Keys of the table that the last part of the path was looked for in."""
    parents = path[:-1]
    if len(parents) >= 3 and parents[0] == "services" and parents[2] in _ROLES:
        kind, parents = _ROLES[parents[2]], parents[3:]
    for part in parents:
        field = kind.model_fields.get(part) if kind else None
        annotation = field.annotation if field else None
        kind = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return list(kind.model_fields) if kind else []
