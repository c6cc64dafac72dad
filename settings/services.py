"""Types of the `[services.NAME]` tables by role, and a function that validates one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator, SerializeAsAny, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails

from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, load_class, nearest
from rlhf.roles import find_role
from settings.explain import explain
from settings.generation import RESPONSE_TOKENS
from settings.losses import LOSSES
from settings.service import ServiceTable


def table_type(role: str) -> type[ServiceTable]:
    """Returns the type of `[services.NAME]` for a role.

    Raises:
        PluginError: There is no such role, or its table cannot be imported or is no ServiceTable.
    """
    return load_class(find_role(role).table, ServiceTable)


def _of_its_role(given: Any) -> ServiceTable:
    """Validates the table of a service as the type for its key `role`, and returns an instance of it; an instance of
    ServiceTable is returned as it is. Raises pydantic's ValidationError where the table is invalid."""
    if isinstance(given, ServiceTable):
        return given
    if not isinstance(given, dict):
        return ServiceTable.model_validate(given)
    role = given.get("role")
    if not isinstance(role, str):
        defect = "string_type" if "role" in given else "missing"
        raise _refused(InitErrorDetails(type=defect, loc=("role",), input=role))
    try:
        table = table_type(role)
    except PluginError as error:
        details = InitErrorDetails(type="value_error", loc=("role",), input=role, ctx={"error": error})
        raise _refused(details) from None
    return table.model_validate(given)


def _refused(details: InitErrorDetails) -> ValidationError:
    return ValidationError.from_exception_data("services", [details])


Service = Annotated[SerializeAsAny[ServiceTable], PlainValidator(_of_its_role)]
"""Type of a `[services.NAME]` table: pydantic validates it as the type for its key `role`, see `table_type`."""


def service_of(tables: Mapping[str, Any], name: str, path: Path) -> Any:
    """Returns the table `[services.NAME]` of a config file, an instance of the type for its role.

    Args:
        tables: Tables of the config file.
        name: Name of the service.
        path: The config file, for messages.

    Raises:
        ConfigError: There is no such table, or it is invalid.
    """
    services = tables.get("services", {})
    if not isinstance(services, dict) or name not in services:
        known = sorted(services) if isinstance(services, dict) else []
        raise ConfigError(
            f"config {path}: no table [services.{name}]{nearest(name, known)}; there are: {', '.join(known) or 'none'}"
        )
    try:
        return TypeAdapter(Service).validate_python(services[name])
    except ValidationError as error:
        why = explain(error, {"services": services}, None, ("services", name))
        raise ConfigError(f"config {path}: {why}") from None


def output_roots(tables: Mapping[str, Any], table: ServiceTable) -> tuple[Path, ...]:
    """Returns the absolute directories below which a service may write: `output_roots` of its table, or, where that
    is empty, `directory` of `[run]` in the config file.

    Args:
        tables: Tables of the config file.
        table: Table of the service.
    """
    run = tables.get("run", {})
    runs = run.get("directory", "runs") if isinstance(run, dict) else "runs"
    return tuple(Path(os.path.realpath(root)) for root in table.output_roots or (Path(runs),))


def row_tokens(tables: Mapping[str, Any]) -> int:
    """Returns the most tokens of a prompt and its response together in the run that a config file describes, 0 where
    `data.max_prompt_tokens` is not set.

    Args:
        tables: Tables of the config file.
    """
    data, rollout = (
        table if isinstance(table := tables.get(key), dict) else {} for key in ("data", "rollout")
    )
    prompt = data.get("max_prompt_tokens", 0)
    response = rollout.get("max_response_tokens", RESPONSE_TOKENS)
    # The controller refuses other values.
    are_sizes = all(isinstance(size, int) and size > 0 for size in (prompt, response))
    return prompt + response if are_sizes else 0


def shares_devices(tables: Mapping[str, Any], table: ServiceTable) -> bool:
    """Returns whether other services may be on the devices of a service: its table names a pool, or the config file has
    a `placement`.

    Args:
        tables: Tables of the config file.
        table: Table of the service.
    """
    return bool(table.pool) or "placement" in tables


def named_losses(tables: Mapping[str, Any]) -> frozenset[str]:
    """Returns the losses that `[algorithm]` of a config file names, by its keys surrogate and value_loss. These are the
    only ones that a service imports as "module:object".

    Args:
        tables: Tables of the config file.
    """
    table = tables.get("algorithm", {})
    given = [table.get(key) for key in LOSSES] if isinstance(table, dict) else []
    return frozenset(name for name in given if isinstance(name, str))
