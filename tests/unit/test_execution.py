"""Calls on a rank: responses that it remembers, rows that it fetches and drops, and failures."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from nccl_transfer import fetch
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch, Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.rows import FetchedRows
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.contract import group_methods
from rlhf.errors import CallCancelled, DeadlineExceeded, InvalidRequest, OutOfStep, Refused
from rlhf.v1 import common_pb2, worker_pb2
from services.engines.base import EngineOffloaded
from services.models.tokenizers import vocabulary_hash
from services.reference.worker import ReferenceWorker
from services.roles import language_worker
from services.roles.background import BackgroundWriter
from services.roles.columns import jagged_column
from services.roles.model_worker import ModelWorker
from services.roles.profiler import CallProfiler
from services.roles.state_history import StateHistory
from services.roles.tokenization import MAX_CHARACTERS
from services.runtime import deadlines, ranks, responses
from services.runtime.calls import ActiveCall
from services.runtime.execution import CallQueue
from services.runtime.phases import RankPhase
from services.runtime.ranks import Ranks
from services.runtime.rounds import NOTE_LENGTH
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reference import ReferenceTable

Stored = tuple[TensorStore, fetch.Fetcher, Column]

TABLE = ReferenceTable(role="reference", address="127.0.0.1:1", model=Path())


class Reference(Worker):
    """Has a result for rows without a negative number, and holds none of them."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        values = cast(Jagged[np.ndarray], rows["prompt_ids"]).values
        if values.min() < 0:
            raise InvalidRequest("a negative number")
        return CallResult(metrics={"sum": (float(values.sum()), 1.0)})


