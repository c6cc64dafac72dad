"""Checks before any service is started, so that a mistake in the config is reported early and by its key."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping

from controller.config.config import Config
from deploy.ending import never, probe_when_free
from rlhf import addresses
from rlhf.errors import ConfigError
from settings.engines import TRAINING_ENGINES
from settings.fit import check_model_fits
from settings.function_check import run_to_end
from settings.hub import DESCRIPTION, directory_problem, fetch, hub_model
from settings.memory.vllm_cache import check_vllm_cache
from settings.model import LoadedModelTable, ModelTable
from settings.model_files import model_problem
from settings.reward import RewardTable
from settings.services import Service
from settings.transports import check_transport
from settings.values import ValuesTable

LACKS_FOR_SANDBOX = """
import sys
from services.reward.sandbox.bwrap_command import missing
sys.exit("; ".join(missing()) or 0)
"""
"""Program that prints what this host lacks for sandboxes, and ends with status 1 if it lacks anything."""


def check(
    config: Config,
    names: list[str],
    elsewhere: Collection[str] = (),
    should_stop: Callable[[], bool] = never,
) -> None:
    """Checks that the services `names` can be started on this host.

    Args:
        config: Configuration of the run.
        names: Names of the services.
        elsewhere: Names of those whose rank 0, which listens on the service's address, is on another host.
        should_stop: As for `probe_when_free`.

    Raises:
        ConfigError: torch or another package that they need is not installed, the environment lacks a header of a
            reward's endpoint, a model directory does not exist or lacks files, a model does not divide over its mesh or
            has no room for a prompt beside a response, or vLLM's KV cache none for a row, a transport is unknown, an
            address cannot be served, is that of another service or is open to other hosts in plaintext, or a file of
            `[security]` cannot be read.
    """
    tables = {name: config.services[name] for name in names}
    # One check after another, each of all services, so that the first error is that of the most basic one.
    for check_one in (check_torch, check_engines, check_endpoint, check_model):
        for name, table in tables.items():
            check_one(name, table)
    for name, table in tables.items():
        check_model_fits(name, table, config.rollout.max_response_tokens)
        check_vllm_cache(name, table, config.row_tokens)
    for check_one in (check_model_files, check_transports):
        for name, table in tables.items():
            check_one(name, table)
    first_here = {name: table for name, table in tables.items() if name not in elsewhere}
    for name, table in first_here.items():
        check_address(name, table, should_stop)
    check_ports(first_here)
    security = config.security.load()
    for name, table in tables.items():
        security.check_listening(
            addresses.address_host(table.bind_address), f"services.{name}.{table.bind_key}"
        )


def check_torch(name: str, table: Service) -> None:
    """Raises ConfigError where torch is not installed and the service needs it: all do but a reward of one rank that
    has no model."""
    if table.needs_torch and not _is_installed("torch"):
        raise ConfigError(
            f"torch is not installed and services.{name} needs it; install an extra, for example "
            "pip install 'rlhf-cluster[cpu]' (or cu12, cu13)"
        )


def check_engines(name: str, table: Service) -> None:
    """Raises ConfigError where an engine of the service, for training or generation, needs a package that is not
    installed."""
    for key, spec in table.engine_specs.items():
        if spec.package and not _is_installed(spec.package):
            raise ConfigError(
                f"services.{name}.{key}: {getattr(table, key)} needs {spec.package}, which is not installed; "
                f"{spec.install}"
            )


def check_endpoint(name: str, table: Service) -> None:
    """Raises ConfigError where a reward asks an HTTP endpoint and httpx is not installed, or the environment, which the
    service inherits, lacks a value of a header."""
    if not isinstance(table, RewardTable) or table.kind not in ("judge", "http"):
        return
    if not _is_installed("httpx"):
        raise ConfigError(
            f"services.{name}.kind: {table.kind} needs httpx, which is not installed; pip install 'rlhf-cluster[http]'"
        )
    variables = {f"http.header_variables.{key}": value for key, value in table.http.header_variables.items()}
    if table.kind == "judge":
        key = table.judge.api_key_variable
        variables = {"judge.api_key_variable": key} if key else {}
    for key, variable in variables.items():
        if not os.environ.get(variable, "").strip():
            raise ConfigError(f"services.{name}.{key}: the environment has no {variable}")


def check_model(name: str, table: Service) -> None:
    """Downloads the config and the tokenizer of a model on the hub. Raises ConfigError where that fails, and where the
    service's model directory does not exist, or has no config.json."""
    if table.model_directory is None:
        return
    model = fetch(table.model_directory, f"services.{name}.model", table.startup_timeout_s, DESCRIPTION)
    if problem := directory_problem(model):
        raise ConfigError(f"services.{name}.model: {problem}")


