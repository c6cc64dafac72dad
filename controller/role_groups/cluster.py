"""Connects to the running services of a config, checks them, and puts them into the session of the run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from client.fanout import FanOut
from client.rank import WORKER, RankClient
from client.session import Session, StepContext
from controller.config.config import Config
from controller.role_groups.admission import (
    GONE_WITHIN_S,
    check_tables,
    origin,
    sharing_lines,
    wait_until_free,
)
from controller.role_groups.device_check import check_devices
from controller.role_groups.device_meter import DeviceMeter, DeviceUse
from controller.role_groups.discovery import Discovery, check_vocabularies, reads_tokens
from controller.role_groups.futures import results
from controller.role_groups.group import INTRODUCE_S, RoleGroup
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Placement
from controller.role_groups.rejoining import clients_of, find_again, introduce, replacement_of
from controller.role_groups.replacement import Launcher, Replaced, is_loss
from controller.role_groups.residency import residency_of
from controller.role_groups.roles import group_type
from controller.role_groups.watch import StatusWatch
from controller.role_groups.weights import sync_weights
from rlhf.contract import role_methods
from rlhf.errors import ConfigError, InvalidRequest, RlhfError
from rlhf.v1 import worker_pb2

CLOSE_S = 5.0
NO_OUTPUTS: Mapping[str, Sequence[Path]] = MappingProxyType({})
GARBAGE_THRESHOLD = 50_000
"""Threshold of Python's garbage collector: number of allocated objects not yet freed before it runs. A call to 1,024
ranks allocates some 15,000, which reference counting frees at its end."""


@dataclass(frozen=True)
class SavedState:
    """State of a service in a checkpoint.

    Attributes:
        directory: Directory of the sharded checkpoint.
        state_id: Id that the state had when it was saved; empty: it gets a new one where it is loaded.
    """

    directory: Path
    state_id: str = ""


@dataclass(frozen=True)
class Restoration:
    """The states that services go on from.

    Attributes:
        names: Services that begin the session with the state that they hold, not with their model directories.
        choose: Function that is called when the session has begun, so that no earlier session changes a service any
            more, with the id of the state that each of these services holds, by name; without those that report none.
            Returns what services then load, by name: a saved state, or None for the model directory. The others go on
            with what they hold. May raise to refuse the services.
    """

    names: Collection[str]
    choose: Callable[[Mapping[str, str]], Mapping[str, SavedState | None]]


KEEP_NONE = Restoration((), lambda held: {})


class Cluster:
    """The running services of a config, as role groups.

    Args:
        config: Configuration of the run.
        session: Session of the run.
        loop: Event loop that the clients run on. Default: a new one.
        launcher: Launcher of the services. Default: they were started before the run.

    Attributes:
        groups: Role group of each service of the config, by name; empty before `connect`.
        origins: Origin of the weights of each service that has weights, as text, by name.
        session: Session of the run.
        on_replaced: Function that is called, on the thread of the event loop, with each service that was lost and
            replaced. Default: does nothing.
    """

    def __init__(
        self, config: Config, session: Session, loop: Loop | None = None, launcher: Launcher | None = None
    ) -> None:
        self.config, self.session = config, session
        self.groups: dict[str, RoleGroup] = {}
        self.origins: dict[str, str] = {}
        self.on_replaced: Callable[[Replaced], None] = lambda replaced: None
        self._also_served: dict[str, RoleGroup] = {}
        self._launcher = launcher
        self._loop = loop or Loop()
        self._meter = DeviceMeter(session.now)
        self._placement = Placement(residency_of(config), self._meter)
        self._watch = StatusWatch()

    def connect(
        self,
        say: Callable[[str], None] = lambda line: None,
        *,
        keep_weights: bool = False,
        outputs: Mapping[str, Sequence[Path]] = NO_OUTPUTS,
        admit: Callable[[Mapping[str, worker_pb2.DescribeResponse]], None] = lambda services: None,
        restoration: Restoration = KEEP_NONE,
        is_patient: bool = False,
        rejected: Path | None = None,
    ) -> None:
        """Finds every rank of every service, checks that the services fit the config, begins the session on them, and
        sends every rank the endpoints of all others (Introduce).

        Args:
            say: Called with a line of text that names services, or a run, that are waited for, and with one for each
                service that other runs use too. Default: does nothing.
            keep_weights: Whether to continue from the weights, optimizers and policy versions that the services have.
                False: services load their model directories.
            outputs: Directories that a service is going to write to, by name; the service checks that it can.
            admit: Called with the descriptions of the services by name, before anything changes in them; may raise to
                refuse them. Default: does nothing.
            restoration: States that services go on from. Default: they begin with their model directories.
            is_patient: As in `wait_until_free`.
            rejected: Directory in which services keep the rows that they refuse to train on. Default: they keep none.

        A reward that is lost meanwhile is replaced as in a step, if it may be.

        Raises:
            ServiceLost: Services do not respond within `run.connect_timeout_s`, and the text names all; or one is lost.
            ConfigError: A service is not the one that the config describes.
            Refused: Another run holds a service.
            InvalidRequest: A service cannot write to its directory in `outputs`.
        """
        self._loop.run(self._connect(say), self.config.run.connect_timeout_s + CLOSE_S)
        ours = self._ours
        check_tables({name: group.description for name, group in ours.items()}, self.config.services)
        admit(self.descriptions)
        for line in sharing_lines(ours):
            say(line)
        parts = ours, self.session, partial(_describe, self.groups), say
        free = wait_until_free(*parts, is_patient=is_patient, alone=self._placement.moving)
        self._loop.run(free, GONE_WITHIN_S + 2 * CLOSE_S)
        # What is replaced by a checkpoint need not be loaded from the model directory before.
        kept = {name: keep_weights or name in restoration.names for name in ours}
        begun = {
            name: group.begin_session(kept[name], [*map(str, outputs.get(name, ()))], str(rejected or ""))
            for name, group in ours.items()
        }
        results([call for batch in begun.values() for call in batch.calls])
        for name, batch in begun.items():
            (record,) = batch.records()
            if record.responses[0].model:
                self.origins[name] = origin(record.responses[0], keeps_weights=kept[name])
        held = {name: id for name, id in self.state_ids().items() if name in restoration.names}
        self._load(restoration.choose(held))
        self._loop.run(introduce(list(ours.values())), INTRODUCE_S + CLOSE_S)

    def reconnect(self, name: str) -> None:
        """Connects to service `name`, which was restarted and has no state of the run, begins the session on it, and
        introduces it to the ranks of all others; its role group calls the new ranks from now on. Raises as `connect`,
        and InvalidRequest if the restart has lost state of the run."""
        if self.config.services[self.group(name).name].keeps_state:
            raise InvalidRequest(
                f"services.{name}: its state is lost with its processes; resume the run instead"
            )
        connect_s = self.config.run.connect_timeout_s
        found = find_again(self.config, self.groups, name, self._watch, time.monotonic() + connect_s)
        self._loop.run(found, connect_s + 2 * CLOSE_S)
        results(self.groups[name].begin_session(keep_weights=False).calls)
        self._loop.run(introduce(list(self._ours.values())), INTRODUCE_S + CLOSE_S)

    def fill_receivers(self) -> None:
        """Moves the weights of what learns to the services that compute with them (`Config.receivers`), as far as these
        lack them, and waits for it. Raises RlhfError where a rank of either side fails."""
        for source, receiver in self.config.receivers.items():
            results(sync_weights(self.group(source), [self.group(receiver)]).calls)
            self.origins[receiver] = f"weights of services.{source}"

    def state_ids(self) -> dict[str, str]:
        """Returns the id of the state that each service has had after its last call, by name, without those that report
        none; see `FanOut`."""
        return {name: group.ranks.state_id for name, group in self._ours.items() if group.ranks.state_id}

    def close(self) -> None:
        """Ends the session on services that still respond, and disconnects. Takes at most about 20 s
        and raises no error, so that it does not hide the error that ended the run."""
        # A loop that is stuck is left behind: services notice by themselves that the controller is gone.
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._close(), CLOSE_S * 2)
        self._loop.close()

    def group(self, name: str) -> RoleGroup:
        """Returns the role group of a service, or of a role that the ranks of another service serve too. Raises
        ConfigError where the config has no such service; the text lists those that it has."""
        groups = self.groups | self._also_served
        if name not in groups:
            raise ConfigError(f"the algorithm needs a service {name!r}; the config has {sorted(groups)}")
        return groups[name]

    @property
    def descriptions(self) -> dict[str, worker_pb2.DescribeResponse]:
        """Response of every service to Describe, by name."""
        return {name: group.description for name, group in self.groups.items()}

    def token_services(self) -> dict[str, worker_pb2.DescribeResponse]:
        """Returns the descriptions of the services that read token ids, by name; see `reads_tokens`."""
        return {name: each for name, each in self.descriptions.items() if reads_tokens(each)}

    def release(self, step: StepContext) -> None:
        """Blocks until no call of a step is under way, and then frees the rows that its calls made, on every rank.
        Raises DeadlineExceeded where a call does not end in time, and RlhfError where a rank cannot free its rows."""
        step.wait(self._placement.longest_wait_s() + CLOSE_S)
        if step.has_ended:
            step.raise_unread()
        results([group.release(step) for group in self._ours.values()])

    def end_step(self, step: StepContext) -> None:
        """Marks a step as ended, so that later calls on its rows belong to the newest step, and frees its rows as
        `release` does, after `StepContext.raise_unread`."""
        step.has_ended = True
        self.release(step)

    def verify_weights(self) -> None:
        """Compares checksums of the tensors in the memory of every service, and waits for it.

        Raises:
            CorruptWeights: Tensors of a service differ.
        """
        calls = [group.verify_weights() for group in self._ours.values()]
        results([call for batch in calls for call in batch.calls])

    def memory(self) -> dict[str, int]:
        """Returns resident plus device memory of each service, in bytes by name, summed over the ranks that respond."""
        return self._watch.memory()

    def gauges(self) -> dict[str, float]:
        """Returns the newest gauges of each service by "service/name", summed over the ranks that respond."""
        return self._watch.gauges()

    def responding(self) -> dict[str, int]:
        """Returns the number of ranks of each service whose status messages arrive, by name."""
        return self._watch.responding()

    def device_use(self) -> DeviceUse:
        """Returns how long the devices of the services were in use since this was last called; see `DeviceMeter`."""
        return self._meter.take()

    def running(self) -> dict[str, str]:
        """Returns the progress of the running calls by "service.method"; see `StatusWatch.running`."""
        return self._watch.running(self.groups | self._also_served)

    def _load(self, states: Mapping[str, SavedState | None]) -> None:
        """Makes services load saved states, or their model directories where that is None, and waits for it."""
        ours, calls = self._ours, []
        for name, state in states.items():
            if state is None:
                calls += ours[name].begin_session(keep_weights=False).calls
                self.origins[name] = f"{self.config.services[name].model_directory}, fresh"
            else:
                calls += ours[name].load_checkpoint(str(state.directory), state.state_id).calls
                self.origins[name] = f"checkpoint {state.directory}"
        results(calls)

    @property
    def _ours(self) -> dict[str, RoleGroup]:
        """Groups whose servers are part of this package, and so have sessions and keep rows."""
        return {name: group for name, group in self.groups.items() if group.description.epoch}

    async def _connect(self, say: Callable[[str], None]) -> None:
        for name, description in (await Discovery(self.config, say).find_all()).items():
            self.groups[name] = self._group(name, description)
        check_vocabularies(self.descriptions)
        check_devices(self.config, self.descriptions)
        for name, host in self.config.also_served.items():
            self._also_served[name] = self._second_role(name, host)
        for group in self._ours.values():
            self._watch.begin(group.clients)
        for name in self.groups.keys() - self._placement.moving:
            parts = self.config, self.groups, name, self._watch, say
            self.groups[name].replacement = replacement_of(
                *parts, report=lambda replaced: self.on_replaced(replaced), launcher=self._launcher
            )

    def _group(self, name: str, description: worker_pb2.DescribeResponse) -> RoleGroup:
        of_what_learns = self.config.services[name].keeps_state or name in self.config.valuers.values()
        self._meter.add(devices := self.config.devices_of(name))
        parts = self._fan_out(name, description), description, devices
        return group_type(description.role)(
            *parts, self.session, self._placement, self._loop, learns=of_what_learns
        )

    def _fan_out(self, name: str, description: worker_pb2.DescribeResponse) -> FanOut:
        return FanOut(clients_of(name, description, self.session.name), description.epoch)

    def _second_role(self, role: str, host: str) -> RoleGroup:
        """Makes the group of a second role that the ranks of service `host` serve in addition to their own.

        Raises:
            ConfigError: The ranks do not serve the methods of this role.
        """
        group = self.groups[host]
        served = {method.name for method in group.description.methods}
        if not served.issuperset(method.path[1:] for method in role_methods(role).values()):
            raise ConfigError(
                f"services.{host}: the config has no other service of role {role}, and the service at "
                f"{group.clients[0].address} does not serve that role because it was started without lora"
            )
        return group.in_role(group_type(role), role)

    async def _close(self) -> None:
        self._watch.end()
        groups = (*self.groups.values(), *self._also_served.values())
        await asyncio.gather(*(group.cancel_all() for group in groups))
        request = worker_pb2.EndSessionRequest(session=self.session.name)
        clients = [client for group in self.groups.values() for client in group.clients]
        ends = (client.call(WORKER["EndSession"], request, CLOSE_S) for client in clients)
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))


async def _describe(groups: Mapping[str, RoleGroup], client: RankClient) -> worker_pb2.DescribeResponse:
    """Returns the response of a rank to Describe; an empty one of a rank that is lost, if its next call has it
    replaced. `groups`: role groups of all services, by name."""
    try:
        return await client.reach(WORKER["Describe"], worker_pb2.DescribeRequest(brief=True), CLOSE_S)
    except RlhfError as error:
        if not (groups[client.service].replacement and is_loss(error)):
            raise
        return worker_pb2.DescribeResponse()


def spare_garbage_collector() -> None:
    """Excludes all existing objects from garbage collection (`gc.freeze`) and raises its threshold to
    `GARBAGE_THRESHOLD`. Changes the whole process, which must be a connected controller and nothing else; saves a
    fifth of the CPU time of a call to 1,024 ranks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
