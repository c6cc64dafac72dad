"""Columns of floats stay on the device from rollout to update; what crosses to the host and back is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import RowShapes
from pretend_device import DEVICE, Copy, Log, pretending
from unit.one_rank import NEW_TOKENS, SCHEDULE, OneRank

from services.compute.microbatch import MicroBatch, pack, to_device
from services.compute.sequence_parallel import SequenceRanks
from services.engines.three_d.engine import ThreeDParallelEngine

pytestmark = pytest.mark.usefixtures("process_group")


def columns_among(copies: list[Copy]) -> list[Copy]:
    """Copies of floats that are more than the metrics of an update."""
    return [copy for copy in copies if copy.dtype.is_floating_point and copy.numel > 12]


@pytest.fixture(scope="module")
def pretend(process_group: None, tiny_llama_dir: Path) -> Iterator[tuple[OneRank, Log]]:
    """Ranks on a pretend device, which have generated once: their rollout engine has weights."""
    with pretending() as log:
        ranks = OneRank(tiny_llama_dir, log)
        ranks.generate()
        yield ranks, log
        ranks.close()


def check_numbers(on_cpu: OneRank, on_device: OneRank) -> None:
    """An iteration of PPO has the same numbers on both, and so has a generation with the new weights."""
    on_cpu.generate()
    for expected, measured in zip(on_cpu.iteration(), on_device.iteration(), strict=True):
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for ranks in (on_cpu, on_device):
        ranks.generate()  # with the new weights
    ids, other_ids = (ranks.read("response_ids").values.tolist() for ranks in (on_cpu, on_device))
    assert ids == other_ids
    for worker, other in ((on_cpu.actor, on_device.actor), (on_cpu.critic, on_device.critic)):
        expected = dict(worker.engine.full_tensors())
        for name, x in other.engine.full_tensors():
            assert x.device == DEVICE
            np.testing.assert_allclose(np.array(x.tolist()), expected[name].detach(), rtol=1e-3, atol=1e-4)
    on_cpu.close()


MINI_BATCHES = SCHEDULE.epochs * SCHEDULE.mini_batches
BUDGETS = {
    # Prompts and random numbers, and the places of the response tokens; lengths, and the token ids.
    "generate": (2, 2),
    # The layout of all micro-batches; the differences to the rollout engine, three numbers.
    "log_probs": (1, 1),
    "values": (1, 0),
    # Of each mini-batch, the layout of its micro-batches; its metrics.
    "update_critic": (MINI_BATCHES, MINI_BATCHES),
    "update_actor": (MINI_BATCHES, MINI_BATCHES),
}
"""Copies of each call to the device and to the host, where all columns of floats are on the device."""


def check_budgets(ranks: OneRank, log: Log) -> None:
    """No column of floats crosses between host and device, but for those of the host, and no copy is beyond BUDGETS."""

    def check(name: str, extra: int = 0) -> None:
        log.clear()
        getattr(ranks, name)()
        assert columns_among(log.to_device) == columns_among(log.to_host) == []
        to_device, to_host = BUDGETS[name]
        assert (len(log.to_device), len(log.to_host)) == (to_device + extra, to_host), f"{name}: {log}"

    copied_bytes = ranks.store.stat().host_copied_bytes
    for name in ("generate", "log_probs", "values"):
        check(name)
    assert len(log.waits) <= 2 * MINI_BATCHES, log.waits
    for name in ("values", "log_probs", "rollout_log_probs"):
        assert ranks.is_on_device(name)
    assert not ranks.is_on_device("response_ids")
    assert ranks.store.stat().host_copied_bytes == copied_bytes
    ranks.advantages()
    assert ranks.store.stat().host_copied_bytes == copied_bytes + ranks.columns["values"].nbytes
    copied_bytes = ranks.store.stat().host_copied_bytes
    check("update_critic", extra=1)  # all columns of the host reach the update in one copy
    for name in ("advantages", "returns"):
        ranks.move(name)
    for name in ("update_critic", "update_actor"):
        check(name)
        assert len(log.waits) <= 2 * MINI_BATCHES, log.waits
    assert ranks.store.stat().host_copied_bytes == copied_bytes


def test_ppo_on_a_device_ends_with_the_numbers_of_the_cpu(
    tiny_llama_dir: Path, pretend: tuple[OneRank, Log]
) -> None:
    check_numbers(OneRank(tiny_llama_dir), pretend[0])


def test_from_rollout_to_update_no_column_of_floats_leaves_the_device(pretend: tuple[OneRank, Log]) -> None:
    check_budgets(*pretend)


@pytest.mark.slow
def test_so_it_is_with_engine_3d(process_group: None, tiny_llama_dir: Path) -> None:
    keys: dict[str, Any] = {"engine": "3d", "mesh": "1-1-1"}
    with pretending() as log:
        ranks = OneRank(tiny_llama_dir, log, **keys)
        assert isinstance(ranks.actor.engine, ThreeDParallelEngine)
        assert isinstance(ranks.critic.engine, ThreeDParallelEngine)
        ranks.generate()
        check_budgets(ranks, log)
        ranks.close()
        ranks = OneRank(tiny_llama_dir, log, **keys)
        ranks.generate()
        check_numbers(OneRank(tiny_llama_dir, **keys), ranks)
        ranks.close()


def test_a_generation_copies_token_ids_and_waits_once_per_token(pretend: tuple[OneRank, Log]) -> None:
    ranks, log = pretend
    log.clear()
    ranks.generate()
    assert (len(log.to_device), len(log.to_host)) == BUDGETS["generate"]
    assert {copy.dtype for copy in log.to_host} == {torch.int64}
    assert len(log.waits) <= 2 * NEW_TOKENS


def test_a_planted_copy_on_the_way_is_seen(
    pretend: tuple[OneRank, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, log = pretend
    collect = MicroBatch.collect
    monkeypatch.setattr(MicroBatch, "collect", lambda self, x_BR: collect(self, x_BR).cpu().to(DEVICE))
    log.clear()
    ranks.values()
    assert len(columns_among(log.to_host)) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_of_a_row_goes_to_the_device_in_one_copy(rank: int) -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    shapes = RowShapes([0, 0, 1], [5, 3], [4, 1, 6])
    micro_batch = pack(*shapes.columns(), np.arange(3), ranks=SequenceRanks(group))
    with pretending() as log:
        (moved,) = to_device([micro_batch], DEVICE)
        assert moved.part is not None
        assert {x.device for x in moved.tensors()} == {DEVICE}
        assert (len(log.to_device), log.to_host, log.waits) == (1, [], [])
        # What a head and the loss read of it.
        moved.grid(moved.collect(moved.part.response_mask_BR.float()))
        assert (len(log.to_device), log.to_host, log.waits) == (1, [], [])
