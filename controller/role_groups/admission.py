"""Admission of a run to running services: started with its config, in no other session, and their initial weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from client.rank import RankClient
from client.session import Session
from controller.config.config import Config
from controller.role_groups.group import RoleGroup
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, Refused
from rlhf.v1 import worker_pb2
from settings.service import ServiceTable

GONE_WITHIN_S = 15.0
"""How long to wait for a service whose controller seems to be gone: longer than its ranks keep that session."""
POLL_S = 0.2
WHERE_IT_RUNS = frozenset(
    {"address", "bind_host", "advertise_host", "external", "pool", "startup_timeout_s", "ranks"}
)
"""Keys of a service's table on where and how it is started and found, which do not change its results. The number of
ranks is compared with the running ranks instead."""

Describe = Callable[[RankClient], Awaitable[worker_pb2.DescribeResponse]]
"""Asks a rank for its description."""


def check_tables(groups: Mapping[str, RoleGroup], tables: Mapping[str, ServiceTable]) -> None:
    """Compares the config with the tables that the services were started with.

    Raises:
        ConfigError: A table differs; the text has the keys and both values.
    """
    for name, group in groups.items():
        differences = differing_keys(tables[name], group.description)
        if differences:
            raise ConfigError(
                f"services.{name}: the service at {tables[name].address} was started with another config: "
                f"{'; '.join(differences)}. Start it again with this config, or leave the settings as they are there"
            )


def with_measured(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> Config:
    """A config with the matmul libraries that the services measured at their start, in place of "auto"."""
    tables = {
        name: table.model_copy(update={"matmul": services[name].matmul or table.matmul})
        for name, table in config.services.items()
    }
    return config.model_copy(update={"services": tables})


def differing_keys(table: ServiceTable, description: worker_pb2.DescribeResponse) -> list[str]:
    """The keys in which a table differs from that of a running service, with both values. A service that does not
    report its table differs in none. Relative paths begin at the working directory of either process; on another host
    equal texts count as equal.
    """
    if not description.table:
        return []
    theirs, ours = json.loads(description.table), json.loads(table.model_dump_json())
    if ours.get("matmul") == description.matmul:
        theirs["matmul"] = description.matmul  # the service's choice for "auto"
    is_on_this_host = any(rank.endpoint.host_id == host_id() for rank in description.ranks)
    for key in [name for name, value in table if _holds_paths(value)]:
        there, here = _located(theirs.get(key), description.working_directory), _located(ours.get(key), "")
        if there == here:
            theirs[key] = ours[key]
        elif is_on_this_host and theirs.get(key) == ours.get(key):
            theirs[key], ours[key] = there, here
    return [
        f"{key} is {_shown(there)} there and {_shown(here)} here"
        for key, there, here in _differences(theirs, ours)
        if key not in WHERE_IT_RUNS
    ]


def _differences(theirs: Any, ours: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(key, theirs, ours) of each difference; keys of nested tables with dots."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return [] if theirs == ours else [(prefix, theirs, ours)]
    found = []
    for key in sorted(theirs.keys() | ours.keys()):
        found += _differences(theirs.get(key), ours.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def _holds_paths(value: Any) -> bool:
    """Whether a value of a table is a path or a tuple of paths."""
    return isinstance(value, Path) or (isinstance(value, tuple) and any(map(_holds_paths, value)))


def _located(value: Any, directory: str) -> Any:
    """A path, or each of a list, as an absolute one; relative paths begin at `directory`."""
    if isinstance(value, list):
        return [_located(each, directory) for each in value]
    return str((Path(directory) / value).resolve()) if value else value


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


async def wait_until_free(groups: Mapping[str, RoleGroup], session: Session, describe: Describe) -> None:
    """Waits until no rank of the services is in another session, and claims a start after the youngest that any rank
    knows: a session may have reached some of the ranks only. A session without a connected controller ends soon.

    Args:
        groups: Groups by service.
        session: Session of the run.
        describe: Asks a rank for its description.

    Raises:
        Refused: Another session has a rank, and this one does not take over.
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    clients = [client for group in groups.values() for client in group.clients]
    for client, first in zip(clients, await asyncio.gather(*map(describe, clients)), strict=True):
        answer = first
        while answer.session and not session.take_over:
            if answer.session_is_connected or time.monotonic() > deadline:
                raise Refused(
                    f"services.{client.service} ({client.address}) is in use by run {answer.session}; wait for its "
                    "end, or end it: --take-over"
                )
            await asyncio.sleep(POLL_S)
            answer = await describe(client)
        session.claim_after([answer.session_started_unix_ns])


def origin(response: worker_pb2.BeginSessionResponse, *, keeps_weights: bool) -> str:
    """The origin of a service's weights, in words."""
    if keeps_weights:
        return f"{response.model}, continued from policy version {response.outcome.policy_version}"
    return f"{response.model}, fresh"
