"""Updates of a worker in this process: what fails leaves no trace, also where no snapshot was taken."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import FetchedRows
from rlhf.errors import ConfigError, InvalidRequest, OutOfStep, Refused
from rlhf.v1 import actor_pb2, common_pb2, critic_pb2, worker_pb2
from services.critic.worker import CriticWorker
from services.engines.sharded import ShardedEngine
from services.roles.background import BackgroundWriter
from services.roles.device import rank_device
from services.roles.torch_worker import TorchWorker
from services.runtime import compute
from services.runtime.compute import ComputeThread
from services.runtime.ranks import Ranks
from services.runtime.worker import NO_ROWS, CallContext, CallResult, CallRows
from services.storage.written import WrittenFile
from settings.critic import CriticTable
from settings.service import ServiceTable

pytestmark = pytest.mark.usefixtures("process_group")

COUNT = 6


@dataclass(frozen=True)
class ReleasedRows(FetchedRows):
    """Rows that were released while they were computed with."""

    seen: list[str] = field(default_factory=list)

    def verify(self) -> None:
        self.seen.append("verified")
        raise Refused("the rows have been released")


def make_critic(directory: Path, engine: str, epoch: int = 0, **optimizer: float) -> CriticWorker:
    name, _, stage = engine.partition("-")
    tables: dict[str, Any] = {"3d": {"mesh": "1-1-1"}, "zero": {"zero": {"stage": int(stage or 1)}}}
    table = {
        "role": "critic",
        "address": "127.0.0.1:1",
        "model": directory,
        "engine": name,
        "dtype": "bfloat16",
        "optimizer": optimizer,
    }
    return CriticWorker(CriticTable.model_validate(table | tables.get(name, {})), Ranks(0, 1, epoch))


def make_rows(kind: type[FetchedRows] = FetchedRows) -> CallRows:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 6, COUNT)

    def column(make: Any) -> Jagged[np.ndarray]:
        return Jagged(make(int(lengths.sum())), lengths)

    values: dict[str, Any] = {
        name: column(lambda n: generator.integers(3, 61, n)) for name in ("prompt_ids", "response_ids")
    }
    values |= {
        name: column(lambda n: generator.normal(size=n).astype(np.float32)) for name in ("values", "returns")
    }
    dtypes = {name: str(x.values.dtype) for name, x in values.items()}
    return CallRows(kind(COUNT, values, dtypes, 0), np.arange(COUNT))


def context(call_id: str = "c") -> CallContext:
    return CallContext(common_pb2.Call(call_id=call_id), time.monotonic() + 60)


def update(
    worker: CriticWorker, rows: CallRows, mini_batches: int = 1, call_id: str = "c", **loss: Any
) -> CallResult:
    schedule = actor_pb2.Schedule(epochs=1, mini_batches=mini_batches)
    request = critic_pb2.UpdateCriticRequest(loss=critic_pb2.ValueLoss(**loss), schedule=schedule)
    call = context(call_id)
    return worker.around(lambda: worker.update_critic(rows, request, call))


def bits(worker: CriticWorker) -> dict[str, Tensor]:
    snapshot = worker.engine.snapshot()
    return snapshot.tensors | {"num_steps": torch.tensor(snapshot.num_steps)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.fixture(params=["fsdp", "3d", "zero-1", "zero-2", "zero-3"])
def critic(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> CriticWorker:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    return make_critic(tiny_llama_dir, request.param)


def takes_no_snapshot(critic: CriticWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot() -> None:
        raise AssertionError("a single step needs no snapshot")

    monkeypatch.setattr(critic.engine, "snapshot", snapshot)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_whose_rows_were_released_leaves_no_trace(
    critic: CriticWorker, mini_batches: int, monkeypatch: pytest.MonkeyPatch
):
    update(critic, make_rows())
    before, rows, state_id = bits(critic), make_rows(ReleasedRows), critic.state_id
    with monkeypatch.context() as patch:
        if mini_batches == 1 and critic.engine.step_is_atomic:
            takes_no_snapshot(critic, patch)
        with pytest.raises(Refused, match="released"):
            update(critic, rows, mini_batches)
    assert rows.fetched.seen == ["verified"]  # type: ignore[attr-defined]
    assert critic.policy_version == 1
    assert critic.state_id == state_id
    assert same(bits(critic), before)


def test_a_rank_that_cannot_undo_an_update_holds_no_state_that_has_an_id_and_leaves(
    critic: CriticWorker, monkeypatch: pytest.MonkeyPatch
):
    def restore(snapshot: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(critic.engine, "restore", restore)
    said = "could not be restored .RuntimeError: no memory. after Refused: the rows have been released"
    with pytest.raises(OutOfStep, match=said):
        update(critic, make_rows(ReleasedRows), mini_batches=2)
    assert critic.state_id == ""


@pytest.mark.parametrize("engine", ["fsdp", "3d"])
def test_a_rank_that_fails_in_a_step_that_all_have_agreed_on_holds_no_state_that_has_an_id_and_leaves(
    engine: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its peers have made the step, and it a part of it: neither goes on, nor passes for the state from before."""
    critic = make_critic(tiny_llama_dir, engine)
    take_step = ShardedEngine._take_step

    def fail(self: ShardedEngine, lr: float) -> None:
        take_step(self, lr)
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(ShardedEngine, "_take_step", fail)
    with pytest.raises(
        OutOfStep, match=r"rank 0 failed alone in an optimizer step, .* the device has failed"
    ):
        update(critic, make_rows())
    assert critic.state_id == ""


