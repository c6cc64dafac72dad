"""Takes a service that was lost and serves again into the session of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from client.rank import WORKER, RankClient
from controller.config.config import Config
from controller.role_groups.admission import check_same, check_tables, with_chosen
from controller.role_groups.device_check import check_devices
from controller.role_groups.discovery import Discovery, check_vocabularies
from controller.role_groups.group import RoleGroup
from controller.role_groups.replacement import Launcher, Replaced, Replacement, is_loss
from controller.role_groups.watch import StatusWatch
from rlhf.access import Access
from rlhf.errors import DeadlineExceeded, Refused, RlhfError, ServiceLost
from rlhf.v1 import worker_pb2

END_S = 5.0
"""Longest time, in seconds, that a rank may take to end a session, which it does at once."""


def clients_of(name: str, description: worker_pb2.DescribeResponse, session: str) -> list[RankClient]:
    """Returns a client of each rank of a service, in rank order."""
    is_ours = bool(description.epoch)
    return [
        RankClient(
            name,
            rank,
            info.endpoint.address,
            is_ours=is_ours,
            access=Access.ADMINISTER if is_ours else Access.CALL,
            session=session if description.dispatches else "",
        )
        for rank, info in enumerate(description.ranks)
    ]


def replacement_of(
    config: Config,
    groups: Mapping[str, RoleGroup],
    name: str,
    watch: StatusWatch,
    say: Callable[[str], None],
    report: Callable[[Replaced], None],
    launcher: Launcher | None,
) -> Replacement | None:
    """Returns the replacement of a service, as its table allows; None where a lost one ends the run. A service that
    takes turns in the memory of a device is none to replace, since a new process loads its model at once.

    Args:
        config, groups, name, watch: As of `find_again`.
        say, report: As of `Replacement`.
        launcher: Launcher of those services that are not external; None where the run has started none.
    """
    table, wait_s = config.services[name], config.run.connect_timeout_s
    if not table.allowed_restarts:
        return None
    if table.external:
        launcher = None
    if launcher:
        wait_s += table.startup_timeout_s

    async def rejoin(deadline: float, may_be_same: bool) -> bool:
        group, epoch = groups[name], groups[name].description.epoch
        await find_again(config, groups, name, watch, deadline, ended=0 if may_be_same else epoch)
        if epoch:
            await group.call_within("begin_session", group.session.newest)
            await introduce([each for each in groups.values() if each.description.epoch], again=name)
        return not epoch or group.description.epoch != epoch

    return Replacement(name, table.allowed_restarts, wait_s, rejoin, say, report, launcher)


async def find_again(
    config: Config,
    groups: Mapping[str, RoleGroup],
    name: str,
    watch: StatusWatch,
    deadline: float,
    ended: int = 0,
) -> None:
    """Waits until a lost service serves again, by new processes, or by those of before, on which it then ends the
    session. Its role group calls these ranks from then on; the session has to begin on them, and they have to be
    introduced.

    Args:
        config: Config of the run.
        groups: Role groups of all services, by name.
        name: Name of the service.
        watch: Monitors the ranks.
        deadline: Latest time at which the service serves again, in seconds of `time.monotonic`.
        ended: Epoch that has ended. Default: the service may serve in any.

    Raises:
        ServiceLost: The service does not serve until then, or not all of its ranks answer.
        ConfigError: It is not the service of the config, or its results would not be those of the service before.
    """
    group = groups[name]
    description = await Discovery(config, lambda line: None).find(name, deadline, ended)
    before = {other: each.description for other, each in groups.items()}
    services = before | {name: description}
    # It may have been started with what the service before has chosen for "auto".
    check_tables({name: description}, with_chosen(config, before).services)
    check_vocabularies(services)
    check_devices(config, services)
    check_same(name, config.services[name], before[name], description)
    if not description.epoch:
        return  # a server without sessions, to which its channel connects again by itself
    if description.epoch == group.description.epoch:
        await _end_session(group)
    old, clients = list(group.clients), clients_of(name, description, group.session.name)
    watch.end([name])
    watch.begin(clients)
    group.renew(clients, description)
    await asyncio.gather(*(client.close() for client in old))


async def _end_session(group: RoleGroup) -> None:
    """Ends the session on all ranks of a service, whose calls of before then neither run nor count. Raises ServiceLost
    where a rank does not answer."""
    request = worker_pb2.EndSessionRequest(session=group.session.name)
    try:
        await group.ranks.reach_all(WORKER["EndSession"], request, END_S)
    except DeadlineExceeded as error:
        raise ServiceLost(str(error)) from error


async def introduce(groups: Sequence[RoleGroup], again: str = "") -> None:
    """Sends every rank the endpoints of all ranks (Introduce); ranks connect only to endpoints that they were sent.
    Services that are lost, or were started again, are left to their next calls, which have them replaced.

    Args:
        groups: Role groups of the services.
        again: Name of one that was started again. Others are then left to their next calls also where these end the
            run. Default: none was.

    Raises:
        RlhfError: A rank does not respond.
    """
    endpoints = [rank.endpoint for group in groups for rank in group.description.ranks]

    async def send(group: RoleGroup) -> None:
        try:
            await group.introduce(endpoints)
        except RlhfError as error:
            # Refused by a process in which the session has not begun.
            is_left = group.name != again and bool(again or group.replacement)
            if not (is_left and (is_loss(error) or isinstance(error, Refused))):
                raise

    await asyncio.gather(*map(send, groups))
