"""The gradient of some rows of an update that was computed before it: the update has the bits of one that computes all
rows itself, and computes them where the gradient is not that of its rows, its loss and its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from controller.role_groups.balance import deal as deal_by_cost
from controller.role_groups.call import RowDistribution
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.protocols import get_protocol
from nccl_transfer.rows import FetchedRows
from rlhf.errors import CallCancelled, InvalidRequest, Refused
from rlhf.v1 import actor_pb2, common_pb2, worker_pb2
from services.actor.worker import ActorWorker
from services.engines.accumulating import AccumulatingEngine
from services.engines.base import TrainEngine
from services.roles.early_gradient import EarlyGradient
from services.roles.minibatch import deal
from services.runtime.ranks import Ranks
from services.runtime.worker import NO_ROWS, CallContext, CallRows
from services.testing.engine_task import same_bits
from settings.actor import ActorTable

pytestmark = pytest.mark.usefixtures("process_group")

ROWS, PROMPT, RESPONSE = 8, 3, 5
LOSS = actor_pb2.PolicyLoss(
    aggregation="seq-mean-token-mean", kl_loss_coefficient=0.1, entropy_coefficient=0.01
)
SCHEDULE = actor_pb2.Schedule(epochs=2, mini_batches=2)
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp"},
    "lora": {"engine": "fsdp", "lora": {"rank": 4}},
    "3d": {"engine": "3d", "mesh": "1-1-1"},
    "zero 2": {"engine": "zero", "zero": {"stage": 2}},
    "zero 3": {"engine": "zero", "zero": {"stage": 3}},
}


class Actor:
    """An actor of one rank that computes each row alone, and calls of its methods on some of its rows."""

    def __init__(self, directory: Path, **keys: Any) -> None:
        table = {
            "role": "actor",
            "address": "127.0.0.1:1",
            "model": directory,
            "optimizer": {"learning_rate": 1e-2},
            "micro_batch_tokens": PROMPT + RESPONSE,
            **keys,
        }
        self.worker = ActorWorker(ActorTable.model_validate(table), Ranks(0, 1, 0))
        generator = np.random.default_rng(3)
        self._values = {
            "prompt_ids": generator.integers(3, 60, (ROWS, PROMPT)),
            "response_ids": generator.integers(3, 60, (ROWS, RESPONSE)),
            "advantages": generator.normal(size=ROWS).astype(np.float32),
            **{
                name: -generator.random((ROWS, RESPONSE)).astype(np.float32)
                for name in ("log_probs", "ref_log_probs")
            },
        }
        assert isinstance(self.worker.engine, AccumulatingEngine)
        self.engine = self.worker.engine
        self.before = self.engine.snapshot()

    def rows(self, taken: Sequence[int], verify: Sequence[Callable[[], None]] = ()) -> CallRows:
        numbers = np.asarray(taken, np.int64)

        def some(x: np.ndarray) -> Any:
            kept = x[numbers]
            return kept if x.ndim == 1 else Jagged(kept.reshape(-1), np.full(len(numbers), x.shape[1]))

        values = {name: some(x) for name, x in self._values.items()}
        dtypes = {name: str(x.dtype) for name, x in self._values.items()}
        return CallRows(FetchedRows(len(numbers), values, dtypes, 0, {}, verify), numbers)

    def prepare(
        self, *taken: int, call: CallContext | None = None, fetched: CallRows | None = None, **other: Any
    ) -> None:
        fields = {"loss": LOSS, "schedule": SCHEDULE, "temperature": 1.0, "rows": ROWS, **other}
        request = actor_pb2.PrepareUpdateRequest(**fields)
        result = self.worker.prepare_update(fetched or self.rows(taken), request, call or make_call())
        assert (result.columns, result.metrics) == ({}, {})

    def update(self, call: CallContext | None = None, **other: Any) -> dict[str, tuple[float, float]]:
        fields = {"loss": LOSS, "schedule": SCHEDULE, "temperature": 1.0, **other}
        request = actor_pb2.UpdateActorRequest(**fields)
        return dict(self.worker.update_actor(self.rows(range(ROWS)), request, call or make_call()).metrics)

    def restore(self) -> None:
        self.engine.restore(self.before)
        self.worker.policy_version = 0

    def computed(self, action: Callable[[], Any]) -> tuple[int, Any]:
        """Number of rows whose gradient the engine computes in an action, and its result."""
        engine, seen = self.engine, 0
        add = engine._add_gradients

        def counting(micro_batches: Any, *given: Any, **named: Any) -> None:
            nonlocal seen
            seen += sum(len(each.rows) for each in micro_batches)
            add(micro_batches, *given, **named)

        engine._add_gradients = counting  # type: ignore[attr-defined]
        try:
            result = action()
        finally:
            del engine._add_gradients  # type: ignore[attr-defined]
        return seen, result


def make_call(session: str = "s", step: int = 3, ordinal: int = 0, **fields: Any) -> CallContext:
    header = common_pb2.Call(call_id="c", session=session, seed=1, step=step, ordinal=ordinal)
    return CallContext(header, time.monotonic() + 60, **fields)


FIRST = deal(np.arange(ROWS), SCHEDULE.mini_batches, (1, 3, 0, 0))[0].tolist()
"""Rows of the first mini-batch."""
WHOLE = SCHEDULE.epochs * ROWS
"""Rows that an update computes which was not prepared."""


@pytest.fixture(scope="module")
def actor(tiny_llama_dir: Path) -> Actor:
    return Actor(tiny_llama_dir)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_was_prepared_has_the_bits_of_one_call(engine: str, tiny_llama_dir: Path) -> None:
    pytest.importorskip("deepspeed") if engine.startswith("zero") else None
    actor = Actor(tiny_llama_dir, **ENGINES[engine])
    alone = actor.computed(actor.update)
    learned = actor.engine.snapshot()
    assert alone[0] == WHOLE
    assert actor.worker.policy_version == 1
    for chunks in ([range(4)], [range(3), range(3, 5)], [range(2), range(2, 4), range(4, 8)]):
        actor.restore()
        early = sum(actor.computed(lambda rows=rows: actor.prepare(*rows))[0] for rows in chunks)
        assert early == sum(row in FIRST for rows in chunks for row in rows)
        assert actor.worker.policy_version == 0
        assert same_bits(actor.engine.snapshot(), actor.before)
        assert actor.computed(lambda: actor.update(prepared=True)) == (WHOLE - early, alone[1])
        assert same_bits(actor.engine.snapshot(), learned)
        assert not actor.engine.holds_gradient


def test_rows_in_between_that_compute_log_probs_change_nothing(actor: Actor) -> None:
    actor.restore()
    alone, learned = actor.update(), actor.engine.snapshot()
    actor.restore()
    actor.prepare(*range(5))
    request = actor_pb2.ComputeLogProbRequest(temperature=1.0)
    actor.worker.compute_log_prob(actor.rows(range(5, ROWS)), request, make_call())
    assert actor.update(prepared=True) == alone
    assert same_bits(actor.engine.snapshot(), learned)


def other_weights(actor: Actor) -> None:
    actor.worker.policy_version += 1


def another_update(actor: Actor) -> None:
    actor.update(make_call(step=2))
    actor.engine.restore(actor.before)
    actor.worker.policy_version = 0


def released_rows(actor: Actor) -> None:
    def verify() -> None:
        raise Refused("the rows were released")

    with pytest.raises(Refused, match="released"):
        actor.prepare(fetched=actor.rows([6, 7], [verify]))


def cancelled(actor: Actor) -> None:
    with pytest.raises(CallCancelled):
        actor.prepare(6, 7, call=make_call(cancelled=True))


def new_session(actor: Actor) -> None:
    request = worker_pb2.BeginSessionRequest(keep_weights=True)
    actor.worker.begin_session(NO_ROWS, request, make_call())


def offloaded(actor: Actor) -> None:
    actor.worker.offload(NO_ROWS, None, make_call())
    actor.worker.onload(NO_ROWS, None, make_call())


DISCARDED: dict[str, tuple[Callable[[Actor], object], dict[str, Any]]] = {
    "other weights": (other_weights, {}),
    "another update": (another_update, {}),
    "start over": (lambda actor: actor.worker.start_over(), {}),
    "load": (lambda actor: actor.worker.load(actor.saved), {}),  # type: ignore[attr-defined]
    "offload": (offloaded, {}),
    "released rows": (released_rows, {}),
    "cancelled": (cancelled, {}),
    "new session": (new_session, {}),
    "other session": (lambda actor: None, {"call": {"session": "t"}}),
    "other step": (lambda actor: None, {"call": {"step": 4}}),
    "other ordinal": (lambda actor: None, {"call": {"ordinal": 1}}),
    "other loss": (lambda actor: None, {"loss": actor_pb2.PolicyLoss(aggregation="seq-mean-token-mean")}),
    "other schedule": (lambda actor: None, {"schedule": actor_pb2.Schedule(epochs=1, mini_batches=2)}),
    "other temperature": (lambda actor: None, {"temperature": 0.5}),
    "not prepared": (lambda actor: None, {"prepared": False}),
}


@pytest.mark.parametrize("case", DISCARDED)
def test_a_gradient_of_something_else_is_not_used(case: str, actor: Actor, tmp_path: Path) -> None:
    happens, fields = DISCARDED[case]
    others = {"prepared": True, **fields}
    call = others.pop("call", {})
    actor.restore()
    actor.saved = tmp_path / "saved"  # type: ignore[attr-defined]
    actor.engine.save(actor.saved, {"policy_version": 0})  # type: ignore[attr-defined]
    expected = actor.update(make_call(**call), **{**others, "prepared": False})
    learned = actor.engine.snapshot()
    actor.restore()
    actor.prepare(*range(5))
    assert actor.engine.holds_gradient
    happens(actor)
    rows = others.get("schedule", SCHEDULE).epochs * ROWS
    assert actor.computed(lambda: actor.update(make_call(**call), **others)) == (rows, expected)
    assert same_bits(actor.engine.snapshot(), learned)
    assert not actor.engine.holds_gradient


def test_rows_that_the_update_has_on_other_ranks_are_computed_again(actor: Actor) -> None:
    actor.restore()
    actor.prepare(*range(5))
    request = actor_pb2.UpdateActorRequest(loss=LOSS, schedule=SCHEDULE, temperature=1.0, prepared=True)
    left = [row for row in range(ROWS) if row != FIRST[0]]
    seen, _ = actor.computed(
        lambda: actor.worker.update_actor(actor.rows(left), request, make_call()).metrics
    )
    assert seen == SCHEDULE.epochs * len(left)


def test_rows_that_were_prepared_already_begin_anew(actor: Actor) -> None:
    actor.restore()
    alone = actor.update()
    actor.restore()
    actor.prepare(*range(5))
    actor.prepare(*range(5))
    assert actor.update(prepared=True) == alone


def test_an_update_that_fails_leaves_no_gradient(actor: Actor) -> None:
    actor.restore()
    alone, learned = actor.update(), actor.engine.snapshot()
    actor.restore()
    actor.prepare(*range(5))
    with pytest.raises(CallCancelled):
        actor.update(make_call(cancelled=True), prepared=True)
    assert not actor.engine.holds_gradient
    assert actor.update(prepared=True) == alone
    assert same_bits(actor.engine.snapshot(), learned)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"loss": actor_pb2.PolicyLoss()}, "cannot be prepared"),
        (
            {"loss": actor_pb2.PolicyLoss(aggregation="seq-mean-token-sum", pretrain_coefficient=1)},
            "be prepared",
        ),
        ({"rows": 0}, "rows: 0"),
        ({"rows": 4}, "rows: 4 are fewer"),
        ({"rows": 1 << 60}, "rows: "),
        ({"schedule": actor_pb2.Schedule(epochs=1)}, "mini_batches must be at least 1"),
    ],
)
def test_requests_that_cannot_be_prepared_are_refused(other: dict[str, Any], said: str, actor: Actor) -> None:
    actor.restore()
    with pytest.raises(InvalidRequest, match=said):
        actor.prepare(*range(5), **other)
    assert not actor.engine.holds_gradient


def test_an_engine_that_cannot_hold_gradients_computes_all_in_the_update(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.restore()
    alone = actor.update()
    actor.restore()
    monkeypatch.setattr(actor.worker, "_early", EarlyGradient(Mock(TrainEngine), actor.worker.ranks))
    assert actor.computed(lambda: actor.prepare(*range(5))) == (0, None)
    assert actor.computed(lambda: actor.update(prepared=True)) == (WHOLE, alone)


def test_an_update_is_not_prepared_on_a_rank_whose_peer_lacks_the_gradient(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.restore()
    alone = actor.update()
    actor.restore()
    actor.prepare(*range(5))
    early = actor.worker._early
    monkeypatch.setattr(early, "_ranks", SimpleNamespace(total=lambda values, until: [values[0] + 1]))
    assert actor.computed(lambda: actor.update(prepared=True)) == (WHOLE, alone)


@pytest.mark.parametrize("balance", [True, False])
def test_rows_of_a_chunk_go_to_the_ranks_that_have_them_in_the_update(balance: bool) -> None:
    protocol, mesh = get_protocol("3D_PROTO"), Mesh(2, 1, 3)
    lengths = np.random.default_rng(1).integers(1, 50, 17)
    order, numbers = deal_by_cost(lengths, 3, 2) if balance else (np.arange(17), np.arange(17))
    whole = RowDistribution(order, numbers, protocol)
    places = protocol.distribute(17, mesh)
    first = 0
    for rows in (1, 2, 8, 6):
        dealt = whole.some(mesh, first, rows)
        assert sorted(dealt.order.tolist()) == list(range(rows))
        for rank, mine in enumerate(dealt.protocol.distribute(rows, mesh)):
            given = dict(zip((dealt.order[mine] + first).tolist(), dealt.numbers[mine].tolist(), strict=True))
            later = dict(zip(order[places[rank]].tolist(), numbers[places[rank]].tolist(), strict=True))
            assert given == {row: number for row, number in later.items() if first <= row < first + rows}
        first += rows
