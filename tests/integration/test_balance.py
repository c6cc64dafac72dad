"""Rows that are dealt out by cost come back in their order, and are learned from alike on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from client.session import Session
from controller.role_groups.cluster import Cluster as ConnectedCluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import ActorGroup
from integration.harness import POLICY_LOSS, TWO_STEPS, Cluster, Service
from nccl_transfer.refs.columns import Jagged
from rlhf.v1 import actor_pb2

TIMEOUT_S = 60.0
SAMPLING = actor_pb2.Sampling(temperature=1.3, max_new_tokens=12)
PROMPTS = [f"{i}+{7 * i % 90}=" for i in range(16)]
SAME = ("loss", "grad_norm")


@contextlib.contextmanager
def actor(cluster: Cluster, name: str, *, balance: bool) -> Iterator[tuple[ActorGroup, Service]]:
    """A group of the controller on an actor in the state it started in, and one that reads what it makes."""
    with cluster.service(name) as service:
        connected = ConnectedCluster(cluster.select(actor=name), Session(seed=5, balance=balance))
        try:
            connected.connect()
            group = connected.group("actor")
            assert isinstance(group, ActorGroup)
            yield group, service
        finally:
            connected.close()


def generated(group: ActorGroup) -> FutureBatch:
    return group.generate_sequences(FutureBatch.of(prompt=PROMPTS), SAMPLING)


def learned(cluster: Cluster, name: str, *, balance: bool) -> dict[str, float]:
    """Metrics of an update of two mini-batches, in which long responses are better."""
    with actor(cluster, name, balance=balance) as (group, service):
        made = generated(group)
        made |= group.compute_log_prob(made, SAMPLING.temperature)
        lengths = service.values(made.result(["response_ids"], TIMEOUT_S), "response_ids").lengths
        advantages = Jagged(np.repeat(lengths - lengths.mean(), lengths).astype(np.float32), lengths)
        rows = made | FutureBatch.of(advantages=advantages)
        update = group.update_actor(rows, POLICY_LOSS, TWO_STEPS, SAMPLING.temperature)
        (record,) = update.records(TIMEOUT_S)[-1:]
        return dict(record.metrics)


def test_results_come_back_in_the_order_of_the_rows(cluster: Cluster) -> None:
    found: list[dict[str, Any]] = []
    for balance in (True, False):
        with actor(cluster, "actor", balance=balance) as (group, service):
            made = generated(group)
            scored = made | group.compute_log_prob(made, SAMPLING.temperature)
            columns = scored.result(["response_ids", "rollout_log_probs", "log_probs"], TIMEOUT_S)
            found.append({name: service.values(columns, name) for name in columns.columns})
    balanced, consecutive = found
    assert len(set(balanced["response_ids"].lengths.tolist())) > 2
    np.testing.assert_array_equal(balanced["response_ids"].values, consecutive["response_ids"].values)
    for name in ("log_probs", "rollout_log_probs"):
        np.testing.assert_array_equal(balanced[name].lengths, consecutive[name].lengths)
        np.testing.assert_allclose(balanced[name].values, consecutive[name].values, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        balanced["log_probs"].values, balanced["rollout_log_probs"].values, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("balance", [True, False])
def test_mini_batches_are_the_same_on_one_rank_and_on_two(cluster: Cluster, balance: bool) -> None:
    one, two = (learned(cluster, name, balance=balance) for name in ("lone_actor", "actor"))
    assert two["grad_norm"] > 0
    for name in SAME:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