def check_model_files(name: str, table: Service) -> None:
    """Raises ConfigError where the model directory of a service lacks files that it loads; see `model_problem`. The
    weights of a model on the hub, which the service downloads, are not looked for."""
    if table.model_directory is None or not isinstance(table, LoadedModelTable | RewardTable):
        return
    if problem := model_problem(table.model_directory, has_weights=_reads_weights(table)):
        raise ConfigError(f"services.{name}.model: {problem}")


def _reads_weights(table: Service) -> bool:
    """Whether a service of this package loads weights from a model directory that is not on the hub. Engines of other
    packages may read other formats."""
    if isinstance(table, RewardTable):
        return table.model is not None and hub_model(table.model) is None
    return (
        isinstance(table, ModelTable)
        and not isinstance(table, ValuesTable)
        and table.engine in TRAINING_ENGINES
        and hub_model(table.model) is None
    )


def check_sandbox(name: str, table: Service) -> None:
    """Raises ConfigError where this host lacks a program or a library that the code grader needs. That sandboxes hold,
    the service itself tries when it starts."""
    if not isinstance(table, RewardTable) or table.kind != "sandbox" or table.sandbox.allow_unsandboxed:
        return
    code, said = run_to_end([sys.executable, "-c", LACKS_FOR_SANDBOX], table.startup_timeout_s)
    if code != 0:
        ended = "its check " + ("does not end" if code is None else f"ended with status {code}")
        raise ConfigError(f"services.{name}.kind: sandbox: {said[-1] if code == 1 and said else ended}")


def check_transports(name: str, table: Service) -> None:
    """Raises ConfigError where the service names a transport that is not known on this host."""
    for transport in table.transports:
        try:
            check_transport(transport)
        except ValueError as error:
            raise ConfigError(f"services.{name}.transports: {error}") from None


def check_ports(services: Mapping[str, Service]) -> None:
    """Raises ConfigError where two services of this host would listen on the same address, under whatever names.

    Args:
        services: Tables of the services by name, whose addresses are those of this host (`check_address`).
    """
    seen: list[tuple[str, Service, frozenset[tuple[str, int]]]] = []
    for name, table in services.items():
        here = addresses.listening(table.bind_address)
        for other, its, there in seen:
            if any(addresses.overlap(one, two) for one in here for two in there):
                raise ConfigError(
                    f"services.{name}.{table.bind_key}: {table.bind_address} is taken by services.{other}, which "
                    f"listens on {its.bind_address}"
                )
        seen.append((name, table, here))


def check_address(name: str, table: Service, should_stop: Callable[[], bool] = never) -> None:
    """Checks that rank 0 of the service can listen on its address; waits as `probe_when_free`.

    Raises:
        ConfigError: The address is in use, or not this host's.
    """
    try:
        probe_when_free(table.bind_address, table.address, should_stop)
    except OSError as error:
        raise ConfigError(f"services.{name}.{table.bind_key}: {table.bind_address} {_why(error)}") from None


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            "is in use; where services of the config run already, start rlhf-controller without --launch, or set "
            "external = true for those that do"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return "is not an address of this host; start the services of this host with --host or --only"
    return f"cannot be served: {error.strerror}"
