"""Plans by which the ranks of a service move their weights to generation shards, and models that they cannot share."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend_device import DEVICE, pretending

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import WeightSlice
from services.weights import resharding
from services.weights.resharding import Resharding, _plans

SHAPES = {"a": (8, 16), "b": (64, 16), "c": (8,), "d": (6, 16), "e": (4, 16)}
BUCKET_BYTES, TOGETHER_BYTES = 4096, 1100


def part(name: str, index: int, parts: int, dtype: str) -> WeightSlice:
    rows, *rest = SHAPES[name]
    starts = (index * rows // parts, *(0 for _ in rest))
    return WeightSlice(name, SHAPES[name], Slice.at(starts, (rows // parts, *rest)), dtype)


def plans() -> list[Any]:
    """Four ranks that hold halves in pairs of replicas, and want halves of other ranks' pairs, in bfloat16."""
    held = [[part(name, rank // 2, 2, "float32") for name in SHAPES] for rank in range(4)]
    wanted = [[part(name, rank % 2, 2, "bfloat16") for name in SHAPES] for rank in range(4)]
    return list(_plans(held, wanted, BUCKET_BYTES, TOGETHER_BYTES))


def test_tensors_come_together_in_the_order_of_names_up_to_a_limit() -> None:
    names = [
        sorted({piece.slice.name for buckets in plan for bucket in buckets for piece in bucket.pieces})
        for plan in plans()
    ]
    assert names == [["a"], ["b", "c"], ["d", "e"]]
    halves = {name: math.prod(shape) for name, shape in SHAPES.items()}  # of 2 bytes each
    assert halves["a"] + halves["b"] > TOGETHER_BYTES >= halves["b"] + halves["c"]
    assert halves["b"] + halves["c"] + halves["d"] > TOGETHER_BYTES


def test_a_rank_takes_from_itself_what_it_holds() -> None:
    for plan in plans():
        for buckets in plan:
            for bucket in buckets:
                # Ranks 0 and 3 hold the halves that they want.
                assert all(rank == bucket.source for rank in bucket.destinations if rank in (0, 3))
                assert {piece.slice.dtype for piece in bucket.pieces} == {"bfloat16"}


def test_a_model_of_another_family_is_refused() -> None:
    engine: Any = SimpleNamespace(config=SimpleNamespace(model_type="gpt2"))
    with pytest.raises(ValueError, match="models/x is a gpt2; ranks can share llama, mistral, qwen2, qwen3"):
        Resharding(engine, Path("models/x"), Mesh(), dtype=torch.float32, device=torch.device("cpu"))


def test_all_ranks_create_the_communicator_that_some_of_them_send_by(
    process_group: None, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[torch.Tensor] = []
    engine: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama"), local_shards=lambda: iter(()))
    with pretending():
        monkeypatch.setattr(dist, "all_reduce", reduced.append)
        monkeypatch.setattr(resharding, "_plans", lambda *_: iter(()))
        Resharding(engine, tiny_llama_dir, Mesh(), dtype=torch.float32, device=DEVICE)
    assert [x.device for x in reduced] == [DEVICE]
