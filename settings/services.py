"""Types of the `[services.NAME]` tables by role, and a function that reads one of them from a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from rlhf.errors import ConfigError
from rlhf.plugins import nearest
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.explain import explain
from settings.reference import ReferenceTable
from settings.reward import RewardTable
from settings.service import ServiceTable
from settings.strict import override, read_toml

Service = Annotated[ActorTable | CriticTable | ReferenceTable | RewardTable, Field(discriminator="role")]
"""Type of a `[services.NAME]` table: a union that pydantic discriminates by the key `role`."""

ROLES: dict[str, type[ServiceTable]] = {
    "actor": ActorTable,
    "critic": CriticTable,
    "reference": ReferenceTable,
    "reward": RewardTable,
}
"""Type of a service's table, by role."""


def load_service(path: Path, name: str, settings: tuple[str, ...] = ()) -> Any:
    """Reads the table `[services.NAME]` of a config file. Returns an instance of the type for its role; see `ROLES`.

    Args:
        path: The config file.
        name: Name of the service.
        settings: Overrides "key.path=value"; see `override`.

    Raises:
        ConfigError: The file cannot be read or is not TOML, it has no such table, or the table is invalid.
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
    """Returns the absolute directories below which a service may write: `output_roots` of its table, or, where that
    is empty, `directory` of `[run]` in the config file.

    Args:
        path: The config file.
        table: Table of the service.
        settings: Overrides "key.path=value" of the file's values.
    """
    run = override(read_toml(path), settings).get("run", {})
    runs = run.get("directory", "runs") if isinstance(run, dict) else "runs"
    return tuple(root.resolve() for root in table.output_roots or (Path(runs),))
