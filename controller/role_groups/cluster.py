"""The running services as the controller sees them: connected, checked against the config, watched."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import grpc
import grpc.aio

from client.rank import WORKER, RankClient
from client.session import Session, StepContext
from client.stream import REOPEN_S
from controller.config.config import Config
from controller.role_groups.admission import GONE_WITHIN_S, check_tables, origin, wait_until_free
from controller.role_groups.dataflow import Loop, Placement, results
from controller.role_groups.group import GROUPS, ActorGroup, RewardGroup, RoleGroup
from rlhf.contract import SERVICES
from rlhf.errors import ConfigError, DeadlineExceeded, RlhfError, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2

RETRY_S = 0.2
CLOSE_S = 5.0
NO_OUTPUTS: Mapping[str, Path] = MappingProxyType({})
SILENCE_S = 2.0
"""Longest that a run waits for services without a word."""
GARBAGE_THRESHOLD = 50_000
"""Objects that may be made and not yet be freed before Python looks for cycles among them. A call to 1,024 ranks makes
some 15,000, which are freed without that when it ends."""


class Cluster:
    """Role groups by name of their service.

    Attributes:
        groups: One per service of the config.
        origins: What the weights of each service that has some began from, in words.
        statuses: Newest status of each rank, by service.
        session: What all calls share.
    """

    def __init__(self, config: Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.groups: dict[str, RoleGroup] = {}
        self.origins: dict[str, str] = {}
        self._also_served: dict[str, RoleGroup] = {}
        self.statuses: dict[str, dict[int, worker_pb2.WatchResponse]] = {}
        self._loop = Loop()
        self._placement = Placement()
        self._watches: list[asyncio.Task[None]] = []

    def connect(
        self,
        say: Callable[[str], None] = lambda line: None,
        *,
        keep_weights: bool = False,
        outputs: Mapping[str, Path] = NO_OUTPUTS,
    ) -> None:
        """Finds every rank of every service, checks them, starts to watch them, begins the session on them, and tells
        them of each other.

        Args:
            say: Called with a line that names the services that are waited for, when that takes a while.
            keep_weights: Go on from the weights, optimizers and policy versions that the services have. False: from
                their model directories.
            outputs: Directories that services are going to write what they trained to, by service.

        Raises:
            ServiceLost: Services do not answer within `run.connect_timeout_s`; the text names all of them.
            ConfigError: What answers is not what the config says.
            Refused: Another run has a service.
            InvalidRequest: A service could not write its output.
        """
        self._loop.run(self._connect(say), self.config.run.connect_timeout_s + CLOSE_S)
        ours = {name: group for name, group in self.groups.items() if group.description.epoch}
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

    def _introduce(self, groups: Sequence[RoleGroup]) -> None:
        """Tells all ranks of each other: they connect to no others."""
        endpoints = [rank.endpoint for group in groups for rank in group.description.ranks]
        request = worker_pb2.IntroduceRequest(session=self.session.name, endpoints=endpoints)
        serialized = request.SerializeToString()
        results([group.introduce(serialized) for group in groups])

    def close(self) -> None:
        """Ends the session on the services, as far as they still answer, and disconnects. It takes a bounded time and
        raises nothing: what ended the run is what is to be told."""
        # Where the loop is at something else, services notice by themselves that the run is gone.
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._close(), CLOSE_S * 2)
        self._loop.close()

    def group(self, name: str) -> RoleGroup:
        """The group of a service, or of what the ranks of another service serve too.

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
        return {
            name: group.description
            for name, group in self.groups.items()
            if not (isinstance(group, RewardGroup) and group.wants_text)
        }

    def release(self, step: StepContext) -> None:
        """Frees the rows that a step's calls have made, on every rank, once none of them is under way."""
        step.wait(self._placement.longest_wait_s() + CLOSE_S)
        ours = [group for group in self.groups.values() if group.description.epoch]
        results([group.release(step) for group in ours])

    def end_step(self, step: StepContext) -> None:
        """Releases a step that makes no more calls."""
        step.has_ended = True
        self.release(step)

    def memory(self) -> dict[str, int]:
        """Resident and device memory by service, in bytes, added over ranks."""
        return {
            name: sum(status.memory_bytes + status.device_memory_bytes for status in list(ranks.values()))
            for name, ranks in list(self.statuses.items())
        }

    def running(self) -> dict[str, str]:
        """Running calls, "service.Method", and how far they are, such as "12/64"; empty where not known."""
        shown = {}
        for name, group in list((self.groups | self._also_served).items()):
            status = self.statuses.get(group.clients[0].service, {}).get(0)
            for method in list(group.running.values()):
                is_known = status is not None and status.done_of and status.method == method
                shown[f"{name}.{method}"] = f"{status.done}/{status.done_of}" if status and is_known else ""
        return shown

    async def _connect(self, say: Callable[[str], None]) -> None:
        for name, description in (await self._find_all(say)).items():
            self.groups[name] = await self._group(name, description)
        self._check_vocabularies()
        for name, host in self.config.also_served.items():
            self._also_served[name] = self._second_role(name, host)
        for group in self.groups.values():
            if group.description.epoch:
                self._watches.extend(asyncio.ensure_future(self._watch(client)) for client in group.clients)

    async def _find_all(self, say: Callable[[str], None]) -> dict[str, worker_pb2.DescribeResponse]:
        """Every service's description. A wrong one is an error at once; missing ones are told together at the end."""
        timeout_s = self.config.run.connect_timeout_s
        deadline = time.monotonic() + timeout_s
        finds = {name: asyncio.create_task(self._find(name, deadline)) for name in self.config.services}
        missing, told = set(finds), set[str]()
        try:
            while missing:
                waits = [finds[name] for name in missing]
                await asyncio.wait(waits, timeout=SILENCE_S, return_when=asyncio.FIRST_EXCEPTION)
                missing = {name for name in missing if not finds[name].done()}
                for find in finds.values():
                    if find.done() and not isinstance(find.exception(), ServiceLost | None):
                        find.result()
                if missing and missing != told and time.monotonic() < deadline:
                    told = missing
                    say(f"waiting for {', '.join(self._named(name) for name in finds if name in missing)}")
        finally:
            for find in finds.values():
                find.cancel()
        lost = [str(find.exception()) for find in finds.values() if find.exception()]
        if lost:
            raise ServiceLost(
                f"no service answers within {timeout_s:g} s at {'; at '.join(lost)}. Start services with "
                "rlhf-deploy up CONFIG, or have the run start them: --launch"
            )
        return {name: find.result() for name, find in finds.items()}

    def _named(self, name: str) -> str:
        return f"services.{name} ({self.config.services[name].address})"

    async def _find(self, name: str, deadline: float) -> worker_pb2.DescribeResponse:
        """Describes a service and checks the answer against the config."""
        table = self.config.services[name]
        description = await self._describe(name, deadline)
        if description.role != table.role:
            raise ConfigError(
                f"services.{name}.address: {table.address} is the {description.role} service "
                f"{description.service!r}, but role is {table.role}"
            )
        if len(description.ranks) != table.ranks:
            raise ConfigError(
                f"services.{name}.ranks is {table.ranks}, but the service has {len(description.ranks)}"
            )
        longest = self.config.rollout.max_response_tokens
        if description.max_tokens and description.max_tokens <= longest:
            raise ConfigError(
                f"rollout.max_response_tokens: {longest} leave no room for a prompt in services.{name}, which takes "
                f"{description.max_tokens} tokens in all (its model's positions, or micro_batch_tokens)"
            )
        return description

    async def _describe(self, name: str, deadline: float) -> worker_pb2.DescribeResponse:
        """Describe of rank 0 of a service, retried until it answers."""
        table = self.config.services[name]
        client = RankClient(name, 0, table.address)
        try:
            while True:
                remaining_s = max(deadline - time.monotonic(), RETRY_S)
                try:
                    return await client.call(WORKER["Describe"], worker_pb2.DescribeRequest(), remaining_s)
                except (ServiceLost, DeadlineExceeded) as error:
                    if time.monotonic() + RETRY_S > deadline:
                        raise ServiceLost(f"{self._named(name)}{_connection_failure(error)}") from error
                except RlhfError as error:
                    if _is_unimplemented(error) and table.role == "reward":
                        return _foreign_reward(name, table.address)
                    raise ConfigError(
                        f"services.{name}.address: {table.address} is no service of this cluster: {error}"
                    ) from error
                await asyncio.sleep(RETRY_S)
        finally:
            await client.close()

    async def _group(self, name: str, description: worker_pb2.DescribeResponse) -> RoleGroup:
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
        kind = GROUPS[description.role]
        devices = self.config.devices(name)
        return kind(clients, description, devices, self.session, self._placement, self._loop)

    def _second_role(self, role: str, host: str) -> RoleGroup:
        """The group of a role that the ranks of a service serve beside their own."""
        group = self.groups[host]
        served = {method.name for method in group.description.methods}
        if not served.issuperset(method.path[1:] for method in SERVICES[role].values()):
            raise ConfigError(
                f"services.{host}: nothing else is the {role}, and what runs at {group.clients[0].address} does not "
                "serve it: it was started without lora"
            )
        return group.second_role(role)

    def _check_vocabularies(self) -> None:
        """Roles that read the actor's token ids must mean the same by them."""
        actors = [group for group in self.groups.values() if isinstance(group, ActorGroup)]
        for actor in actors:
            expected = actor.description.vocabulary_hash
            for name, group in self.groups.items():
                reads_text = isinstance(group, RewardGroup) and group.wants_text
                if not reads_text and group.description.vocabulary_hash != expected:
                    raise ConfigError(
                        f"services.{name}.model: its tokenizer is not that of services.{actor.name}: vocabulary hash "
                        f"{group.description.vocabulary_hash[:12] or 'none'} against {expected[:12]}"
                    )

    async def _watch(self, client: RankClient) -> None:
        """Keeps the newest status of a rank, for as long as it answers, and begins anew where the stream breaks. A call
        tells of a lost rank itself."""
        while True:
            try:
                async for status in client.stream(WORKER["Watch"], worker_pb2.WatchRequest(interval_s=0.5)):
                    self.statuses.setdefault(client.service, {})[client.rank] = status
            except RlhfError:
                self.statuses.get(client.service, {}).pop(client.rank, None)
            await asyncio.sleep(REOPEN_S)

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        groups = (*self.groups.values(), *self._also_served.values())
        await asyncio.gather(*(group.cancel_all() for group in groups))
        request = worker_pb2.EndSessionRequest(session=self.session.name)
        clients = [client for group in self.groups.values() for client in group.clients]
        ends = (client.call(WORKER["EndSession"], request, CLOSE_S) for client in clients)
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))