class Talkative(Worker):
    """Has responses of about 100 KiB."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult(metrics={"x" * (100 << 10): (1.0, 1.0)})


class Writer(Worker):
    """Adds to its rows in place."""

    role = "reference"
    writes_to_rows = True

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        values = cast(Jagged[np.ndarray], rows["prompt_ids"]).values
        values += 1
        return CallResult(metrics={"sum": (float(values.sum()), 1.0)})


class ReadingWriter(Writer):
    """Writes to rows although it said it would not."""

    writes_to_rows = False


class OffloadedReference(ModelWorker):
    """Its engine is not on the device, on any rank."""

    role = "reference"

    def __init__(self, table: ReferenceTable, ranks: Ranks) -> None:
        Worker.__init__(self, table, ranks)
        self._history = StateHistory("")
        self.torch_device = torch.device("cpu")
        self._profiler = CallProfiler()
        self._writer = BackgroundWriter()

    def prepare_thread(self) -> None:
        """As it is."""

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        raise EngineOffloaded("the engine is offloaded; bring it back first")


class TensorReference(OffloadedReference):
    """Tells whether tensors are the memory that rows were mapped to."""

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        array = cast(Jagged[np.ndarray], rows["prompt_ids"]).values
        tensor = jagged_column(rows, "prompt_ids").values
        return CallResult(metrics={"same memory": (float(tensor.data_ptr() == array.ctypes.data), 1.0)})


class EchoedRound:
    """A round in which the peer says what this rank says."""

    def __init__(self, note: Sequence[float]) -> None:
        self._notes = [[*note, *[0] * (NOTE_LENGTH - len(note))]] * 2

    def wait(self, until: float) -> list[list[float]]:
        return self._notes

    async def arrive(self) -> list[list[float]]:
        return self._notes


class MetRanks(Ranks):
    """Ranks whose peer is always where this one is."""

    def begin_round(self, note: Sequence[float]) -> Any:
        self.rounds += 1
        return EchoedRound(note)


class WatchedFetcher(fetch.Fetcher):
    """Knows whether the rows of its last fetch are still there."""

    def __init__(self) -> None:
        super().__init__("", [])

    def fetch(self, *arguments: Any, **options: Any) -> FetchedRows:
        rows = super().fetch(*arguments, **options)
        self.last = weakref.ref(rows)
        return rows


async def call(
    queue: CallQueue, call_id: str, number: int, *, sequence: int = 0, timeout_s: float = 10, started: int = 0
) -> Any:
    """The response to a call with one row of one number, of a session that has started then; raises what the call
    fails with."""
    column = LocalColumn(Jagged(np.array([number]), np.array([1])))
    return await call_with(queue, call_id, column, sequence=sequence, timeout_s=timeout_s, started=started)


async def call_with(
    queue: CallQueue,
    call_id: str,
    prompt_ids: Column,
    *,
    sequence: int = 0,
    timeout_s: float = 10,
    started: int = 0,
) -> Any:
    """The response to a call with this column; raises what the call fails with."""
    method = group_methods("reference")["compute_ref_log_prob"]
    batch = Batch(prompt_ids.rows, {"prompt_ids": prompt_ids})
    header = common_pb2.Call(call_id=call_id, sequence=sequence, session_started_unix_ns=started)
    request = cast(Any, method.request)(call=header, batch=wire.to_proto(batch), temperature=1.0)
    registration = cast(Any, Reference.compute_ref_log_prob).registration
    return await queue.start(method, registration, request, timeout_s)


def test_results_are_remembered_up_to_a_size_and_the_newest_always(monkeypatch: pytest.MonkeyPatch) -> None:
    async def remembered(queue: CallQueue, calls: int) -> list[int]:
        for number in range(calls):
            await call(queue, f"call {number}", 7)
        return [number for number in range(calls) if queue.knows(f"call {number}")]

    async def main() -> None:
        store = TensorStore(1 << 16)
        queues = [CallQueue(Talkative(TABLE, Ranks(0, 1, 1)), store, fetch.Fetcher("", [])) for _ in range(2)]
        assert await remembered(queues[0], 200) == list(range(37, 200))  # 16 MiB
        monkeypatch.setattr(responses, "REMEMBERED_BYTES", 1000)
        assert await remembered(queues[1], 3) == [2]
        for queue in queues:
            await queue.drain()

    asyncio.run(main())


async def is_gone(fetcher: WatchedFetcher) -> None:
    """Waits until the last rows are freed: their thread may hold them for a moment after the call has ended."""
    give_up = time.monotonic() + 10
    while gc.collect() >= 0 and fetcher.last() is not None:
        assert time.monotonic() < give_up, "rows are kept"
        await asyncio.sleep(0.01)


def test_a_call_that_has_ended_is_remembered_without_its_rows() -> None:
    store, fetcher = TensorStore(1 << 16), WatchedFetcher()
    store.endpoint = Endpoint("here")

    async def main() -> None:
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), store, fetcher)
        first = await call(queue, "good", 7)
        await is_gone(fetcher)
        assert await call(queue, "good", 7) is first
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="a negative number"):
                await call(queue, "bad", -7)
            await is_gone(fetcher)
        await queue.drain()

    asyncio.run(main())
    fetcher.close()
    store.close()


@pytest.fixture
def stored() -> Iterator[Stored]:
    """A store with a column of two rows of one number, and who fetches from it."""
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")
    fetcher = fetch.Fetcher("", [], store)
    yield (
        store,
        fetcher,
        store.put_column(Jagged(np.array([1, 2]), np.array([1, 1])), "int64", Lease("session", 1)),
    )
    fetcher.close()
    store.close()


def test_a_method_may_write_to_its_rows_where_its_worker_says_so_and_nobody_else_sees_it(
    stored: Stored,
) -> None:
    store, fetcher, column = stored

    async def main() -> None:
        queue = CallQueue(Writer(TABLE, Ranks(0, 1, 1)), store, fetcher)
        for call_id in ("first", "second"):
            response = await call_with(queue, call_id, column)
            assert response.outcome.metrics["sum"].sum == 5.0
        await queue.drain()
        queue = CallQueue(ReadingWriter(TABLE, Ranks(0, 1, 1)), store, fetcher)
        with pytest.raises(ValueError, match="read-only"):
            await call_with(queue, "third", column)
        await queue.drain()

    asyncio.run(main())


def test_tensors_of_model_roles_are_no_copies(stored: Stored) -> None:
    store, fetcher, column = stored

    async def main() -> None:
        queue = CallQueue(TensorReference(TABLE, MetRanks(0, 1, 1)), store, fetcher)
        response = await call_with(queue, "first", column)
        assert response.outcome.metrics["same memory"].sum == 1.0
        await queue.drain()

    asyncio.run(main())


def test_a_call_to_an_offloaded_engine_is_refused_by_ranks_that_stay() -> None:
    store, fetcher = TensorStore(1 << 16), WatchedFetcher()
    store.endpoint = Endpoint("here")
    table = ReferenceTable(role="reference", address="127.0.0.1:1", ranks=2, model=Path())

    async def main() -> None:
        queue = CallQueue(OffloadedReference(table, MetRanks(0, 2, 1)), store, fetcher)
        with pytest.raises(Refused, match="the engine is offloaded; bring it back first"):
            await call(queue, "early", 7, sequence=1)
        await queue.drain()

    asyncio.run(main())
    fetcher.close()
    store.close()


def test_the_vocabulary_is_hashed_once_and_not_for_each_describe(
    process_group: None, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ReferenceTable(role="reference", address="localhost:1", model=tiny_llama_dir, matmul="mkl")
    worker = ReferenceWorker(table, MetRanks(0, 1, 1))
    expected = vocabulary_hash(worker.tokenizer)
    monkeypatch.setattr(language_worker, "vocabulary_hash", lambda tokenizer: pytest.fail("hashed again"))
    assert worker.describe().vocabulary_hash == expected


def test_an_id_is_of_one_call_and_no_longer_than_what_is_remembered() -> None:
    store = TensorStore(1 << 16)

    async def main() -> None:
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), store, fetch.Fetcher("", []))
        await call(queue, "one", 7)
        method = group_methods("reference")["synchronize"]
        request = cast(Any, method.request)(call=common_pb2.Call(call_id="one"))
        with pytest.raises(
            InvalidRequest, match="Synchronize: call id one belongs to a call of another method"
        ):
            queue.start(method, cast(Any, Reference.synchronize).registration, request, 10)
        request.call.call_id, request.call.session = "two", "other"
        await queue.start(method, cast(Any, Reference.synchronize).registration, request, 10)
        request.call.session = "another"
        with pytest.raises(
            InvalidRequest, match="call id two belongs to a call of another method or session"
        ):
            queue.start(method, cast(Any, Reference.synchronize).registration, request, 10)
        for field in ("call_id", "session"):
            long = cast(Any, method.request)()
            setattr(long.call, field, "i" * (1 << 20))
            with pytest.raises(
                InvalidRequest, match=f"call.{field} has 1048576 characters; at most 256"
            ) as told:
                queue.start(method, cast(Any, Reference.synchronize).registration, long, 10)
            assert len(str(told.value)) < 200
        await queue.drain()

    asyncio.run(main())
    store.close()


def test_a_time_to_answer_has_an_end() -> None:
    assert deadlines.time_to_answer(2.0) == 1.8
    assert deadlines.time_to_answer(1e300) < 3e6


def test_a_directory_that_is_no_path_is_refused() -> None:
    worker = Reference(TABLE, Ranks(0, 1, 1))
    worker.output_roots = (Path("/"),)
    for directory in ("a\0b", "/" + "x" * 300, "/x" * 4_000):
        with pytest.raises(InvalidRequest, match=r"^directory: .* is no path: ") as told:
            worker.output_path(directory)
        assert len(str(told.value)) < 500


def test_a_directory_in_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    worker = Reference(TABLE, Ranks(0, 1, 1))
    worker.output_roots = (tmp_path.resolve(),)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for directory in (tmp_path / "a", tmp_path / "a" / "step-1"):
        with pytest.raises(InvalidRequest, match=rf"^directory: '{directory}' is no path: "):
            worker.output_path(str(directory))


def test_texts_are_tokenized_as_by_the_tokenizer_unless_one_is_longer_than_any_that_fits(
    process_group: None, tiny_llama_dir: Path
) -> None:
    table = ReferenceTable(role="reference", address="localhost:1", model=tiny_llama_dir, matmul="mkl")
    worker = ReferenceWorker(table, MetRanks(0, 1, 1))
    call = CallContext(common_pb2.Call(), deadline=time.monotonic() + 60)
    texts = [f"{number}+1=" for number in range(200)]
    assert worker.tokenized(texts, call) == worker.tokenizer(texts)["input_ids"]
    assert worker.tokenized([], call) == []
    with pytest.raises(InvalidRequest, match=f"a text has {MAX_CHARACTERS + 1} characters"):
        worker.tokenized(["1", "1" * (MAX_CHARACTERS + 1)], call)
    call.cancelled = True
    with pytest.raises(CallCancelled):
        worker.tokenized(texts, call)


class Saving(Worker):
    """Has a row for each call."""

    role = "reference"

    @register("3D_PROTO")
    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        return CallResult({"ref_log_probs": np.zeros((rows.count, 3), np.float32)})


def test_a_rank_tells_that_it_stores_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[int] = []
    change = RankPhase.set

    def note(self: RankPhase, phase: worker_pb2.Phase, active: ActiveCall | None) -> None:
        change(self, phase, active)
        phases.append(phase)

    monkeypatch.setattr(RankPhase, "set", note)
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")

    async def main() -> None:
        queue = CallQueue(Saving(TABLE, Ranks(0, 1, 1)), store, fetch.Fetcher("", []))
        await call(queue, "one", 7)

    asyncio.run(main())
    store.close()
    assert phases == [
        worker_pb2.PHASE_FETCHING, worker_pb2.PHASE_COMPUTING, worker_pb2.PHASE_STORING, worker_pb2.PHASE_IDLE,
    ]  # fmt: skip


def test_the_rows_of_a_session_that_begins_again_are_kept() -> None:
    """A controller ends its session and begins it again, with the same name, on ranks that it could not reach."""
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("here")

    async def main() -> None:
        queue = CallQueue(Saving(TABLE, Ranks(0, 1, 1)), store, fetch.Fetcher("", []))
        for name in ("before", "again"):
            await call(queue, name, 7, sequence=1)
            assert store.stat().shards == 1
            queue.sessions.end("")
            assert store.stat().shards == 0

    asyncio.run(main())
    store.close()


def test_a_late_call_of_a_session_that_has_begun_again_takes_no_number_of_it() -> None:
    """As one that the kernel of a controller's host has sent again over the connection of before."""

    async def main() -> None:
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), TensorStore(1 << 16), fetch.Fetcher("", []))
        await call(queue, "before", 7, sequence=1, started=5)
        queue.sessions.end("")
        await call(queue, "again", 7, sequence=1, started=6)
        with pytest.raises(Refused, match=r"session '' has begun again: .* 5, is before its own, 6"):
            await call(queue, "late", 7, sequence=2, started=5)
        await call(queue, "next", 7, sequence=2, started=6)

    asyncio.run(main())


