"""The tensor store: allocation, leases, stale references, and the arena's seals."""

import errno
import fcntl
import gc
import itertools
import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store import arena
from nccl_transfer.store.arena import ALIGNMENT, COPIED_BYTES, ArenaReader
from nccl_transfer.store.free_list import FreeList
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.errors import OutOfSpace, Refused, TransferError

ENDPOINT = Endpoint("127.0.0.1:7001", "host", 3, "actor", 0)
LEASE = Lease("run", 1)


def new_store(nbytes: int = 1 << 20) -> TensorStore:
    store = TensorStore(nbytes)
    store.endpoint = ENDPOINT
    return store


def arenas_open() -> int:
    """Descriptors and mappings of arenas in this process."""
    gc.collect()
    descriptors = [str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir()]
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return sum("rlhf-arena" in line for line in descriptors + mappings)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.randoms()), max_size=60))
def test_allocations_never_overlap_and_gaps_are_what_is_left(steps):
    """A naive map of which byte belongs to whom says the same as the free list after every step."""
    total = 100
    owners: list[int | None] = [None] * total
    free, live = FreeList(total), {}
    for number, (size, give_back, random) in enumerate(steps):
        if give_back and live:
            victim = random.choice(sorted(live))
            free.free(*live[victim])
            owners = [None if owner == victim else owner for owner in owners]
            del live[victim]
        else:
            fits = [
                at for at in range(total - size + 1) if not any(o is not None for o in owners[at : at + size])
            ]
            offset = free.allocate(size)
            assert offset == (fits[0] if fits else None)
            if offset is not None:
                owners[offset : offset + size] = [number] * size
                live[number] = (offset, size)
        gaps = itertools.groupby(owners, lambda owner: owner is None)
        assert free.largest == max((len(list(gap)) for is_free, gap in gaps if is_free), default=0)
    for block in live.values():
        free.free(*block)
    assert free.allocate(total) == 0, "all gaps are joined again"


