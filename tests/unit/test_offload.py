"""Copies between a GPU and host memory: pinned, enqueued one after another, and waited for once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.engines import offload
from services.engines.offload import OffloadedStorage, bring_back, copy_to_host
from services.engines.snapshots import in_host_memory

GPU = torch.device("cuda", 1)


class Storage:
    """Storage that says where it is, and notes what is done with it."""

    def __init__(self, events: list[str], device: torch.device) -> None:
        self.events, self.device = events, device

    def nbytes(self) -> int:
        return 64

    def data_ptr(self) -> int:
        return id(self)

    def resize_(self, nbytes: int) -> None:
        self.events.append(f"resize {nbytes}")

    def copy_(self, source: object, non_blocking: bool = False) -> None:
        self.events.append("enqueue" if non_blocking else "copy")

    def untyped_storage(self) -> Storage:
        return self

    def numel(self) -> int:
        return 16


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events on a simulated GPU, in order."""
    events: list[str] = []

    def empty(size: Any, pin_memory: bool = False, **_: Any) -> Any:
        events.append("pinned" if pin_memory else "pageable")
        return Storage(events, torch.device("cpu"))

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: events.append(f"wait for {device}"))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return events


def test_an_engine_leaves_its_gpu_with_one_wait(events: list[str]):
    tensors = [Storage(events, GPU) for _ in range(3)]
    offloaded = copy_to_host(cast(Any, tensors))
    assert events == [*["pinned"] * 3, *["enqueue"] * 3, "wait for cuda:1"]
    events.clear()
    bring_back(offloaded)
    assert events == [*["resize 64"] * 3, *["enqueue"] * 3, "wait for cuda:1"]


def test_nothing_is_pinned_or_waited_for_on_a_cpu(events: list[str]):
    copy_to_host(cast(Any, [Storage(events, torch.device("cpu"))]))
    assert events == ["pageable", "enqueue"]


def test_a_copy_that_fails_leaves_the_storage_freed(events: list[str]):
    storage, host = (Storage(events, device) for device in (GPU, torch.device("cpu")))

    def fail(source: object, non_blocking: bool = False) -> None:
        raise RuntimeError("out of memory")

    storage.copy_ = fail
    with pytest.raises(RuntimeError):
        bring_back([OffloadedStorage(cast(Any, storage), cast(Any, host))])
    assert events == ["resize 64", "resize 0"]


def test_copies_of_a_checkpoint_are_waited_for_once(events: list[str]):
    class Tensor(Storage):
        shape, dtype, is_cuda = (4, 4), torch.float32, True

        def detach(self) -> Tensor:
            return self

    in_host_memory(cast(Any, {name: Tensor(events, GPU) for name in "ab"}))
    assert events == ["pinned", "enqueue", "pinned", "enqueue", "wait for cuda:1"]


def test_bytes_are_the_same_after_leaving_and_coming_back():
    x = torch.arange(10.0)
    before = x.clone()
    offloaded = copy_to_host([x, x[2:4]])
    offload.free(offloaded)
    assert x.untyped_storage().nbytes() == 0
    bring_back(offloaded)
    assert torch.equal(x, before)