class HeldFetcher(fetch.Fetcher):
    """Hangs on the rows of its first fetch, as on those of a rank that has stopped."""

    def __init__(self) -> None:
        super().__init__("", [])
        self.begun, self.released = threading.Event(), threading.Event()

    def fetch(self, *arguments: Any, **options: Any) -> FetchedRows:
        if not self.begun.is_set():
            self.begun.set()
            assert self.released.wait(20)
        return super().fetch(*arguments, **options)


def test_a_cancelled_call_whose_fetch_hangs_holds_up_no_call_behind_it() -> None:
    fetcher = HeldFetcher()

    async def main() -> None:
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), TensorStore(1 << 16), fetcher)
        hanging, behind = (asyncio.ensure_future(call(queue, name, 7)) for name in ("hanging", "behind"))
        await asyncio.to_thread(fetcher.begun.wait, 20)
        assert queue.cancel("hanging")
        with pytest.raises(CallCancelled):
            await hanging
        assert (await behind).outcome.metrics["sum"].sum == 7.0
        fetcher.released.set()
        await queue.drain()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_transport_that_keeps_no_deadline_holds_up_its_call_until_the_deadline_alone() -> None:
    fetcher = HeldFetcher()

    async def main() -> None:
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), TensorStore(1 << 16), fetcher)
        hanging = asyncio.ensure_future(call(queue, "hanging", 7, sequence=1, timeout_s=0.3))
        behind = asyncio.ensure_future(call(queue, "behind", 7, sequence=2))
        with pytest.raises(
            DeadlineExceeded, match="ComputeRefLogProb: its rows were not there by its deadline"
        ):
            await hanging
        assert (await behind).outcome.metrics["sum"].sum == 7.0
        fetcher.released.set()
        await queue.drain()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_second_call_by_the_number_of_one_that_has_not_ended_is_refused() -> None:
    fetcher = HeldFetcher()

    async def main() -> None:
        store = TensorStore(1 << 16)
        queue = CallQueue(Reference(TABLE, Ranks(0, 1, 1)), store, fetcher)
        first = asyncio.ensure_future(call(queue, "first", 7, sequence=1))
        await asyncio.to_thread(fetcher.begun.wait, 20)
        with pytest.raises(Refused, match="sequence 1 of session '' is another call's"):
            await call(queue, "second", 7, sequence=1)
        fetcher.released.set()
        await first
        await queue.drain()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_rank_that_does_not_tell_where_it_serves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RENDEZVOUS_TIMEOUT_S", 0.1)
    mine = Ranks(1, 3, 1)
    mine.store = HashStore()
    mine.store.set("rank/0", "{}")
    with pytest.raises(OutOfStep, match=r"rank 1 waited 0\.1 s for its peers; missing: \[2\]"):
        mine.exchange(Endpoint("here"), {})


class Cancelling(Reference):
    """A worker whose method raises CancelledError."""

    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        raise asyncio.CancelledError


class Exiting(Reference):
    """A worker whose method calls sys.exit."""

    def compute_ref_log_prob(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        sys.exit(3)


@pytest.mark.parametrize(("worker", "name"), [(Cancelling, "CancelledError"), (Exiting, "SystemExit")])
def test_a_method_that_cancels_or_exits_fails_its_call_alone(worker: type[Reference], name: str) -> None:
    async def ask() -> None:
        store = TensorStore(1 << 16)
        queue = CallQueue(worker(TABLE, Ranks(0, 1, 1)), store, fetch.Fetcher("", []))
        with pytest.raises(RuntimeError, match=f"raised {name}"):
            await asyncio.wait_for(call(queue, "a", 1), 20)
        await queue.drain()

    asyncio.run(ask())
