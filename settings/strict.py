"""Base class of all tables of the config file, and functions that read them from TOML.

A config file is TOML with one table per service, `[services.NAME]`. A service reads its own table; the controller reads
all of them. Keys are strict: an unknown one is an error that lists the known ones. Relative paths are relative to the
working directory.
"""

from __future__ import annotations

import math
import tomllib
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticKnownError

from rlhf.errors import ConfigError
from settings.explain import explain

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
LONGEST_S = 30 * 86_400.0
"""Longest time limit, in seconds (30 days); timers overflow at larger ones."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
"""A time limit in seconds."""


class Strict(BaseModel):
    """Base class of all tables: immutable pydantic models that refuse unknown keys. The docstring below each field is
    its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_taken_and_kept_as_given(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Refuses true and false where a number is required, which pydantic converts to 1 and 0; and see
        `_check_kept`."""
        validated = validate(value)
        if isinstance(value, bool) and type(validated) in (int, float):
            raise PydanticKnownError("int_type" if isinstance(validated, int) else "float_type")
        if isinstance(validated, dict):
            _check_kept(validated)
        return validated


def _check_kept(value: Any) -> None:
    """Refuses in tables of any keys what the config that is written for a run does not keep as it is: None, numbers
    that are not finite, dates and times. What reads that file, as a resumed run, would get something else."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list | tuple):
            _check_kept(each)
        elif isinstance(each, float) and not math.isfinite(each):
            raise PydanticKnownError("finite_number")
        elif each is None:
            raise ValueError("None cannot be written to a config: leave the key out")
        elif isinstance(each, date | time):
            raise ValueError(f"a date or time has to be a text, in quotes (given: {each})")


M = TypeVar("M", bound=BaseModel)


def check_table_type(kind: Any, owner: str) -> None:
    """Raises TypeError where the type of the options that `owner` declares is no subclass of `Strict`."""
    if not (isinstance(kind, type) and issubclass(kind, Strict)):
        raise TypeError(f"options of {owner} must be a subclass of settings.strict.Strict: {kind!r}")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file and returns its tables as nested dictionaries.

    Raises:
        ConfigError: The file is missing or is not TOML; the text says where.
    """
    try:
        # Editors of Windows may begin a file with a byte order mark.
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not TOML: {error}") from None


def read_tables(path: Path, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the tables of a TOML file with overrides as of `override`. Raises ConfigError where the file or an
    override cannot be read."""
    return override(read_toml(path), settings)


def override(tables: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """Sets values in `tables`, in place, and returns them.

    Args:
        tables: Parsed TOML.
        settings: Overrides "key.path=value". A value that is not valid TOML is taken as text. The key of an element of
            a list is its number, from 0, as in "data.sources.0.path=rows.jsonl".

    Raises:
        ConfigError: A setting has no "=", or an empty key, a key before the last one is not a table or a list, or a
            list has no element of a number.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"setting {setting!r}: expected key.path=value")
        *parents, leaf = key.strip().split(".")
        table: Any = tables
        for parent in parents:
            place = _place(table, parent, setting)
            table = table.setdefault(place, {}) if isinstance(table, dict) else table[place]
            if not isinstance(table, dict | list):
                raise ConfigError(f"setting {setting!r}: {parent!r} is a value, not a table")
        place = _place(table, leaf, setting)
        try:
            table[place] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[place] = text
    return tables


def _place(table: dict[str, Any] | list[Any], key: str, setting: str) -> Any:
    """Returns a key of a table, or the index of a list that is written as its key. Raises ConfigError where the list
    has no such element."""
    if isinstance(table, dict):
        return key
    if not (key.isascii() and key.isdecimal() and int(key) < len(table)):
        there = f"the numbers 0 to {len(table) - 1}" if table else "none, since it is empty"
        raise ConfigError(f"setting {setting!r}: {key!r} is no element of a list; there are: {there}")
    return int(key)


def validate(kind: type[M], tables: dict[str, Any], source: str) -> M:
    """Validates parsed TOML and returns an instance of `kind`.

    Args:
        kind: Type of the tables, a pydantic model.
        tables: Parsed TOML.
        source: The file or place that the tables are from, for messages.

    Raises:
        ConfigError: The tables are invalid; the text is one line with file, key, what is wrong and what is allowed.
    """
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(f"config {source}: {explain(error, tables, kind)}") from None
