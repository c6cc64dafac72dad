"""Plug-ins by name: those of this project, those of installed packages, and objects named as `module:object`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_tb
from typing import TypeVar

from rlhf.errors import ConfigError

T = TypeVar("T")


class PluginError(ConfigError, ValueError):
    """A plug-in does not exist, cannot be imported, or is of a wrong type. Also a ValueError, so that a validator of a
    table of the configuration may raise it."""


def plugin_names(group: str, built_in: Iterable[str] = ()) -> list[str]:
    """Returns the names of the plug-ins that are known, sorted.

    Args:
        group: Entry-point group in which installed packages declare plug-ins.
        built_in: Names of this project's own plug-ins.
    """
    return sorted({*built_in, *entry_points(group=group).names})


def find_plugin(group: str, name: str, kind: type[T], built_in: Mapping[str, T]) -> T:
    """Returns a plug-in by name.

    Args:
        group: Entry-point group in which installed packages declare plug-ins, as NAME = "module:object".
        name: Name of a plug-in of this project or of an entry point, or "module:object".
        kind: Type of which the plug-in must be an instance.
        built_in: Plug-ins of this project, by name. An entry point of the same name is ignored.

    Raises:
        PluginError: There is no such plug-in (the message lists the known names), it cannot be imported, or it is no
            instance of `kind`.
    """
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return load_object(name, kind)
    found = tuple(entry_points(group=group, name=name))
    if not found:
        known = plugin_names(group, built_in)
        raise PluginError(
            f"{name!r} is unknown{nearest(name, known)}; known: {', '.join(known)}, or module:object"
        )
    return load_object(found[0].value, kind)


def load_object(reference: str, kind: type[T]) -> T:
    """Imports and returns the object that `reference`, "module:object", names.

    Raises:
        PluginError: It is not of this form, cannot be imported, or is no instance of `kind`.
    """
    if EntryPoint.pattern.match(reference) is None:
        raise PluginError(f"{reference!r} is not of the form module:object")
    try:
        found = EntryPoint(reference, reference, "").load()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{_place(error, reference)}"
        raise PluginError(f"{reference!r} cannot be imported: {cause}") from error
    if not isinstance(found, kind):
        if isinstance(found, type) and issubclass(found, kind):
            raise PluginError(f"{reference!r} is a class, not an instance of {kind.__name__}")
        wanted = "a class" if kind is type else kind.__name__
        raise PluginError(f"{reference!r} is of type {type(found).__name__}, not {wanted}")
    return found


def _place(error: Exception, reference: str) -> str:
    """Returns file and line of the innermost frame of an error's traceback that is in the package of `reference`, as
    " (losses.py:14)"; empty where there is none."""
    package = re.split(r"[.:]", reference)[0]
    places = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
    ]
    return places[-1] if places else ""


def load_class(reference: str, base: type[T]) -> type[T]:
    """Imports and returns the class that `reference`, "module:object", names.

    Raises:
        PluginError: It cannot be imported, or `as_subclass` refuses it.
    """
    return as_subclass(reference, load_object(reference, type), base)


def as_subclass(reference: str, found: type, base: type[T]) -> type[T]:
    """Returns the class `found`.

    Args:
        reference: Its name, for the error.
        found: The class.
        base: Class that it must be a subclass of.

    Raises:
        PluginError: It is no subclass of `base`, or lacks abstract methods of it.
    """
    if not issubclass(found, base):
        raise PluginError(f"{reference!r} is no subclass of {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise PluginError(f"{reference!r} does not implement {', '.join(missing)}")
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'WORD'?` with the most similar known word, or an empty string where none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
