"""Algorithms: one file each, found by name or as `module:function`."""

from __future__ import annotations

import importlib
import pkgutil

from controller.training.algorithm import Algorithm
from rlhf.errors import ConfigError


def names() -> list[str]:
    """Names of the algorithms that come with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_algorithm(name: str) -> Algorithm:
    """An algorithm.

    Args:
        name: One of `names()`, or "module:function" of a user's own: an `Algorithm`, or a plain function of a run.

    Raises:
        ConfigError: There is no such algorithm; the text lists those that come with the package, or has the
            import's error.
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
