"""Algorithms of the package, one module each, and the function that finds one by name or as `module:function`."""

from __future__ import annotations

import importlib
import pkgutil

from controller.training.algorithm import Algorithm
from rlhf.errors import ConfigError


def names() -> list[str]:
    """Returns the names of the algorithms in this package, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_algorithm(name: str) -> Algorithm:
    """Finds an algorithm by name. A plain function is wrapped in an `Algorithm` without declarations.

    Args:
        name: One of `names()`, or "module:function" for an algorithm of the user: an `Algorithm`, or a function that
            takes a `Run`.

    Raises:
        ConfigError: There is no such algorithm, or its module cannot be imported; the text lists the known names, or
            has the error of the import.
    """
    module, colon, attribute = name.partition(":")
    if not colon and name not in names():
        raise ConfigError(f"unknown algorithm {name!r}; known: {', '.join(names())}, or module:function")
    path, attribute = (module, attribute) if colon else (f"{__name__}.{name}", name)
    try:
        found = getattr(importlib.import_module(path), attribute)
    except Exception as error:
        raise ConfigError(
            f"algorithm {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, Algorithm):
        return found
    if not callable(found):
        raise ConfigError(f"algorithm {name!r} is not a function")
    return Algorithm(found)
