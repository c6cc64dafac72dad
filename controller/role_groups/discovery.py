"""Finds the services of a config by their addresses and checks that they are the services that the config describes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import grpc
import grpc.aio

from client.outage import is_break
from client.rank import WORKER, RankClient
from controller.config.config import Config
from rlhf.channels import why_not_connected
from rlhf.errors import ConfigError, DeadlineExceeded, NotAuthenticated, RlhfError, ServiceLost
from rlhf.roles import find_role
from rlhf.v1 import common_pb2, worker_pb2

RETRY_S = 0.2
"""Pause between two attempts to reach a service, in seconds."""
SILENCE_S = 2.0
"""Time, in seconds, after which a line names the services that have not responded."""
HOW_TO_START = "Start services with rlhf-deploy up CONFIG, or have the run start them: --launch"
STARTED_BY_HAND = "Start it by hand: neither rlhf-deploy nor --launch starts services that are external"

Descriptions = Mapping[str, worker_pb2.DescribeResponse]
"""Responses of services to Describe, by name."""


class Discovery:
    """Finds all services of a config by calling Describe on the address of each.

    Args:
        config: The configuration.
        say: Called with a line of text that names the services that are waited for.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say

    async def find_all(self) -> Descriptions:
        """Waits until all services respond to Describe, and returns their descriptions by name.

        Raises:
            ServiceLost: Services do not respond within `run.connect_timeout_s`; the text lists all of them.
            ConfigError: A service is not the one that the config describes; raised without waiting for the others.
        """
        deadline = time.monotonic() + self._config.run.connect_timeout_s
        found, has_waited = await self._round(deadline)
        while has_waited:
            # Those that responded at once may have been about to end, and started again with the others.
            before = {name: each.epoch for name, each in found.items()}
            found, _ = await self._round(deadline)
            has_waited = before != {name: each.epoch for name, each in found.items()}
        return found

    async def _round(self, deadline: float) -> tuple[Descriptions, bool]:
        """Finds all services once, until `deadline`; returns their descriptions, and whether a line has named services
        that were waited for. Raises as `find_all`."""
        timeout_s = self._config.run.connect_timeout_s
        finds = {name: asyncio.create_task(self.find(name, deadline)) for name in self._config.services}
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
                    self._say(
                        f"waiting for {', '.join(self._named(name) for name in finds if name in missing)}"
                    )
        finally:
            for find in finds.values():
                find.cancel()
        lost = {name: str(find.exception()) for name, find in finds.items() if find.exception()}
        if lost:
            to_launch = [name for name in lost if not self._config.services[name].external]
            error = ServiceLost(
                f"no service answers within {timeout_s:g} s at {'; at '.join(lost.values())}. "
                + (HOW_TO_START if to_launch else STARTED_BY_HAND)
            )
            raise error.of_call((to_launch or list(lost))[0])
        return {name: find.result() for name, find in finds.items()}, bool(told)

    async def find(self, name: str, deadline: float, ended: int = 0) -> worker_pb2.DescribeResponse:
        """Waits until a service responds to Describe, checks its role, ranks and limits against the config, and returns
        its description.

        Args:
            name: Name of the service.
            deadline: Latest time, in seconds of `time.monotonic`.
            ended: Epoch that has ended; a response of this epoch counts as none. Default: none has.

        Raises:
            ServiceLost: The service does not respond until `deadline`.
            ConfigError: The service is not the one that the config describes.
        """
        table = self._config.services[name]
        description = await self._describe(name, deadline, ended)
        if description.role != find_role(table.role).name:
            raise ConfigError(
                f"services.{name}.address: {table.address} is the {description.role} service "
                f"{description.service!r}, but role is {table.role}"
            )
        if description.scores_groups and reads_tokens(description):
            raise ConfigError(
                f"services.{name}.address: the service at {table.address} says that it scores groups of token ids; "
                "only a reward that reads text can score groups"
            )
        if len(description.ranks) != table.ranks:
            raise ConfigError(
                f"services.{name}.ranks is {table.ranks}, but the service has {len(description.ranks)}"
            )
        longest = self._config.rollout.max_response_tokens
        if description.max_tokens and description.max_tokens <= longest:
            raise ConfigError(
                f"rollout.max_response_tokens: {longest} leave no room for a prompt in services.{name}, which takes "
                f"{description.max_tokens} tokens in all (its model's positions, or micro_batch_tokens)"
            )
        # The config may name a role as module:object, and only by this can it be found.
        description.role = table.role
        return description

    def _named(self, name: str) -> str:
        return f"services.{name} ({self._config.services[name].address})"

    async def _describe(self, name: str, deadline: float, ended: int) -> worker_pb2.DescribeResponse:
        """Calls Describe on rank 0 of a service until it responds, and returns the response. A reward server without
        this method, or that tells no ranks, gets the description that `_foreign_reward` makes. `ended`: as of
        `find`. Raises ServiceLost at `deadline`, and ConfigError where the address is that of no service of this
        cluster."""
        table = self._config.services[name]
        client = RankClient(name, 0, table.address)
        try:
            while True:
                remaining_s, why = max(deadline - time.monotonic(), RETRY_S), ""
                try:
                    answer = await client.call(WORKER["Describe"], worker_pb2.DescribeRequest(), remaining_s)
                    if answer.role == "reward" and not answer.ranks:
                        return _foreign_reward(name, table.address, answer)
                    if ended and answer.epoch == ended:
                        why = ": rank 0 was not started again"
                    elif not (why := await self._lost_rank(name, answer)):
                        return answer
                except (ServiceLost, DeadlineExceeded) as error:
                    why = _connection_failure(error)
                except NotAuthenticated:
                    raise
                except RlhfError as error:
                    if _is_unimplemented(error) and table.role == "reward":
                        return _foreign_reward(name, table.address, worker_pb2.DescribeResponse())
                    if not _has_broken(error):
                        raise ConfigError(
                            f"services.{name}.address: {table.address} is no service of this cluster: {error}"
                        ) from error
                if time.monotonic() + RETRY_S > deadline:
                    raise ServiceLost(f"{self._named(name)}{why}").of_call(name)
                await asyncio.sleep(RETRY_S)
        finally:
            await client.close()

    async def _lost_rank(self, name: str, description: worker_pb2.DescribeResponse) -> str:
        """Returns ": " and the first rank that cannot be reached, as of a service that is about to end and whose rank 0
        still responds; empty where all can. One that does not respond within `SILENCE_S` counts as reached."""
        infos = list(enumerate(description.ranks))[1:]
        clients = [RankClient(name, rank, info.endpoint.address) for rank, info in infos]
        request = worker_pb2.DescribeRequest(brief=True)
        calls = (client.call(WORKER["Describe"], request, SILENCE_S) for client in clients)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))
        lost = [
            str(client)
            for client, answer in zip(clients, answers, strict=True)
            if isinstance(answer, ServiceLost)
        ]
        return f": {lost[0]} cannot be reached" if lost else ""


