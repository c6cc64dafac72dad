"""Algorithms of the package, one module each, and functions that find one: by name, by entry point of an installed
package, as `module:function`, or given as a function."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from controller.training.algorithm import Algorithm
from controller.training.run import Run
from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, find_plugin, load_object, plugin_names

GROUP = "rlhf_cluster.algorithms"
"""Entry-point group in which installed packages declare algorithms."""

AnyAlgorithm = str | Algorithm | Callable[[Run], Any]
"""An algorithm as a user gives it: its name, an `Algorithm`, or a plain function."""


def names() -> list[str]:
    """Returns the names of the algorithms in this package, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def known_names() -> list[str]:
    """Returns the names of the algorithms in this package and in installed packages, sorted."""
    return plugin_names(GROUP, names())


def find_algorithm(name: str) -> Algorithm:
    """Finds an algorithm by name. A plain function is wrapped in an `Algorithm` without declarations.

    Args:
        name: One of `known_names()`, or "module:function" for an algorithm of the user: an `Algorithm`, or a function
            that takes a `Run`.

    Raises:
        ConfigError: There is no such algorithm, or its module cannot be imported; the text lists the known names, or
            has the error of the import.
    """
    built_in = {each: _reference(each) for each in names()}
    try:
        if name in built_in:
            return as_algorithm(load_object(built_in[name], Algorithm))
        found = find_plugin(GROUP, name, object, built_in)
    except PluginError as error:
        raise ConfigError(f"algorithm {error}") from error
    if not callable(found):
        raise ConfigError(f"algorithm {name!r} is not a function")
    return as_algorithm(found)


def as_algorithm(given: AnyAlgorithm) -> Algorithm:
    """Returns an algorithm that is given by name, as an `Algorithm`, or as a function, which then has no
    declarations: it has all services of the configuration. Raises ConfigError where no algorithm has the name, or
    its module cannot be imported."""
    if isinstance(given, str):
        return find_algorithm(given)
    return given if isinstance(given, Algorithm) else Algorithm(given)


def reference_of(algorithm: Algorithm) -> str:
    """Returns the name under which a run records its algorithm, and by which `--algo` finds it again: NAME for one of
    this package, "module:function" for others. A function of a script or a notebook is "__main__:function", which
    nothing but that script or notebook finds."""
    function = algorithm.function
    named = function if hasattr(function, "__qualname__") else type(function)
    reference = f"{named.__module__}:{named.__qualname__}"
    return algorithm.name if reference == _reference(algorithm.name) else reference


def _reference(name: str) -> str:
    return f"{__name__}.{name}:{name}"
