"""What is checked before anything is started, so that a mistake is told at once and by its key."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from pathlib import Path

from controller.config import Config
from rlhf.config import ActorTable, ModelTable, Service
from rlhf.errors import ConfigError


def check(config: Config, names: list[str]) -> None:
    """Checks that the services `names` can be started on this host.

    Raises:
        ConfigError: torch or another package that they need is not installed, a model directory does not exist, or an
            address cannot be served.
    """
    check_torch()
    for name in names:
        check_engines(name, config.services[name])
    for name in names:
        check_model(name, config.services[name])
    for name in names:
        check_address(name, config.services[name].bind_address)


def check_torch() -> None:
    """Raises ConfigError where torch, which every service runs on, is not installed."""
    if not _is_installed("torch"):
        raise ConfigError(
            "torch is not installed and services need it; install an extra, for example "
            "pip install 'rlhf-cluster[cpu]' (or cu12, cu13)"
        )


def check_engines(name: str, table: Service) -> None:
    """Raises ConfigError where an engine of the service, for training or generation, is not installed."""
    if isinstance(table, ModelTable) and table.engine == "zero" and not _is_installed("deepspeed"):
        raise ConfigError(
            f"services.{name}.engine: zero needs DeepSpeed; install it: pip install 'rlhf-cluster[deepspeed]'"
        )
    if isinstance(table, ActorTable) and table.rollout_engine == "vllm" and not _is_installed("vllm"):
        raise ConfigError(
            f"services.{name}.rollout_engine: vllm is not installed; docs/rollout.md says how to install it"
        )


def check_model(name: str, table: Service) -> None:
    """Raises ConfigError where the service's model directory does not exist, or is none of a model."""
    model = table.model if isinstance(table, ModelTable) or table.kind == "model" else None
    if model is None or (model / "config.json").is_file():
        return
    relative = "" if model.is_absolute() else f" (relative to the working directory {Path.cwd()})"
    problem = f"directory {model} has no config.json" if model.is_dir() else f"there is no directory {model}"
    raise ConfigError(f"services.{name}.model: {problem}{relative}")


def check_address(name: str, address: str) -> None:
    """Raises ConfigError where the address is in use or is not this host's."""
    host, _, port = address.rpartition(":")
    try:
        candidates = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"services.{name}.address: {address}: {error.strerror}") from None
    for family, kind, protocol, _, target in candidates:
        with socket.socket(family, kind, protocol) as probe:
            # As the server does it: a port whose last connections are still dying is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(target)
            except OSError as error:
                raise ConfigError(f"services.{name}.address: {address} {_why(error)}") from None


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "is in use"
    if error.errno == errno.EADDRNOTAVAIL:
        return "is not an address of this host; start the services of this host with --only"
    return f"cannot be served: {os.strerror(error.errno or 0)}"