class StoreAgainstDict(RuleBasedStateMachine):
    """Random puts and releases; a dictionary of copies is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store(16 << 10)
        self.kept: dict[int, tuple[Lease, np.ndarray, Shard]] = {}
        self.released: list[Shard] = []
        self.seed = 0

    @rule(nbytes=st.integers(0, 3000), session=st.sampled_from("ab"), step=st.integers(0, 3))
    def put(self, nbytes, session, step):
        self.seed += 1
        array = np.random.default_rng(self.seed).integers(0, 256, nbytes, dtype=np.uint8)
        lease = Lease(session, step)
        try:
            shard = self.store.put(array, lease)
        except OutOfSpace:
            return
        assert shard.offset % ALIGNMENT == 0
        self.kept[shard.id] = (lease, array, shard)

    @rule(session=st.sampled_from("ab"), steps=st.none() | st.sets(st.integers(0, 3)))
    def release(self, session, steps):
        before = self.store.stat().used_bytes
        freed = self.store.release(session, steps)
        gone = [
            number
            for number, (lease, _, _) in self.kept.items()
            if lease.session == session and (steps is None or lease.step in steps)
        ]
        assert freed == sum(ALIGNMENT + -(-self.kept[n][1].nbytes // 64) * 64 for n in gone)
        assert self.store.stat().used_bytes == before - freed
        self.released += [self.kept.pop(number)[2] for number in gone]

    @invariant()
    def kept_shards_hold_their_bytes(self):
        for number, (_, array, shard) in self.kept.items():
            assert self.store.read_bytes(number, 0, array.nbytes) == array.tobytes()
            self.store.reader.check([shard])
        assert self.store.stat().shards == len(self.kept)

    @invariant()
    def released_shards_are_stale(self):
        for shard in self.released:
            with pytest.raises(Refused, match="was released"):
                self.store.reader.check([shard])

    def teardown(self):
        for session in "ab":
            self.store.release(session)
        assert self.store.stat().used_bytes == 0
        largest = self.store.stat().arena_bytes - ALIGNMENT
        self.store.put(np.zeros(largest, np.uint8), LEASE)
        self.store.close()


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(4, 6).T,
        np.arange(24)[::-2],
        np.broadcast_to(np.float32(7), (3, 5)),
        np.arange(6, dtype=">i4"),
        np.zeros((0, 3), np.float16),
        np.array([True, False, True]),
    ],
    ids=["transposed", "reversed", "broadcast", "big-endian", "empty", "bool"],
)
def test_put_stores_row_major_little_endian_bytes(array):
    store = new_store()
    shard = store.put(array, LEASE)
    little_endian = array.astype(array.dtype.newbyteorder("<"))
    assert store.read_bytes(shard.id, 0, shard.nbytes) == little_endian.tobytes(order="C")


def test_a_shard_is_filled_in_place():
    store = new_store()

    def write(memory):
        memory[:] = b"hello"

    shard = store.fill(5, LEASE, write)
    assert store.read_bytes(shard.id, 1, 3) == b"ell"


def test_a_shard_that_could_not_be_filled_is_given_back():
    store = new_store()
    with pytest.raises(ZeroDivisionError):
        store.fill(5, LEASE, lambda memory: memory.__setitem__(1 // 0, 1))
    assert store.stat().used_bytes == 0


def test_the_bytes_of_a_shard_released_while_it_is_filled_are_not_reused_before_the_writer_is_done():
    store = new_store()
    others = []

    def write(memory):
        store.release(LEASE.session)
        others.append(store.put(np.zeros(5, np.uint8), Lease("another", 1)))
        memory[:] = b"hello"

    with pytest.raises(Refused, match="was released while"):
        store.fill(5, LEASE, write)
    assert store.read_bytes(others[0].id, 0, 5) == bytes(5)


def test_a_session_that_has_ended_keeps_nothing_more():
    store = new_store()
    store.put(np.zeros(5, np.uint8), LEASE)
    store.end(LEASE.session)
    with pytest.raises(Refused, match="the session has ended"):
        store.put(np.zeros(5, np.uint8), LEASE)
    assert store.stat().used_bytes == 0


def test_out_of_space_says_sizes_and_the_key_that_raises_it():
    store = new_store(1 << 20)
    store.put(np.zeros(512 << 10, np.uint8), LEASE)
    with pytest.raises(OutOfSpace) as caught:
        store.put(np.zeros(600 << 10, np.uint8), LEASE)
    assert str(caught.value) == (
        "actor rank 0 at 127.0.0.1:7001: 0.6 MiB do not fit into the arena of 1.0 MiB, of which 0.5 MiB are in use "
        "and 0.5 MiB are free in one piece: raise arena_mb"
    )
    assert store.stat().shards == 1


def test_an_arena_larger_than_the_memory_available_is_refused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(
        OutOfSpace, match=r"an arena of 2.0 MiB does not fit into 1.0 MiB of memory: lower arena_mb"
    ):
        TensorStore(2 << 20)


def test_an_arena_the_kernel_cannot_reserve_is_refused_and_leaves_no_descriptor(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arena.os, "posix_fallocate", full)
    before = arenas_open()
    with pytest.raises(OutOfSpace, match="No space left on device"):
        TensorStore(1 << 20)
    assert arenas_open() == before


def test_peak_is_the_most_ever_in_use():
    store = new_store()
    store.put(np.zeros(1000, np.uint8), LEASE)
    store.put(np.zeros(1000, np.uint8), LEASE)
    store.release("run")
    stat = store.stat()
    assert (stat.used_bytes, stat.peak_bytes) == (0, 2 * (64 + 1024))


def test_ids_are_never_used_again():
    store = new_store()
    seen = set()
    for _ in range(5):
        seen.add(store.put(np.zeros(8), LEASE).id)
        store.release("run")
    assert len(seen) == 5


def test_reading_a_released_shard_is_refused():
    store = new_store()
    shard = store.put(np.zeros(8), LEASE)
    store.release("run")
    for read in (store.view, store.read_bytes):
        with pytest.raises(Refused, match=f"shard {shard.id} was released"):
            read(shard.id, 0, 8)


def test_a_reference_stays_stale_when_its_place_is_taken_again():
    store = new_store()
    old = store.put(np.zeros(8), LEASE)
    store.release("run")
    new = store.put(np.ones(8), LEASE)
    assert new.offset == old.offset
    with pytest.raises(Refused, match=f"shard {old.id} was released"):
        store.reader.check([old])


def test_a_read_beyond_a_shard_is_refused():
    store = new_store()
    shard = store.put(np.zeros(8), LEASE)
    with pytest.raises(TransferError, match="beyond"):
        store.read_bytes(shard.id, 60, 8)


def test_the_owner_reads_through_the_mapping_it_has():
    store = new_store()
    shard = store.put(np.zeros(16, np.uint8), LEASE)
    before = arenas_open()
    (view,) = store.reader.views([ByteRange(shard, 0, 16)])
    store.reader.check([shard])
    assert arenas_open() == before
    assert bytes(view) == bytes(16)


def test_views_are_read_only():
    store = new_store()
    shard = store.put(np.zeros(16, np.uint8), LEASE)
    (view,) = store.reader.views([ByteRange(shard, 0, 16)])
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize("nbytes", [16, COPIED_BYTES + 1])
def test_what_a_reader_writes_into_its_private_view_nobody_else_sees(nbytes):
    store = new_store(4 << 20)
    shard = store.put(np.zeros(nbytes, np.uint8), LEASE)
    (view,) = store.reader.private_views([ByteRange(shard, 0, nbytes)])
    view[:] = b"x" * nbytes
    (again,) = store.reader.private_views([ByteRange(shard, 0, nbytes)])
    (read_only,) = store.reader.views([ByteRange(shard, 0, nbytes)])
    assert bytes(again) == bytes(read_only) == bytes(nbytes)
    assert store.read_bytes(shard.id, 0, 16) == bytes(16)


def test_what_was_read_of_an_arena_that_was_closed_cannot_be_verified():
    store = new_store()
    shard = store.put(np.zeros(16, np.uint8), LEASE)
    store.close()
    with pytest.raises(Refused, match="the arena was closed"):
        store.reader.check([shard])


def test_a_peer_reads_what_it_has_mapped_of_a_rank_that_has_left():
    """Rows were not released: a call that reads them goes on, and the next call on the rank finds it lost."""
    store = new_store()
    shard = store.put(np.arange(16, dtype=np.uint8), LEASE)
    peer = ArenaReader.of_peer(os.dup(store.reader.fd), store.reader.nbytes, store.reader.nonce)
    peer.check([shard])
    store.close()
    peer.check([shard])
    (view,) = peer.views([ByteRange(shard, 0, 16)])
    assert bytes(view) == bytes(range(16))


def test_the_arena_can_be_neither_resized_nor_written_to_through_its_descriptor():
    store = new_store()
    fd, size = store.reader.fd, store.reader.nbytes
    for forbidden in (
        lambda: os.ftruncate(fd, size // 2),
        lambda: os.ftruncate(fd, size * 2),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            forbidden()


def test_a_lease_released_while_its_shard_is_written_gives_nobody_else_that_place_before_the_writer_is_done(
    monkeypatch,
):
    store = new_store()
    copying, go_on = threading.Event(), threading.Event()
    copyto = np.copyto

    def slow_copy(target, source):
        copying.set()
        assert go_on.wait(10)
        copyto(target, source)

    errors = []

    def write():
        try:
            store.put(np.full(64, 7, np.uint8), Lease("old", 1))
        except Refused as error:
            errors.append(str(error))

    monkeypatch.setattr(np, "copyto", slow_copy)
    writer = threading.Thread(target=write)
    writer.start()
    assert copying.wait(10)
    store.release("old")
    monkeypatch.undo()
    other = store.put(np.zeros(64, np.uint8), Lease("new", 1))
    go_on.set()
    writer.join(10)
    assert store.read_bytes(other.id, 0, 64) == bytes(64)
    assert errors
    assert "was released while" in errors[0]
    assert store.release("new") == store.stat().peak_bytes // 2
    assert store.stat().used_bytes == 0


def test_puts_and_releases_from_many_threads_keep_every_byte():
    store = new_store(1 << 20)
    failures = []

    def work(number):
        for step in range(40):
            array = np.full(1 + 100 * number + step, number, np.uint8)
            shard = store.put(array, Lease(f"run {number}", step))
            if store.read_bytes(shard.id, 0, shard.nbytes) != array.tobytes():
                failures.append((number, step))
            store.release(f"run {number}", {step})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert store.stat().used_bytes == 0


def test_closing_gives_descriptors_and_mappings_back_but_views_stay_good():
    before = arenas_open()
    store = new_store()
    shard = store.put(np.arange(4, dtype=np.uint8), LEASE)
    (view,) = store.reader.views([ByteRange(shard, 0, 4)])
    (private,) = store.reader.private_views([ByteRange(shard, 0, 4)])
    store.close()
    assert bytes(view) == bytes(private) == bytes(range(4))
    del view, private
    assert arenas_open() == before