def reads_tokens(description: worker_pb2.DescribeResponse) -> bool:
    """Whether a service reads token ids of a vocabulary: a reward of input form TENSOR, or another role with a
    vocabulary hash or `max_tokens`."""
    if description.input_form:
        return description.input_form == worker_pb2.INPUT_FORM_TENSOR
    return bool(description.vocabulary_hash or description.max_tokens)


def check_vocabularies(services: Descriptions) -> None:
    """Raises ConfigError where a service that reads token ids has a different vocabulary than an actor."""
    for actor, made_by in services.items():
        if made_by.role != "actor":
            continue
        expected = made_by.vocabulary_hash
        for name, description in services.items():
            if reads_tokens(description) and description.vocabulary_hash != expected:
                raise ConfigError(
                    f"services.{name}.model: its tokenizer is not that of services.{actor}: vocabulary hash "
                    f"{description.vocabulary_hash[:12] or 'none'} against {expected[:12]}"
                )


def _connection_failure(error: RlhfError) -> str:
    """Returns ": " and gRPC's reason for a failed connection, without addresses; empty where the service did not
    respond at all."""
    cause = error.__cause__
    if isinstance(error, DeadlineExceeded) or not isinstance(cause, grpc.aio.AioRpcError):
        return ""
    return f": {why_not_connected(cause.details() or '')}"


def _has_broken(error: RlhfError) -> bool:
    """Whether a call failed because its connection broke, as it does where the process ends."""
    return isinstance(error.__cause__, grpc.RpcError) and is_break(error.__cause__)


def _is_unimplemented(error: RlhfError) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED


def _foreign_reward(
    name: str, address: str, answer: worker_pb2.DescribeResponse
) -> worker_pb2.DescribeResponse:
    """Makes the description of a server that serves RewardService without sessions: one rank that scores texts, without
    an epoch. Of its own `answer`, only `score_range` and `scores_groups` are used."""
    endpoint = common_pb2.Endpoint(address=address, service=name)
    return worker_pb2.DescribeResponse(
        role="reward",
        service=name,
        ranks=[worker_pb2.RankInfo(endpoint=endpoint)],
        mesh=worker_pb2.MeshShape(pipeline=1, tensor=1, data=1),
        input_form=worker_pb2.INPUT_FORM_TEXT,
        score_range=answer.score_range if answer.HasField("score_range") else None,
        scores_groups=answer.scores_groups,
    )
