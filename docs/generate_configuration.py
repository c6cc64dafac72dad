"""Writes docs/configuration.md from the configuration's own types: `python docs/generate_configuration.py`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from controller import algorithms
from controller.config.algorithm import AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.config import Config
from controller.config.data import NOWHERE, DataTable, SourceTable
from controller.config.rollout import EnvironmentTable, EvaluationTable, RolloutTable
from controller.config.run import RunTable
from controller.config.tracking import TrackingTable
from controller.training.algorithm import NoOptions
from rlhf.roles import BUILT_IN
from settings.actor import LoraTable
from settings.endpoints import HttpTable, JudgeTable
from settings.engines import VllmTable, ZeroTable
from settings.generation import GeneratingTable
from settings.model import LoadedModelTable, ModelTable, OptimizerTable
from settings.reward import SandboxTable
from settings.security import SecurityTable
from settings.service import ServiceTable
from settings.services import table_type

SHARED = (ServiceTable, LoadedModelTable, ModelTable, GeneratingTable)
"""Tables whose keys several roles have. Each is shown once."""


def _roles_with(table: type[BaseModel]) -> str:
    """The roles that have the keys of a table, as text."""
    *roles, last = (f'"{role}"' for role in BUILT_IN if issubclass(table_type(role), table))
    return f"{', '.join(roles)} or {last}"


TABLES: list[tuple[str, type[BaseModel]]] = [
    ("[run]", RunTable),
    ("[data]", DataTable),
    ("[[data.sources]]", SourceTable),
    ("[rollout]", RolloutTable),
    ("[rollout.environment]", EnvironmentTable),
    ("[rollout.evaluation]", EvaluationTable),
    ("[algorithm]", AlgorithmTable),
    ("[security]", SecurityTable),
    ("[checkpoint]", CheckpointTable),
    ("[tracking]", TrackingTable),
    ("[services.NAME] of every role", ServiceTable),
    *((f"[services.NAME] with role = {_roles_with(table)}", table) for table in SHARED[1:]),
    *((f'[services.NAME] with role = "{role}"', table_type(role)) for role in BUILT_IN),
    ("[services.NAME.sandbox]", SandboxTable),
    ("[services.NAME.judge]", JudgeTable),
    ("[services.NAME.http]", HttpTable),
    ("[services.NAME.optimizer]", OptimizerTable),
    ("[services.NAME.vllm]", VllmTable),
    ("[services.NAME.lora]", LoraTable),
    ("[services.NAME.zero]", ZeroTable),
]

PLACES = ("placement", "devices", "device_memory_gb")
"""Keys of a config that are in no table."""

HEAD = """# Configuration

One TOML file serves the controller, the services and the launcher. Keys are strict: an unknown one is an
error. `--set key.path=value` changes a value from the command line. Relative paths are relative to the
working directory. This page is made from the types in `controller/config/` and `settings/` by
`python docs/generate_configuration.py`.
"""


def render() -> str:
    """The page."""
    parts = [HEAD, _section("Above all tables", Config, {key: Config.model_fields[key] for key in PLACES})]
    for title, table in TABLES:
        inherited = {name for each in table.__mro__[1:] if each in SHARED for name in each.model_fields}
        fields = {name: field for name, field in table.model_fields.items() if name not in inherited}
        parts.append(_section(f"`{title}`", table, fields))
        if table is AlgorithmTable:
            parts += _algorithms()
    pools = Config.model_fields["pools"].description
    rewards = Config.model_fields["rewards"].description
    parts.append(
        f"## `[rewards.NAME]`\n\n{rewards} For example `[rewards.reward]` with `math = 1.0` and `form = 0.2`.\n"
    )
    parts.append(f'## `[pools]`\n\n{pools} For example `shared = ["cpu:0", "cpu:1"]`.\n')
    return "\n".join(parts)


def _section(title: str, table: type[BaseModel], fields: dict[str, FieldInfo]) -> str:
    about = f"## {title}\n\n{inspect.getdoc(table) or ''}"
    if not fields:
        return f"{about} It has no keys of its own.\n"
    head = "| key | type | default | |\n|---|---|---|---|"
    return "\n".join([f"{about}\n\n{head}", *_rows(fields)]) + "\n"


def _algorithms() -> Iterator[str]:
    """Declarations of the algorithms."""
    found = {name: algorithms.find_algorithm(name) for name in algorithms.names()}
    head = "| algorithm | services (role, where not the name) | defaults of its own |\n|---|---|---|"
    rows = []
    for name, algorithm in found.items():
        services = ", ".join(
            (service if service == role else f"{service} ({role})")
            + (f" where `{algorithm.only_for[service]}` is not 0" if service in algorithm.only_for else "")
            + (" where there is one" if service in algorithm.optional else "")
            for service, role in (algorithm.services or {}).items()
        )
        defaults = ", ".join(f"`{key} = {_toml(value)}`" for key, value in algorithm.defaults.items())
        rows.append(f"| `{name}` | {services} | {defaults} |")
    yield (
        "\n".join(["## `[algorithm]` by algorithm\n\nSee [algorithms.md](algorithms.md).\n", head, *rows])
        + "\n"
    )
    sharing: dict[type[BaseModel], list[str]] = {}
    for name, algorithm in found.items():
        sharing.setdefault(algorithm.options, []).append(name)
    del sharing[NoOptions]
    for options, names in sharing.items():
        yield _section(f"`[algorithm.options]` of {', '.join(names)}", options, options.model_fields)


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def _rows(fields: dict[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        text = (field.description or "").replace("\n", " ").replace("|", "\\|")
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {text} |"


def _type(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_type(arguments[0])}s"
    if origin is tuple:
        return f"{len(arguments)} x {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if origin is dict:
        return "table"
    return {Path: "path"}.get(annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[arg-type]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if (
        field.default is None
        or isinstance(field.default, BaseModel)
        or field.default in ("", {}, (), NOWHERE)
    ):
        return ""
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    shown = list(value) if isinstance(value, tuple) else value
    return "`" + str(shown).replace("\n", "\\n").replace("|", "\\|") + "`"


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(render())
