"""One-line explanations of configuration errors: the key, its allowed values, and the key that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rlhf.plugins import load_class, nearest
from rlhf.roles import find_role, role_names

SHOWN = 3
"""Maximum number of errors that a message describes; further ones are only counted."""

Details = Mapping[str, Any]
"""One entry of `pydantic.ValidationError.errors()`: a dictionary with type, loc, msg, input and ctx."""

_MUST: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "literal_error": lambda context: f"must be {context['expected']}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "greater_than": lambda context: f"must be above {_number(context['gt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "less_than": lambda context: f"must be below {_number(context['lt'])}",
    "too_short": lambda context: f"must have at least {context['min_length']} values",
    "too_long": lambda context: f"must have at most {context['max_length']} values",
    "finite_number": "must be finite",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a table"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be a string",
    "path_type": "must be a path",
}


def explain(
    error: ValidationError,
    tables: Any,
    kind: type[BaseModel] | None,
    prefix: tuple[str, ...] = (),
) -> str:
    """Returns one line that describes the first `SHOWN` errors of a validation: key, value and what is allowed.

    Args:
        error: The error that pydantic raised.
        tables: Parsed TOML that was validated.
        kind: Type that `tables` were validated as; None for one service's table.
        prefix: Keys that lead to the validated table in the file, for example services and actor.
    """
    mistakes = error.errors()
    lines = [_mistake(each, tables, kind, prefix) for each in mistakes[:SHOWN]]
    if len(mistakes) > SHOWN:
        lines.append(f"and {len(mistakes) - SHOWN} more")
    return "; ".join(lines)


def _number(number: float) -> str:
    """Returns a number as text, a whole one with all of its digits."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def _mistake(details: Details, tables: Any, kind: type[BaseModel] | None, prefix: tuple[str, ...]) -> str:
    path = [*prefix, *(str(part) for part in details["loc"])]
    shown, given = ".".join(path), details["input"]
    match details["type"]:
        case "extra_forbidden":
            known = _known_keys(kind, path, tables)
            hint = _in_a_table(kind, path) or nearest(path[-1], known) or "."
            return f"{shown}: unknown key" + (f"{hint} Known keys: {', '.join(known)}" if known else "")
        case "missing" if len(path) == 3 and path[0] == "services" and path[2] == "role":
            return _without_role(path[1], tables)
        case "missing":
            return f"{shown}: required, and not given"
        case "value_error":
            return f"{shown + ': ' if shown else ''}{details['msg'].removeprefix('Value error, ')}"
        case kind_of_mistake:
            must = _MUST.get(kind_of_mistake)
            text = must(details["ctx"]) if callable(must) else must or details["msg"]
            is_choice = kind_of_mistake == "literal_error" and isinstance(given, str)
            hint = nearest(given, details["ctx"]["expected"].split("'")[1::2]) if is_choice else ""
            return f"{shown}: {text} (given: {given!r}){hint}"


def _without_role(name: str, tables: Any) -> str:
    """Returns the message for a service's table without the key role: "unknown service" where its name is similar to
    that of a service, else "required"."""
    services = tables.get("services", {}) if isinstance(tables, dict) else {}
    others = [other for other, table in services.items() if isinstance(table, dict) and "role" in table]
    hint = nearest(name, others)
    if hint:
        return f"services.{name}: unknown service{hint} There are: {', '.join(others)}"
    return f"services.{name}.role: required, and not given: {', '.join(role_names())}, or module:object"


def _known_keys(kind: type[BaseModel] | None, path: list[str], tables: Any) -> list[str]:
    """Returns the keys that are allowed in the table at `path[:-1]`, for the message about the unknown key `path[-1]`;
    none where that table has no type of its own."""
    parents = path[:-1]
    if len(parents) >= 2 and parents[0] == "services":
        role = tables["services"][parents[1]]["role"]
        kind, parents = load_class(find_role(role).table, BaseModel), parents[2:]
    for part in parents:
        kind = _table_type(kind, part) if kind else None
    return list(kind.model_fields) if kind else []


def _in_a_table(kind: type[BaseModel] | None, path: list[str]) -> str:
    """Returns `; did you mean 'TABLE.KEY'?` where an unknown top-level key is a key of a table; else an empty text."""
    if kind is None or len(path) != 1:
        return ""
    tables = {name: _table_type(kind, name) for name in kind.model_fields}
    found = [name for name, table in tables.items() if table and path[0] in table.model_fields]
    return f"; did you mean {f'{found[0]}.{path[0]}'!r}?" if found else ""


def _table_type(kind: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Returns the type of the table at `key` of a table of type `kind`; None where there is no table of one type."""
    field = kind.model_fields.get(key)
    annotation = field.annotation if field else None
    choices = get_args(annotation) or (annotation,)
    return next((each for each in choices if isinstance(each, type) and issubclass(each, BaseModel)), None)
