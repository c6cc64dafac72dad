"""Runs one after the other, and beside each other, on services that stay up; and connections that break under them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.rank import RankClient
from client.session import Session
from controller import job
from controller.config.config import Config
from controller.role_groups import rejoining as rejoining_module
from controller.role_groups.cluster import Cluster as ConnectedCluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import ActorGroup
from controller.training.columns import ColumnReader
from integration.harness import (
    HUGGING_FACE,
    POLICY_LOSS,
    SHARDED,
    TIMEOUT_S,
    TWO_STEPS,
    Cluster,
    Service,
    jagged,
)
from integration.proxy import Proxy
from integration.test_server import MANY_EPOCHS, training_rows
from nccl_transfer.fetch import Fetcher
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from rlhf.contract import SERVICES, group_methods
from rlhf.errors import ConfigError, InvalidRequest, Refused
from rlhf.v1 import actor_pb2

pytestmark = pytest.mark.timeout(120)

ROLES = ("actor", "critic", "reference", "reward")
SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=6)
HOUR_NS = 3600 * 10**9


def run_config(cluster: Cluster, directory: Path) -> Config:
    config = cluster.select(**{role: role for role in ROLES})
    table = config.run.model_copy(update={"directory": directory, "steps": 1, "samples": 0})
    return config.model_copy(update={"run": table})


def trained(config: Config, *, keep_weights: bool = False, take_over: bool = False) -> str:
    """sha256 of the actor that a run of PPO ends with."""
    run = job.run(config, "ppo", keep_weights=keep_weights, take_over=take_over)
    return run.summary["actor_sha256"]


@contextlib.contextmanager
def connected(config: Config, session: Session, *, keep_weights: bool = False) -> Iterator[ConnectedCluster]:
    made = ConnectedCluster(config, session)
    try:
        made.connect(keep_weights=keep_weights)
        yield made
    finally:
        made.close()


@pytest.fixture
def used(cluster: Cluster, tmp_path: Path) -> Config:
    """The config of a run on services that have learned something else before."""
    for name in ("actor", "critic"):
        service = Service(name, cluster.config.services[name].address)
        rows = training_rows()
        if name == "actor":
            options = {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}
            service.call("update_actor", rows, **options)
        service.close()
    return run_config(cluster, tmp_path)


def test_the_same_seed_twice_on_services_that_stay_up_gives_the_same_weights(used: Config) -> None:
    assert trained(used) == trained(used)


def test_a_run_continues_where_the_one_before_ended_only_when_told_to(used: Config) -> None:
    with connected(used, Session()) as cluster:
        model = str(used.services["actor"].model)  # type: ignore[union-attr]
        assert cluster.origins == dict.fromkeys(("actor", "critic", "reference"), f"{model}, fresh")
    fresh = trained(used)
    with connected(used, Session(), keep_weights=True) as cluster:
        assert cluster.origins["actor"] == f"{model}, continued from policy version 1"
        assert cluster.origins["reference"] == f"{model}, continued from policy version 0"
    assert trained(used, keep_weights=True) != fresh


def test_a_run_does_not_end_another_unless_it_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    config = run_config(cluster, tmp_path)
    with connected(config, Session(name="the-run-that-is-here")) as first:
        with pytest.raises(
            Refused, match=r"services\.\w+ \(127.*\) is in use by run the-run-that-is-here; .*--take-over"
        ):
            trained(config)
        first.group("actor").synchronize().records(TIMEOUT_S)
        trained(config, take_over=True)
        with pytest.raises(Refused, match="the-run-that-is-here"):
            first.group("actor").synchronize().records(TIMEOUT_S)


def test_a_service_refuses_a_second_session_by_itself_too(cluster: Cluster, critic: Service) -> None:
    with connected(cluster.select(critic="critic"), Session(name="first")) as first:
        with pytest.raises(Refused, match="session 'first' is open on this rank"):
            critic.call(
                "synchronize", header=critic.header(sequence=1, session_started_unix_ns=time.time_ns())
            )
        first.group("critic").synchronize().records(TIMEOUT_S)


def test_a_frozen_service_is_shared_and_says_with_how_many(cluster: Cluster, reference: Service) -> None:
    config, lines = cluster.select(reference="reference"), list[str]()
    with connected(config, Session(name="first")) as first:
        second = ConnectedCluster(config, Session(started_unix_ns=5, take_over=True))
        second.connect(lines.append)
        groups = [each.group("reference") for each in (first, second)]
        calls = [each.synchronize() for each in groups * 3]
        assert reference.ask("Describe").sessions == 2
        for call in calls:
            call.records(TIMEOUT_S)
        (address,) = reference.addresses
        assert lines == [f"services.reference ({address}) is shared with 1 other session"]
        with pytest.raises(Refused, match="other sessions use this reference"):
            groups[0].offload().records(TIMEOUT_S)
        second.close()
        groups[0].offload().records(TIMEOUT_S)
        with (
            pytest.raises(
                Refused, match="session 'first' has loaded a checkpoint here or offloaded the model"
            ),
            connected(config, Session()),
        ):
            pass
    with connected(config, Session()) as next_one:
        assert next_one.origins["reference"].endswith(", fresh")
    assert reference.ask("Describe").sessions == 0


def test_weights_that_another_session_keeps_are_not_loaded_anew_below_it(cluster: Cluster) -> None:
    config = cluster.select(reference="reference")
    with connected(config, Session(name="loader")) as first:
        first.group("reference").offload().records(TIMEOUT_S)
    second = ConnectedCluster(config, Session())
    second.connect(keep_weights=True)
    try:
        with (
            pytest.raises(
                Refused, match="session 'loader' has loaded a checkpoint here or offloaded the model"
            ),
            connected(config, Session()),
        ):
            pass
    finally:
        second.close()
    with connected(config, Session()) as next_one:
        assert next_one.origins["reference"].endswith(", fresh")


def test_a_run_that_has_ended_leaves_its_services_free_at_once(cluster: Cluster) -> None:
    config = cluster.select(critic="critic")
    with connected(config, Session()):
        pass
    began = time.monotonic()
    with connected(config, Session()):
        assert time.monotonic() - began < 5


def test_a_controller_whose_clock_is_behind_is_let_in_and_one_from_the_future_locks_nobody_out(
    cluster: Cluster, critic: Service
) -> None:
    ahead = critic.header(session="ahead", sequence=1, session_started_unix_ns=time.time_ns() + HOUR_NS // 2)
    critic.call("synchronize", header=ahead)
    for started in (2**64 - 1, time.time_ns() + 2 * HOUR_NS):
        future = critic.header(session="future", sequence=1, session_started_unix_ns=started)
        with pytest.raises(InvalidRequest, match="ahead of this host's clock"):
            critic.call("synchronize", header=future)
    behind = Session(started_unix_ns=time.time_ns() - HOUR_NS)
    with connected(cluster.select(critic="critic"), behind) as run:
        run.group("critic").synchronize().records(TIMEOUT_S)


def test_a_service_that_was_started_with_another_config_is_refused_with_the_keys(
    cluster: Cluster, tmp_path: Path
) -> None:
    config = run_config(cluster, tmp_path)
    actor: Any = config.services["actor"]
    optimizer = actor.optimizer.model_copy(update={"learning_rate": 0.125})
    changed = actor.model_copy(update={"optimizer": optimizer, "threads": 2, "bind_host": "0.0.0.0"})
    with pytest.raises(
        ConfigError,
        match=r"services\.actor: .*: optimizer\.learning_rate is 0\.0003 there and 0\.125 here; threads is 1 there "
        r"and 2 here\. ",
    ):
        trained(config.model_copy(update={"services": {**config.services, "actor": changed}}))


def test_what_moves_a_model_has_a_time_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    session = Session(timeout_s=1e-3, save_timeout_s=TIMEOUT_S)
    with connected(cluster.select(actor="actor"), session) as run:
        actor = run.group("actor")
        actor.save_checkpoint(str(tmp_path / "sharded"), SHARDED).records(TIMEOUT_S)
        actor.load_checkpoint(str(tmp_path / "sharded")).records(TIMEOUT_S)
        (record,) = actor.save_checkpoint(str(tmp_path / "model"), HUGGING_FACE).records(TIMEOUT_S)
        assert record.responses[0].sha256


def test_a_group_moves_saves_loads_and_traces_its_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """The loss of texts, as an algorithm may measure it in its loop, is the same after each of these calls."""
    session, traces = Session(timeout_s=TIMEOUT_S), tmp_path / "traces"
    with connected(cluster.select(actor="actor"), session) as run:
        actor = run.group("actor")
        assert isinstance(actor, ActorGroup)
        reader = ColumnReader(Fetcher(host_id(), create_readers()), session, TIMEOUT_S)

        def losses() -> list[float]:
            made = actor.compute_loss(FutureBatch.of(text=["1+1=2", "2+2=", "7"]))
            return reader.fetch(made, "pretrain_loss")["pretrain_loss"].tolist()

        expected = losses()
        assert len(expected) == 3
        assert all(loss > 0 for loss in expected)
        actor.save_checkpoint(str(tmp_path / "sharded"), SHARDED).records(TIMEOUT_S)
        moves = [actor.offload(), actor.onload(), actor.load_checkpoint(str(tmp_path / "sharded"))]
        (armed,) = actor.profile(str(traces), calls=1).records(TIMEOUT_S)
        assert losses() == expected
        for each in moves:
            each.records(TIMEOUT_S)
        assert {Path(response.path) for response in armed.responses} == set(traces.iterdir())
        reader.close()


def test_a_run_whose_model_could_not_be_written_does_not_begin(
    used: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp()
    elsewhere = root.with_name(f"elsewhere-{root.name}")
    config = used.model_copy(update={"run": used.run.model_copy(update={"directory": elsewhere})})
    try:
        with pytest.raises(InvalidRequest, match=rf"actor rank \d .*output_roots: {root.resolve()}$"):
            trained(config)
        assert not list(elsewhere.rglob("metrics.jsonl"))
    finally:
        shutil.rmtree(elsewhere)
    with connected(used, Session(), keep_weights=True) as cluster:
        assert cluster.origins["actor"].endswith("continued from policy version 1")


def test_a_batch_generated_early_has_the_random_numbers_and_the_rows_of_its_step(
    cluster: Cluster, actor: Service
) -> None:
    """Two steps are open at once: the second one generates before the first is done."""
    first_prompts, second_prompts = (FutureBatch.of(prompt=[f"{n}{i}+1=" for i in range(8)]) for n in "12")

    def responses(batch: FutureBatch) -> list[list[int]]:
        column = actor.values(batch.result(["response_ids"], TIMEOUT_S), "response_ids")
        return [column.row(row).tolist() for row in range(column.rows)]

    def generate(run: ConnectedCluster, batch: FutureBatch) -> FutureBatch:
        group = run.group("actor")
        assert isinstance(group, ActorGroup)
        return group.generate_sequences(batch, SAMPLING)

    config = cluster.select(actor="actor")
    with connected(config, Session(seed=3)) as run:
        expected = []
        for number, prompts in ((1, first_prompts), (2, second_prompts)):
            step = run.session.begin_step(number)
            made = [generate(run, prompts.of_step(step)) for _ in range(2)]
            expected.append([responses(each) for each in made])
            run.end_step(step)
    assert expected[0][0] != expected[0][1]
    with connected(config, Session(seed=3)) as run:
        first, second = run.session.begin_step(1), run.session.begin_step(2)
        made = [
            generate(run, prompts.of_step(step))
            for step, prompts in ((first, first_prompts), (second, second_prompts)) * 2
        ]
        assert [responses(made[0]), responses(made[2])] == expected[0]
        run.end_step(first)
        assert [responses(made[1]), responses(made[3])] == expected[1]
        run.end_step(second)
        assert actor.used_bytes() == [0, 0]


def test_a_call_that_fails_does_not_touch_the_next_of_its_group_that_is_under_way(cluster: Cluster) -> None:
    def rows(token: int) -> FutureBatch:
        ids = jagged([[token] * 4] * 8, np.int64)
        return FutureBatch.of(prompt_ids=ids, response_ids=ids)

    with connected(cluster.select(actor="actor"), Session()) as run:
        group = run.group("actor")
        assert isinstance(group, ActorGroup)
        calls = [group.compute_log_prob(rows(token), 1.0) for token in (50, 999, 50)]
        assert calls[0].records(TIMEOUT_S)[0].service == "actor"
        with pytest.raises(InvalidRequest, match="999"):
            calls[1].records(TIMEOUT_S)
        assert calls[2].records(TIMEOUT_S)[0].service == "actor"


@contextlib.asynccontextmanager
async def through_proxies(service: Service) -> AsyncIterator[tuple[list[RankClient], list[Proxy]]]:
    proxies = [Proxy(address) for address in service.addresses]
    clients = [
        RankClient(service.name, rank, each.address, is_ours=True, session=service.session)
        for rank, each in enumerate(proxies)
    ]
    try:
        yield clients, proxies
    finally:
        for client in clients:
            await client.close()
        for each in proxies:
            each.close()


def test_a_connection_cut_in_the_middle_of_an_update_costs_neither_the_update_nor_a_second_one(
    actor: Service,
) -> None:
    method = group_methods("actor")["update_actor"]
    requests = actor.requests(
        "update_actor", training_rows(), loss=POLICY_LOSS, schedule=actor_pb2.Schedule(epochs=40, mini_batches=1),
        temperature=1.0,
    )  # fmt: skip

    async def main() -> list[Any]:
        async with through_proxies(actor) as (clients, proxies):
            calls = [
                c.start(method, request, TIMEOUT_S) for c, request in zip(clients, requests, strict=True)
            ]
            for done in (2, 8):
                await asyncio.to_thread(actor.watch_until, lambda status, least=done: status.done >= least)
                for each in proxies:
                    each.cut()
            answers = await asyncio.gather(*calls)
            assert all(each.connections >= 3 for each in proxies)
            return answers

    answers = asyncio.run(main())
    assert [answer.outcome.policy_version for answer in answers] == [1, 1]
    assert actor.versions == [1, 1]


def test_a_call_that_was_lost_on_the_way_is_sent_again(actor: Service) -> None:
    async def main() -> None:
        async with through_proxies(actor) as (clients, proxies):
            for _ in range(5):
                requests = actor.requests("synchronize")
                for each in proxies:
                    each.cut()
                pairs = zip(clients, requests, strict=True)
                method = SERVICES["worker"]["Synchronize"]
                await asyncio.gather(*(client.start(method, request, 20.0) for client, request in pairs))

    asyncio.run(main())


def test_an_update_that_ends_after_its_deadline_is_known_to_have_ended(actor: Service) -> None:
    """Either it committed, and its caller gets the response, or it did not, and its caller is told so."""
    method = group_methods("actor")["update_actor"]
    requests = actor.requests(
        "update_actor", training_rows(), loss=POLICY_LOSS, schedule=MANY_EPOCHS, temperature=1.0
    )

    async def main() -> list[Any]:
        async with through_proxies(actor) as (clients, _):
            pairs = zip(clients, requests, strict=True)
            calls = [client.start(method, request, 1.0) for client, request in pairs]
            return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert actor.versions == ([1, 1] if not isinstance(outcomes[0], Exception) else [0, 0])


def test_a_run_whose_connections_are_cut_again_and_again_gives_the_same_numbers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(cluster, tmp_path)
    expected = trained(config)
    proxies: dict[str, Proxy] = {}

    def client(service: str, rank: int, address: str, **options: Any) -> RankClient:
        if address not in proxies:
            proxies[address] = Proxy(address)
        return RankClient(service, rank, proxies[address].address, **options)

    monkeypatch.setattr(rejoining_module, "RankClient", client)
    stop = asyncio.Event()

    async def cut_them() -> None:
        while not stop.is_set():
            for each in list(proxies.values()):
                each.cut()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.1)

    async def main() -> str:
        cutting = asyncio.create_task(cut_them())
        try:
            return await asyncio.to_thread(trained, config)
        finally:
            stop.set()
            await cutting
            for each in proxies.values():
                each.close()

    assert asyncio.run(main()) == expected
    assert sum(each.connections for each in proxies.values()) > 2 * len(proxies)
