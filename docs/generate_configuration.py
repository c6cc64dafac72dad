"""Writes docs/configuration.md from the configuration's own types: `python docs/generate_configuration.py`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from controller.config import AlgorithmTable, Config, DataTable, RolloutTable, RunTable
from rlhf.config import ActorTable, CriticTable, OptimizerTable, ReferenceTable, RewardTable, ServiceTable

TABLES: list[tuple[str, type[BaseModel]]] = [
    ("[run]", RunTable),
    ("[data]", DataTable),
    ("[rollout]", RolloutTable),
    ("[algorithm]", AlgorithmTable),
    ("[services.NAME] of every role", ServiceTable),
    ('[services.NAME] with role = "actor"', ActorTable),
    ('[services.NAME] with role = "critic"', CriticTable),
    ('[services.NAME] with role = "reference"', ReferenceTable),
    ('[services.NAME] with role = "reward"', RewardTable),
    ("[services.NAME.optimizer]", OptimizerTable),
]

HEAD = """# Configuration

One TOML file serves the controller, the services and the launcher. Keys are strict: an unknown one is an
error. `--set key.path=value` changes a value from the command line. Relative paths are relative to the
working directory. This page is made from the types in `controller/config.py` and `rlhf/config.py` by
`python docs/generate_configuration.py`.
"""


def render() -> str:
    """The page."""
    parts = [HEAD]
    shared = ServiceTable.model_fields.keys()
    for title, table in TABLES:
        own = issubclass(table, ServiceTable) and table is not ServiceTable
        fields = {name: field for name, field in table.model_fields.items() if not (own and name in shared)}
        head = "| key | type | default | |\n|---|---|---|---|"
        about = (table.__doc__ or "").strip()
        parts.append("\n".join([f"## `{title}`\n\n{about}\n\n{head}", *_rows(fields)]) + "\n")
    pools = Config.model_fields["pools"].description
    parts.append(f'## `[pools]`\n\n{pools} For example `shared = ["cpu:0", "cpu:1"]`.\n')
    return "\n".join(parts)


def _rows(fields: dict[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        text = (field.description or "").replace("\n", " ").replace("|", "\\|")
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {text} |"


def _type(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is types.UnionType:
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return f"{len(arguments)} x {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return {Path: "path"}.get(annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[arg-type]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or isinstance(field.default, BaseModel) or field.default == "":
        return ""
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(render())