def test_a_single_step_without_a_snapshot_gives_the_bits_of_one_with_it(
    critic: CriticWorker, monkeypatch: pytest.MonkeyPatch
):
    critic.engine.step_is_atomic = False
    first = [update(critic, make_rows()).metrics for _ in range(2)]
    expected = bits(critic)
    critic.start_over()
    critic.engine.step_is_atomic = type(critic.engine).step_is_atomic
    with monkeypatch.context() as patch:
        if critic.engine.step_is_atomic:
            takes_no_snapshot(critic, patch)
        assert [update(critic, make_rows()).metrics for _ in range(2)] == first
    assert same(bits(critic), expected)


def test_a_worker_that_starts_over_is_at_policy_version_0(critic: CriticWorker):
    before = bits(critic)
    update(critic, make_rows())
    critic.start_over()
    assert critic.policy_version == 0
    assert same(bits(critic), before)


def test_the_state_id_changes_with_the_state_and_comes_back_with_it(tiny_llama_dir: Path, tmp_path: Path):
    """Two ranks of one start have the same history; another start of the service has another."""
    critic, peer = (make_critic(tiny_llama_dir, "fsdp") for _ in range(2))
    other = make_critic(tiny_llama_dir, "fsdp", epoch=1)
    for worker in (critic, peer, other):
        worker.output_roots = (tmp_path,)
    seen = [critic.state_id]
    assert peer.state_id == critic.state_id != other.state_id
    for call_id in ("first", "second"):
        for worker in (critic, peer, other):
            update(worker, make_rows(), call_id=call_id)
        assert peer.state_id == critic.state_id != other.state_id
        seen.append(critic.state_id)
    saved = bits(critic)
    critic.engine.save(tmp_path / "saved", {"policy_version": 2})
    for keep_weights in (True, False):
        request = worker_pb2.BeginSessionRequest(keep_weights=keep_weights)
        critic.begin_session(NO_ROWS, request, context(f"begin {keep_weights}"))
        assert (critic.state_id == seen[2]) == keep_weights
    seen.append(critic.state_id)
    for state_id, number in (("", 4), (seen[2], 2)):
        request = worker_pb2.LoadCheckpointRequest(directory=str(tmp_path / "saved"), state_id=state_id)
        critic.load_checkpoint(NO_ROWS, request, context(f"load {state_id}"))
        seen.append(critic.state_id)
        assert seen.index(critic.state_id) == number
    assert same(bits(critic), saved)
    critic.policy_version += 1  # as a role of another package may do
    assert critic.state_id == ""
    request.state_id = "x" * 65
    with pytest.raises(InvalidRequest, match="state_id has 65 characters; at most 64"):
        critic.load_checkpoint(NO_ROWS, request, context("long"))


