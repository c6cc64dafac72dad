"""The running services of a config: connected, checked, and in a session of the run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from client.fanout import FanOut
from client.rank import WORKER, RankClient
from client.session import Session, StepContext
from controller.config.config import Config
from controller.role_groups.admission import GONE_WITHIN_S, check_tables, origin, wait_until_free
from controller.role_groups.discovery import Discovery, check_vocabularies, reads_tokens
from controller.role_groups.futures import results
from controller.role_groups.group import RoleGroup
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Placement
from controller.role_groups.roles import GROUPS
from controller.role_groups.watch import StatusWatch
from rlhf.contract import SERVICES
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

CLOSE_S = 5.0
NO_OUTPUTS: Mapping[str, Path] = MappingProxyType({})
GARBAGE_THRESHOLD = 50_000
"""Objects allocated and not yet freed before Python's garbage collector runs. A call to 1,024 ranks allocates some
15,000, which reference counting frees at its end."""


class Cluster:
    """Role groups by name of their service.

    Attributes:
        groups: One per service of the config.
        origins: By service with weights, a description of where they came from.
        session: Session of the run.
    """

    def __init__(self, config: Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.groups: dict[str, RoleGroup] = {}
        self.origins: dict[str, str] = {}
        self._also_served: dict[str, RoleGroup] = {}
        self._loop = Loop()
        self._placement = Placement()
        self._watch = StatusWatch()

    def connect(
        self,
        say: Callable[[str], None] = lambda line: None,
        *,
        keep_weights: bool = False,
        outputs: Mapping[str, Path] = NO_OUTPUTS,
    ) -> None:
        """Finds and checks every rank of every service, watches them, begins the session, and introduces the ranks to
        each other.

        Args:
            say: Called with a line that names the services that are waited for.
            keep_weights: Continue from the weights, optimizers and policy versions that the services have. False: from
                their model directories.
            outputs: By service, the directory that it is going to export to.

        Raises:
            ServiceLost: Services do not answer within `run.connect_timeout_s`; the text names all of them.
            ConfigError: A service is not the one that the config describes.
            Refused: Another run has a service.
            InvalidRequest: A service could not write its output.
        """
        self._loop.run(self._connect(say), self.config.run.connect_timeout_s + CLOSE_S)
        ours = self._ours
        check_tables(ours, self.config.services)
        free = wait_until_free(
            ours,
            self.session,
            lambda client: client.reach(WORKER["Describe"], worker_pb2.DescribeRequest(brief=True), CLOSE_S),
        )
        self._loop.run(free, GONE_WITHIN_S + 2 * CLOSE_S)
        begun = {
            name: group.begin_session(keep_weights, [str(outputs[name])] if name in outputs else [])
            for name, group in ours.items()
        }
        results([call for batch in begun.values() for call in batch.calls])
        self._introduce(list(ours.values()))
        for name, batch in begun.items():
            (record,) = batch.records()
            if record.responses[0].model:
                self.origins[name] = origin(record.responses[0], keeps_weights=keep_weights)

    def close(self) -> None:
        """Ends the session on services that still answer, and disconnects. Takes a bounded time and raises nothing, so
        that the error that ended the run is the one that is raised."""
        # A loop that is stuck is left behind: services notice by themselves that the controller is gone.
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._close(), CLOSE_S * 2)
        self._loop.close()

    def group(self, name: str) -> RoleGroup:
        """The group of a service, or of a role that the ranks of another service serve too.

        Raises:
            ConfigError: The config has no such service; the text lists those it has.
        """
        groups = self.groups | self._also_served
        if name not in groups:
            raise ConfigError(f"the algorithm needs a service {name!r}; the config has {sorted(groups)}")
        return groups[name]

    @property
    def descriptions(self) -> dict[str, worker_pb2.DescribeResponse]:
        """Description of every service, by name."""
        return {name: group.description for name, group in self.groups.items()}

    def token_services(self) -> dict[str, worker_pb2.DescribeResponse]:
        """Descriptions of the services that read token ids, by name."""
        return {name: each for name, each in self.descriptions.items() if reads_tokens(each)}

    def release(self, step: StepContext) -> None:
        """Frees the rows that a step's calls have made, on every rank, once none of the calls is under way."""
        step.wait(self._placement.longest_wait_s() + CLOSE_S)
        results([group.release(step) for group in self._ours.values()])

    def end_step(self, step: StepContext) -> None:
        """Releases a step that makes no more calls."""
        step.has_ended = True
        self.release(step)

    def memory(self) -> dict[str, int]:
        """Resident and device memory by service, in bytes, summed over ranks."""
        return self._watch.memory()

    def running(self) -> dict[str, str]:
        """Running calls, "service.Method", with their progress, such as "12/64"; empty where unknown."""
        return self._watch.running(self.groups | self._also_served)

    @property
    def _ours(self) -> dict[str, RoleGroup]:
        """Groups whose servers are of this package, and so keep sessions and rows."""
        return {name: group for name, group in self.groups.items() if group.description.epoch}

    def _introduce(self, groups: Sequence[RoleGroup]) -> None:
        """Introduces all ranks to each other; ranks connect only to ranks that they were introduced to."""
        endpoints = [rank.endpoint for group in groups for rank in group.description.ranks]
        request = worker_pb2.IntroduceRequest(session=self.session.name, endpoints=endpoints)
        serialized = request.SerializeToString()
        results([group.introduce(serialized) for group in groups])

    async def _connect(self, say: Callable[[str], None]) -> None:
        for name, description in (await Discovery(self.config, say).find_all()).items():
            self.groups[name] = self._group(name, description)
        check_vocabularies(self.descriptions)
        for name, host in self.config.also_served.items():
            self._also_served[name] = self._second_role(name, host)
        for group in self._ours.values():
            self._watch.begin(group.clients)

    def _group(self, name: str, description: worker_pb2.DescribeResponse) -> RoleGroup:
        clients = [
            RankClient(
                name,
                rank,
                info.endpoint.address,
                is_ours=bool(description.epoch),
                session=self.session.name if description.dispatches else "",
            )
            for rank, info in enumerate(description.ranks)
        ]
        kind, devices = GROUPS[description.role], self.config.devices(name)
        return kind(
            FanOut(clients, description.epoch),
            description,
            devices,
            self.session,
            self._placement,
            self._loop,
        )

    def _second_role(self, role: str, host: str) -> RoleGroup:
        """The group of a role that the ranks of a service serve beside their own."""
        group = self.groups[host]
        served = {method.name for method in group.description.methods}
        if not served.issuperset(method.path[1:] for method in SERVICES[role].values()):
            raise ConfigError(
                f"services.{host}: nothing else is the {role}, and what runs at {group.clients[0].address} does not "
                "serve it: it was started without lora"
            )
        return group.in_role(GROUPS[role], role)

    async def _close(self) -> None:
        self._watch.end()
        groups = (*self.groups.values(), *self._also_served.values())
        await asyncio.gather(*(group.cancel_all() for group in groups))
        request = worker_pb2.EndSessionRequest(session=self.session.name)
        clients = [client for group in self.groups.values() for client in group.clients]
        ends = (client.call(WORKER["EndSession"], request, CLOSE_S) for client in clients)
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))


def spare_garbage_collector() -> None:
    """Freezes all objects that exist, which live as long as the run, and makes garbage collection rare. For a process
    that is a connected controller and nothing else; saves a fifth of the CPU of a call to 1,024 ranks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