def spare_garbage_collector() -> None:
    """For a process that is a controller and nothing else, once it is connected: what exists by now lives as long as
    the run, so Python need not look for garbage in it. Saves a fifth of the CPU of a call to 1,024 ranks."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


def _connection_failure(error: RlhfError) -> str:
    """`: REASON`, as gRPC has it without the addresses it tried; nothing where nobody said anything."""
    cause = error.__cause__
    if isinstance(error, DeadlineExceeded) or not isinstance(cause, grpc.aio.AioRpcError):
        return ""
    reason = re.sub(r".*ipv[46]:\S+: ", "", cause.details() or "")
    return ": " + reason.removeprefix("Failed to connect to remote host: ")


def _is_unimplemented(error: RlhfError) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED


def _foreign_reward(name: str, address: str) -> worker_pb2.DescribeResponse:
    """A reward that serves RewardService only: one rank, text rows, no epoch."""
    endpoint = common_pb2.Endpoint(address=address, service=name)
    return worker_pb2.DescribeResponse(
        role="reward",
        service=name,
        ranks=[worker_pb2.RankInfo(endpoint=endpoint)],
        mesh=worker_pb2.MeshShape(pipeline=1, tensor=1, data=1),
        input_form=worker_pb2.INPUT_FORM_TEXT,
    )
