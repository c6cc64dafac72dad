"""Admission of a run to running services: checks that they were started with its config and are in no other session,
and describes where their weights come from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from client.rank import RankClient
from client.session import Session
from controller.config.config import Config
from controller.role_groups.group import RoleGroup
from controller.role_groups.platform import platform_of
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, Refused
from rlhf.v1 import worker_pb2
from settings.service import ServiceTable

GONE_WITHIN_S = 15.0
"""Longest time, in seconds, to wait for a service whose session has no connected controller: longer than its ranks
keep such a session."""
POLL_S = 0.2
WHERE_IT_RUNS = frozenset(
    {
        *("role", "address", "bind_host", "advertise_host", "external", "pool"),
        *("startup_timeout_s", "ranks", "restarts"),
    }
)
"""Keys of a service's table that say where and how it is started and found, and do not change its results; they may
differ. The role, which may be named in two ways, and the number of ranks are compared with those of the running ranks
instead."""
CHOSEN = ("kernels", "matmul")
"""Keys of a service's table for which the service chooses at start where they are "auto", and reports its choice."""

Describe = Callable[[RankClient], Awaitable[worker_pb2.DescribeResponse]]
"""Function that calls Describe on a rank and returns the response."""


def check_tables(
    services: Mapping[str, worker_pb2.DescribeResponse], tables: Mapping[str, ServiceTable]
) -> None:
    """Checks that the services were started with the tables of the config, except for keys in `WHERE_IT_RUNS`. A
    service that does not report its table passes.

    Args:
        services: Responses of the services to Describe, by name.
        tables: Tables of the config, by name.

    Raises:
        ConfigError: A table differs; the text has the keys and both values.
    """
    for name, description in services.items():
        differences = differing_keys(tables[name], description)
        if differences:
            raise ConfigError(
                f"services.{name}: the service at {tables[name].address} was started with another config: "
                f"{'; '.join(differences)}. Start it again with this config, or leave the settings as they are there"
            )


def check_same(
    name: str,
    table: ServiceTable,
    before: worker_pb2.DescribeResponse,
    now: worker_pb2.DescribeResponse,
) -> None:
    """Checks that a service that was started again gives the same results, bit for bit, as before.

    Args:
        name, table: Its name and its table.
        before, now: Its responses to Describe.

    Raises:
        ConfigError: It takes rows of another form, or, where it computes with torch, runs on another platform (see
            `platform_of`); the text has both values.
    """
    there, here = (
        {"input_form": said.input_form, "scores_groups": said.scores_groups} for said in (before, now)
    )
    if table.needs_torch:
        there, here = there | platform_of({name: before})[name], here | platform_of({name: now})[name]
    if found := differences(there, here):
        changed = "; ".join(f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in found)
        raise ConfigError(
            f"services.{name}: the service that was started again at {table.address} is not the one before: {changed}. "
            "Results would not be bitwise equal"
        )


def with_chosen(config: Config, services: Mapping[str, worker_pb2.DescribeResponse]) -> Config:
    """Returns the config with the keys of CHOSEN of each service set to what it uses, in place of "auto"."""
    tables = {
        name: table.model_copy(
            update={key: getattr(services[name], key) or getattr(table, key) for key in CHOSEN}
        )
        for name, table in config.services.items()
    }
    return config.model_copy(update={"services": tables})


def differing_keys(table: ServiceTable, description: worker_pb2.DescribeResponse) -> list[str]:
    """Compares a table of the config with the one that a running service was started with.

    Relative paths are resolved in the working directory of the process that read them; for a service on another host,
    equal texts count as equal too.

    Returns:
        One text "KEY is VALUE there and VALUE here" per difference; none for a service that does not report its
        table.

    Raises:
        ConfigError: What the service reports is no table.
    """
    if not description.table:
        return []
    try:
        theirs = json.loads(description.table)
    except (ValueError, RecursionError):
        theirs = None
    if not isinstance(theirs, dict):
        raise ConfigError(
            f"the service at {table.address} reports a table in Describe that is no JSON object"
        )
    ours = json.loads(table.model_dump_json())
    for key in CHOSEN:
        if ours.get(key) == getattr(description, key):
            theirs[key] = ours[key]  # the service's choice for "auto"
    is_on_this_host = any(rank.endpoint.host_id == host_id() for rank in description.ranks)
    for key in [name for name, value in table if _holds_paths(value)]:
        there, here = _located(theirs.get(key), description.working_directory), _located(ours.get(key), "")
        if there == here:
            theirs[key] = ours[key]
        elif is_on_this_host and theirs.get(key) == ours.get(key):
            theirs[key], ours[key] = there, here
    return [
        f"{key} is {shown(there)} there and {shown(here)} here"
        for key, there, here in differences(theirs, ours)
        if key not in WHERE_IT_RUNS
    ]