def test_an_engine_is_brought_back_by_a_session_that_keeps_its_state(tiny_llama_dir: Path):
    critic = make_critic(tiny_llama_dir, "fsdp")
    before = bits(critic)
    assert isinstance(critic.engine, ShardedEngine)
    critic.engine._leave_device()
    critic.begin_session(NO_ROWS, worker_pb2.BeginSessionRequest(keep_weights=True), context())
    assert same(bits(critic), before)


def test_an_offloaded_engine_is_brought_back_by_a_checkpoint(tiny_llama_dir: Path, tmp_path: Path):
    critic = make_critic(tiny_llama_dir, "fsdp")
    critic.engine.save(tmp_path / "saved", {"policy_version": 3})
    before = bits(critic)
    update(critic, make_rows())
    assert isinstance(critic.engine, ShardedEngine)
    critic.engine._leave_device()
    critic.load(tmp_path / "saved")
    assert critic.policy_version == 3
    assert same(bits(critic), before)


def test_a_write_that_failed_keeps_no_copy_of_the_state(tmp_path: Path):
    class State:
        """A copy of weights."""

    state = State()
    copy, writer = weakref.ref(state), BackgroundWriter()

    def writes(state: State) -> Callable[[], list[WrittenFile]]:
        def write() -> list[WrittenFile]:
            try:
                raise ValueError(f"while {state} is written")
            except ValueError as error:
                raise OSError(28, "No space left on device", "shard") from error

        return write

    writer.start(tmp_path, writes(state))
    del state
    error = writer.writing(tmp_path).exception(20)
    assert isinstance(error, OSError)
    assert error.strerror == "No space left on device"
    assert "ValueError: while" in "".join(traceback.format_exception(error))
    writer.close()
    gc.collect()
    assert copy() is None


def test_a_rank_computes_on_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch):
    chosen = gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device() == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    chosen = gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2 has no GPU, this host shows 2"):
        rank_device()
    assert chosen == []


class CurrentDevice(threading.local):
    """CUDA's current device, which is GPU 0 in every thread that sets no other."""

    index = 0


def test_every_thread_that_touches_cuda_uses_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    current = CurrentDevice()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))
    monkeypatch.setattr(TorchWorker, "role", "critic", raising=False)
    worker = TorchWorker(ServiceTable(role="critic", address="127.0.0.1:1"), Ranks(0, 1, 0))
    compute = ComputeThread(worker, cast(Any, None), cast(Any, None), lambda call: None)._thread
    writer = BackgroundWriter(worker.prepare_thread)._thread
    indices = [thread.submit(lambda: current.index).result(20) for thread in (compute, writer)]
    for thread in (compute, writer):
        thread.shutdown()
    assert [current.index, *indices] == [1, 1, 1]


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Has torch tell that there are GPUs; returns those that are made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("alone_s", "said"),
    [
        (0.0, "rank 1 failed alone in UpdateActor: RuntimeError: closed"),
        (60.0, "a peer .*; rank 1 failed in Upd"),
    ],
)
def test_a_rank_whose_peer_has_died_does_not_say_that_it_failed_alone(
    alone_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective with a peer that has failed alone breaks when that one leaves."""
    monkeypatch.setattr(compute, "ALONE_S", alone_s)
    ranks = SimpleNamespace(rank=1, size=2, rounds=1)

    def run() -> Any:
        ranks.rounds += 1
        raise RuntimeError("closed")

    def agree(failure: Exception | None, until: float) -> None:
        raise OutOfStep("a peer of rank 1 did not join a collective")

    ranks.agree = agree
    call = SimpleNamespace(method=SimpleNamespace(name="UpdateActor"))
    worker = SimpleNamespace(ranks=ranks, prepare_thread=None)
    thread = ComputeThread(cast(Any, worker), cast(Any, None), cast(Any, None), lambda call: None)
    with pytest.raises(OutOfStep, match=said):
        thread._run_together(cast(Any, call), run)
