"""Converts the state of algorithms to JSON values and back.

Restoring sets the fields of a dataclass that the algorithm has constructed, so a checkpoint contains no type names and
no code.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Mapping
from copy import copy
from enum import Enum
from typing import Any

import numpy as np

from rlhf.errors import ConfigError


class KeptState:
    """The dataclasses that an algorithm has registered with `Run.keep`, by name.

    Attributes:
        states: The dataclasses.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self._stored: dict[str, Any] | None = None

    def add(self, name: str, state: Any) -> None:
        """Registers a dataclass; gives its fields the values that `restore` was given for this name, in place.

        Raises:
            ConfigError: `restore` was called with no state of this name, or with other fields.
        """
        self.states[name] = state
        if self._stored is not None:
            if name not in self._stored:
                raise ConfigError(f"the checkpoint has no state {name!r}, which the algorithm keeps")
            set_fields(state, self._stored[name], name)

    def state(self) -> dict[str, Any]:
        """Returns the fields of all dataclasses as JSON values, by name. Raises ConfigError where a field has a type
        that a checkpoint cannot hold."""
        return {name: fields_of(state, name) for name, state in self.states.items()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Stores the fields that `state` returned; `add` restores them."""
        self._stored = dict(stored)

    def check_complete(self) -> None:
        """Raises ConfigError if the algorithm has not added a state that was passed to `restore`."""
        if missing := sorted((self._stored or {}).keys() - self.states.keys()):
            raise ConfigError(
                f"the checkpoint has a state {missing[0]!r}, which this algorithm does not keep; it was written by "
                "another algorithm"
            )


def fields_of(state: Any, where: str) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON values, by name.

    Args:
        state: The dataclass.
        where: Name of the state, for messages.

    Raises:
        ConfigError: `state` is no dataclass, or a field has a type that a checkpoint cannot hold.
    """
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ConfigError(f"run.keep({where!r}): {type(state).__name__} is no dataclass")
    return {
        each.name: _to_json(getattr(state, each.name), f"{where}.{each.name}")
        for each in dataclasses.fields(state)
    }


def set_fields(state: Any, stored: Mapping[str, Any], where: str) -> None:
    """Sets the fields of a dataclass, in place, to values that `fields_of` returned, converted to the types of their
    present values.

    Raises:
        ConfigError: The names of the fields differ, or a value does not fit the present one.
    """
    names = {each.name for each in dataclasses.fields(state)}
    if names != stored.keys():
        raise ConfigError(
            f"the checkpoint's state {where!r} has fields {sorted(stored)}, the algorithm's {sorted(names)}"
        )
    for name, value in stored.items():
        object.__setattr__(state, name, _like(getattr(state, name), value, f"{where}.{name}"))


def _to_json(value: Any, where: str, *, is_field: bool = True) -> Any:
    """Returns a value as JSON: a float that is not finite as {"/float": text}, a numpy array as {"/array": [dtype,
    shape, values]}, a number of numpy likewise without a shape, a tuple as {"/tuple": values}, a deque as {"/deque":
    [maxlen, values]}, an instance of a subclass of dict as {"/dict": [name of its type, items]}. Dataclasses, deques
    and subclasses of dict may be fields of dataclasses (`is_field`), not elements of collections."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    match value:
        case np.generic() if _is_exact(value.dtype):
            return {"/array": [value.dtype.str, None, [_to_json(value.item(), where)]]}
        case float():
            return value if math.isfinite(value) else {"/float": str(value)}
        case tuple() if type(value) is tuple:
            return {"/tuple": [_to_json(each, where, is_field=False) for each in value]}
        case deque() if is_field:
            return {"/deque": [value.maxlen, [_to_json(each, where, is_field=False) for each in value]]}
        case list() if type(value) is list:
            return [_to_json(each, where, is_field=False) for each in value]
        case dict() if (is_field or type(value) is dict) and all(map(_is_key, value)):
            items = {key: _to_json(each, f"{where}.{key}", is_field=False) for key, each in value.items()}
            return items if type(value) is dict else {"/dict": [type(value).__name__, items]}
        case np.ndarray() if _is_exact(value.dtype):
            return {"/array": [value.dtype.str, list(value.shape), _to_json(value.ravel().tolist(), where)]}
    if is_field and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_of(value, where)
    raise ConfigError(
        f"run.keep: {where} has a {type(value).__name__}, which a checkpoint cannot hold; it can hold numbers, texts, "
        "numpy arrays, lists, tuples and dictionaries of them, and dataclasses of all these; and deques, Counters and "
        "other dictionaries as fields of dataclasses"
    )


def _is_key(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("/")


def _is_exact(dtype: np.dtype[Any]) -> bool:
    """Whether JSON holds all bits of numbers of this type: of integers, and of floats of at most 64 bits."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _like(present: Any, stored: Any, where: str) -> Any:
    """Decodes a value of `_to_json`. Dataclasses, and subclasses of dict other than Counter, need a present value of
    their type, which they are restored into or made of. Raises ConfigError where there is none."""
    match stored:
        case {"/float": text}:
            return float(text)
        case {"/tuple": values}:
            return tuple(_like(None, each, where) for each in values)
        case {"/deque": [longest, values]}:
            return deque((_like(None, each, where) for each in values), longest)
        case {"/dict": ["Counter", items]}:
            return Counter(_like({}, items, where))
        case {"/dict": [name, items]}:
            if type(present).__name__ != name:
                raise ConfigError(
                    f"run.keep: {where} is a {name} in the checkpoint and a {type(present).__name__} before steps "
                    f"begin; construct it as a {name}"
                )
            return _like(present, items, where)
        case {"/array": [dtype, shape, values]}:
            made = np.array([_like(None, each, where) for each in values], dtype)
            return made[0] if shape is None else made.reshape(shape)
        case dict() if dataclasses.is_dataclass(present) and not isinstance(present, type):
            set_fields(present, stored, where)
            return present
        case dict():
            # A copy of the present dictionary is of its type, such as Counter, and has its default factory.
            values = copy(present) if isinstance(present, dict) else {}
            values.clear()
            values.update({key: _like(None, value, f"{where}.{key}") for key, value in stored.items()})
            return values
        case list():
            values = [_like(None, each, where) for each in stored]
            if isinstance(present, deque):
                return deque(values, present.maxlen)
            return tuple(values) if isinstance(present, tuple) else values
    return stored