def differences(theirs: Any, ours: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Returns (key, their value, our value) for each difference of two values, which may be nested tables; `prefix`
    and the keys of nested tables are joined by dots."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return [] if theirs == ours else [(prefix, theirs, ours)]
    found = []
    for key in sorted(theirs.keys() | ours.keys()):
        found += differences(theirs.get(key), ours.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def _holds_paths(value: Any) -> bool:
    """Whether a value of a table is a path or a tuple of paths."""
    return isinstance(value, Path) or (isinstance(value, tuple) and any(map(_holds_paths, value)))


def _located(value: Any, directory: str) -> Any:
    """Returns a path, or each path of a list, as an absolute path; relative ones are resolved in `directory`. Empty
    texts, and what is no text, are returned as they are."""
    if isinstance(value, list):
        return [_located(each, directory) for each in value]
    return str((Path(directory) / value).resolve()) if value and isinstance(value, str) else value


def shown(value: Any) -> str:
    """Returns a setting as JSON for a message; `not set` for None."""
    return "not set" if value is None else json.dumps(value)


async def wait_until_free(
    groups: Mapping[str, RoleGroup],
    session: Session,
    describe: Describe,
    say: Callable[[str], None] = lambda line: None,
    *,
    is_patient: bool = False,
    alone: Collection[str] = (),
) -> None:
    """Waits until no rank of the services is in another session that excludes this one, for at most `GONE_WITHIN_S`:
    ranks end a session whose controller has disconnected. Services that several sessions may share are waited for only
    if they are in `alone`; other services only if `session.take_over` is not set. Then claims a start time later
    than that of every session that a rank knows (`Session.claim_after`), since a session may have reached only some
    ranks.

    Args:
        groups: Groups of the services, by name.
        session: Session of the run.
        describe: Function that calls Describe on a rank.
        say: Called with a line of text for each run that is waited for. Default: does nothing.
        is_patient: Whether to wait also for a session with a connected controller, which may have died just now.
        alone: Names of services that no other session may use, even if sessions may share them.

    Raises:
        Refused: A rank is in another session with a connected controller, or does not leave another session in time.
            Or another session still uses a service of `alone` at the deadline.
    """
    deadline, told = time.monotonic() + GONE_WITHIN_S, set[str]()
    clients = [client for group in groups.values() for client in group.clients]
    for client, first in zip(clients, await asyncio.gather(*map(describe, clients)), strict=True):
        answer = await describe(client) if told else first  # which is old where another rank was waited for
        while answer.session and not session.take_over:
            is_refused = answer.session_is_connected and not is_patient
            if is_refused or time.monotonic() > deadline:
                raise Refused(
                    f"services.{client.service} ({client.address}) is in use by run {answer.session}; wait until it "
                    "ends, or end it with --take-over"
                )
            if answer.session not in told:
                told.add(answer.session)
                say(
                    f"waiting up to {GONE_WITHIN_S:g} s for run {answer.session} to leave services.{client.service}; "
                    "--take-over does not wait"
                )
            await asyncio.sleep(POLL_S)
            answer = await describe(client)
        if client.service in alone:
            await _wait_until_alone(client, answer, describe, deadline)
        session.claim_after([answer.session_started_unix_ns])


async def _wait_until_alone(
    client: RankClient, answer: worker_pb2.DescribeResponse, describe: Describe, deadline: float
) -> None:
    """Waits until no other session uses a rank that sessions may share. Raises Refused at the deadline."""
    while answer.is_shared and answer.sessions:
        if time.monotonic() > deadline:
            raise Refused(
                f"services.{client.service} ({client.address}) is used by {answer.sessions} other run(s), so it cannot "
                "be offloaded, as device_memory_gb needs; wait for their end, or give it devices of its own"
            )
        await asyncio.sleep(POLL_S)
        answer = await describe(client)


def sharing_lines(groups: Mapping[str, RoleGroup]) -> list[str]:
    """Returns a line for the terminal for each service that other sessions use too, from its response to Describe."""
    return [
        f"services.{name} ({group.clients[0].address}) is shared with {count} other session{'s' * (count > 1)}"
        for name, group in groups.items()
        if group.description.is_shared and (count := group.description.sessions)
    ]


def origin(response: worker_pb2.BeginSessionResponse, *, keeps_weights: bool) -> str:
    """Returns the origin of a service's weights as text: its model directory, and whether they are fresh or
    continued.

    Args:
        response: The service's response to BeginSession.
        keeps_weights: Whether the run continues from the weights that the service had.
    """
    if keeps_weights:
        return f"{response.model}, continued from policy version {response.outcome.policy_version}"
    return f"{response.model}, fresh"
