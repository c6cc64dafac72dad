"""The tables of all roles, and the table of one service in a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from rlhf.errors import ConfigError
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.explain import explain, nearest
from settings.reference import ReferenceTable
from settings.reward import RewardTable
from settings.service import ServiceTable
from settings.strict import override, read_toml

Service = Annotated[ActorTable | CriticTable | ReferenceTable | RewardTable, Field(discriminator="role")]
"""One `[services.NAME]` table, told apart by its `role`."""

ROLES: dict[str, type[ServiceTable]] = {
    "actor": ActorTable,
    "critic": CriticTable,
    "reference": ReferenceTable,
    "reward": RewardTable,
}
"""Type of a service's table by its role."""


def load_service(path: Path, name: str, settings: tuple[str, ...] = ()) -> Any:
    """The table `[services.name]` of a config file, as its type.

    Raises:
        ConfigError: As of `read_toml` and `validate`; or the file has no table of this name.
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
        why = explain(error, {"services": services}, None, ROLES, ("services", name))
        raise ConfigError(f"config {path}: {why}") from None


def output_roots(path: Path, table: ServiceTable, settings: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """The directories below which a service of a config file writes: `output_roots` of its table, or `directory` of
    `[run]`."""
    run = override(read_toml(path), settings).get("run", {})
    runs = run.get("directory", "runs") if isinstance(run, dict) else "runs"
    return tuple(root.resolve() for root in table.output_roots or (Path(runs),))
