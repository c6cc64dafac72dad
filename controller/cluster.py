"""The running services as the controller sees them: connected, checked against the config, watched."""

from __future__ import annotations

import asyncio
import re
import time

import grpc
import grpc.aio

from controller.client import WORKER, RankClient
from controller.config import Config
from controller.dataflow import Loop, Placement, results
from controller.group import GROUPS, ActorGroup, RewardGroup, RoleGroup, Session
from rlhf.contract import SERVICES
from rlhf.errors import ConfigError, DeadlineExceeded, RlhfError, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2

RETRY_S = 0.2
CLOSE_S = 5.0


class Cluster:
    """Role groups by name of their service.

    Attributes:
        groups: One per service of the config.
        statuses: Newest status of each rank, by service.
        session: What all calls share.
    """

    def __init__(self, config: Config, session: Session) -> None:
        self.config = config
        self.session = session
        self.groups: dict[str, RoleGroup] = {}
        self._also_served: dict[str, RoleGroup] = {}
        self.statuses: dict[str, dict[int, worker_pb2.WatchResponse]] = {}
        self._loop = Loop()
        self._placement = Placement()
        self._watches: list[asyncio.Task[None]] = []

    def connect(self) -> None:
        """Finds every rank of every service, checks them, and starts to watch them.

        Raises:
            ServiceLost: Nothing answers at an address within `run.connect_timeout_s`.
            ConfigError: What answers is not what the config says.
        """
        self._loop.run(self._connect(), self.config.run.connect_timeout_s + CLOSE_S)

    def close(self) -> None:
        """Releases what the run holds on the services, as far as they still answer, and disconnects."""
        try:
            self._loop.run(self._close(), CLOSE_S * 2)
        finally:
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

    def release(self, through_step: int) -> None:
        """Frees the rows of finished steps on every rank."""
        ours = [group for group in self.groups.values() if group.description.epoch]
        releases = [group.release(through_step=through_step) for group in ours]
        results(releases)

    def memory(self) -> dict[str, int]:
        """Resident and device memory by service, in bytes, added over ranks."""
        return {
            name: sum(status.memory_bytes + status.device_memory_bytes for status in ranks.values())
            for name, ranks in self.statuses.items()
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

    async def _connect(self) -> None:
        deadline = time.monotonic() + self.config.run.connect_timeout_s
        names = list(self.config.services)
        found = await asyncio.gather(*(self._find(name, deadline) for name in names), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        for name, description in zip(names, found, strict=True):
            assert isinstance(description, worker_pb2.DescribeResponse)
            self.groups[name] = await self._group(name, description)
        self._check_vocabularies()
        for name, host in self.config.also_served.items():
            self._also_served[name] = self._second_role(name, host)
        for group in self.groups.values():
            if group.description.epoch:
                self._watches.extend(asyncio.ensure_future(self._watch(client)) for client in group.clients)

    async def _find(self, name: str, deadline: float) -> worker_pb2.DescribeResponse:
        """What a service says of itself, checked against the config."""
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
        """What rank 0 of a service says of it, as soon as it answers."""
        table, timeout_s = self.config.services[name], self.config.run.connect_timeout_s
        client = RankClient(name, 0, table.address)
        try:
            while True:
                remaining_s = max(deadline - time.monotonic(), RETRY_S)
                try:
                    return await client.call(WORKER["Describe"], worker_pb2.DescribeRequest(), remaining_s)
                except (ServiceLost, DeadlineExceeded) as error:
                    if time.monotonic() + RETRY_S > deadline:
                        raise ServiceLost(
                            f"services.{name}: no service answers at {table.address} within {timeout_s:g} s"
                            f"{_connection_failure(error)}"
                        ) from error
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
        """Keeps the newest status of a rank, for as long as it answers. A call tells of a lost rank itself."""
        try:
            async for status in client.stream(WORKER["Watch"], worker_pb2.WatchRequest(interval_s=0.5)):
                self.statuses.setdefault(client.service, {})[client.rank] = status
        except RlhfError:
            self.statuses.get(client.service, {}).pop(client.rank, None)

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        groups = (*self.groups.values(), *self._also_served.values())
        await asyncio.gather(*(group.cancel_all() for group in groups))
        request = worker_pb2.ReleaseRequest(session=self.session.name, all_steps=True)
        clients = [client for group in self.groups.values() for client in group.clients]
        releases = (client.call(WORKER["Release"], request, CLOSE_S) for client in clients)
        await asyncio.gather(*releases, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))


def _connection_failure(error: RlhfError) -> str:
    """`: REASON`, as gRPC has it without the addresses it tried; nothing where nobody said anything."""
    cause = error.__cause__
    if isinstance(error, DeadlineExceeded) or not isinstance(cause, grpc.aio.AioRpcError):
        return ""
    return ": " + re.sub(r".*ipv[46]:\S+: ", "", cause.details() or "")


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
