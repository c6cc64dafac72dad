"""Tensors on huge pages: which blocks of memory they lie in, and that a move there changes no byte and no address."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nccl_transfer.rows import FetchedRows
from rlhf.v1 import common_pb2
from services.reference.worker import ReferenceWorker
from services.runtime.huge_pages import BLOCK_BYTES, blocks_of, move_to_huge_pages
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallRows
from services.weights import sending
from settings.reference import ReferenceTable

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
LINUX = tuple(int(part) for part in os.uname().release.split(".")[:2])
needs_collapse = pytest.mark.skipif(
    LINUX < (6, 1) or not HUGE_PAGES.exists() or "[never]" in (HUGE_PAGES / "enabled").read_text(),
    reason="the kernel gives no huge pages on request",
)


@pytest.fixture
def layers() -> Sequence[Tensor]:
    """Tensors of one block of memory after the other, as those of a model, most of which torch aligns to no block."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for size in (300_000, 700_000, 1_500_001) * 8]


def huge_kib(addresses: range) -> int:
    """KiB on huge pages of the mappings that begin or end in a range of addresses, or contain it."""
    found, inside = 0, False
    for words in _smaps():
        if "-" in words[0]:
            start, stop = (int(each, 16) for each in words[0].split("-"))
            inside = start < addresses.stop and addresses.start < stop
        elif inside and words[0] == "AnonHugePages:":
            found += int(words[1])
    return found


def _smaps() -> Iterator[list[str]]:
    with open("/proc/self/smaps") as lines:
        yield from map(str.split, lines)


def test_blocks_of_a_tensor_are_all_that_it_touches():
    x = torch.zeros(3 * BLOCK_BYTES // 4)
    first, last = x.data_ptr(), x.data_ptr() + x.nbytes - 1
    assert blocks_of(x) == range(first // BLOCK_BYTES, last // BLOCK_BYTES + 1)
    column = x.view(-1, 1024)[:, 5]
    assert blocks_of(column) == range(
        column.data_ptr() // BLOCK_BYTES, (first + x.nbytes - 4 * (1024 - 5)) // BLOCK_BYTES + 1
    )
    assert len(blocks_of(x[:1])) == 1
    assert not blocks_of(x[:0])
    assert not blocks_of(torch.empty(8, device="meta"))


@needs_collapse
def test_tensors_are_moved_to_huge_pages_in_place(layers: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    before = [(x.data_ptr(), x.clone()) for x in layers]
    move_to_huge_pages(map(blocks_of, layers))
    assert all(
        x.data_ptr() == address and torch.equal(x, value)
        for x, (address, value) in zip(layers, before, strict=True)
    )
    # Blocks at the ends may have other neighbours, which are not mapped.
    addresses = sorted({block for x in layers for block in blocks_of(x)})
    whole = range(addresses[0] * BLOCK_BYTES, (addresses[-1] + 1) * BLOCK_BYTES)
    assert huge_kib(whole) >= 0.8 * sum(x.nbytes for x in layers) / 1024


@needs_collapse
def test_huge_pages_that_the_user_refuses_are_not_used(
    layers: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    blocks = [blocks_of(x) for x in layers]
    addresses = range(
        min(each.start for each in blocks) * BLOCK_BYTES, max(each.stop for each in blocks) * BLOCK_BYTES
    )
    before = huge_kib(addresses)
    move_to_huge_pages(blocks)
    assert huge_kib(addresses) == before


def test_blocks_that_are_not_mapped_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    move_to_huge_pages([range(1, 3)])


@pytest.mark.usefixtures("process_group")
def test_the_weights_that_a_rank_describes_are_moved_once(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    table = {"role": "reference", "address": "127.0.0.1:1", "model": tiny_llama_dir}
    worker = ReferenceWorker(ReferenceTable.model_validate(table), Ranks(0, 1, 0))
    moved: list[range] = []
    monkeypatch.setattr(sending, "move_to_huge_pages", moved.extend)
    none = CallRows(FetchedRows(0, {}, {}, 0), np.empty(0, np.int64))
    for _ in range(2):
        worker.describe_weights(none, None, CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 60))
    assert moved == [blocks_of(shard.tensor) for _, shard in worker.engine.weight_shards()]
