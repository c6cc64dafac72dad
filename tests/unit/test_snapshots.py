"""The copy that an update goes back to: on the device where it has room, else in host memory that is allocated once."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_device import DEVICE, Log, pretending
from torch import Tensor

from services.engines import snapshots
from services.engines.base import Snapshot
from services.engines.sharded import snapshot_weights
from services.engines.snapshots import ReusedMemory, SnapshotMemory, own_mapping

NUM_BYTES = 4 * (1000 + 3)


@pytest.fixture
def log() -> Iterator[Log]:
    with pretending() as log:
        yield log


def state() -> dict[str, Tensor]:
    return {"weight.a": torch.arange(1000.0).to(DEVICE), "exp_avg.a": torch.ones(3).to(DEVICE)}


def check(copies: dict[str, Tensor], device: str) -> None:
    assert {x.device.type for x in copies.values()} == {device}
    assert copies["weight.a"].tolist() == list(range(1000))
    assert copies["exp_avg.a"].tolist() == [1.0] * 3


def test_a_copy_stays_on_a_device_with_room_for_it_and_twice_as_much(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, kept = SnapshotMemory(DEVICE), state()
    log.clear()
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 3 * NUM_BYTES)
    copies = memory.copy(kept)
    assert log == Log()
    kept["weight.a"].zero_()
    check(copies, "pretend")
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 3 * NUM_BYTES - 1)
    check(memory.copy(state()), "cpu")


def test_once_a_step_was_taken_its_memory_decides(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SnapshotMemory(DEVICE)
    memory.copy(state())
    for taken, has_room in ((10, True), (700, False), (10, False)):  # the largest so far counts
        monkeypatch.setattr(snapshots, "peak_allocated_bytes", lambda device, taken=taken: taken)
        monkeypatch.setattr(snapshots, "free_bytes", lambda device: NUM_BYTES + 500)
        memory.stepped()
        check(memory.copy(state()), "pretend" if has_room else "cpu")


def test_a_step_before_the_first_copy_does_not_count(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak includes weights and optimizer state, so later copies would leave a device with room for them."""
    memory = SnapshotMemory(DEVICE)
    monkeypatch.setattr(snapshots, "peak_allocated_bytes", lambda device: 100 * NUM_BYTES)
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 3 * NUM_BYTES)
    memory.stepped()
    check(memory.copy(state()), "pretend")


def test_without_room_every_copy_goes_to_the_same_host_memory_one_at_a_time(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 0)
    memory, addresses = SnapshotMemory(DEVICE), []
    for _ in range(3):
        copies = memory.copy(state())
        check(copies, "cpu")
        addresses.append(copies["weight.a"].data_ptr())
        del copies
        gc.collect()
    assert len(set(addresses)) == 1
    first = memory.copy(state())
    second = memory.copy({name: x + 1 for name, x in state().items()})
    check(first, "cpu")
    assert second["exp_avg.a"].tolist() == [2.0] * 3


def test_copies_of_a_cpu_are_memory_of_their_own() -> None:
    memory, kept = SnapshotMemory(torch.device("cpu")), {"weight.a": torch.ones(3)}
    first, second = memory.copy(kept), memory.copy(kept)
    assert first["weight.a"].data_ptr() != second["weight.a"].data_ptr()


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_memory_of_its_own_mapping_is_returned_to_the_system() -> None:
    memory = own_mapping(12_000_001, torch.device("cpu"))
    assert memory.shape == (12_000_001,)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    address = memory.data_ptr()
    assert is_mapped(address)
    del memory
    gc.collect()
    assert not is_mapped(address)
    assert own_mapping(0, torch.device("cpu")).shape == (0,)


def test_copies_one_after_another_are_made_in_the_same_memory_and_two_at_once_are_not() -> None:
    memory = ReusedMemory(torch.device("cpu"))
    first = memory.take(10_000)
    first.fill_(1)
    second = memory.take(10_000)
    second.fill_(2)
    assert first.tolist() == [1] * 10_000
    address = first.data_ptr()
    del first, second
    gc.collect()
    assert memory.take(10_000).data_ptr() == address
    assert memory.take(20_000).shape == (20_000,)


def test_weights_are_written_to_a_snapshot_only_when_it_has_been_copied() -> None:
    """On a GPU that is full, a stream copies it to host memory while the host goes on."""
    finished: list[str] = []
    memory = SnapshotMemory(torch.device("cpu"))
    memory._stream = SimpleNamespace(synchronize=lambda: finished.append("copied"))  # type: ignore[assignment]
    engine: Any = SimpleNamespace(_snapshots=memory, shards=lambda weights: finished.append("given") or {})
    assert list(snapshot_weights(engine, Snapshot(0, {}))) == []
    assert finished == ["copied", "given"]
