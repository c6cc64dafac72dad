"""The part of the contract of training engines that is about the weights that they send to other services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nccl_transfer.refs.mesh import Mesh
from services.engines.base import TrainEngine
from services.engines.sharded import ShardedEngine, snapshot_weights
from services.models.families import load_causal_lm
from services.storage.checkpoint import WeightShard
from services.weights.resharding import Resharding


def covered(
    shards: Iterable[tuple[str, WeightShard]], exported: Mapping[str, Tensor], counts: dict[str, Tensor]
) -> list[str]:
    """Compares the shards of a rank with the exported weights, and adds 1 to each element of `counts`, tensors by name,
    that a shard holds; returns the names of shards that differ, as "NAME: how"."""
    wrong = []
    for name, shard in shards:
        if name not in exported:
            wrong.append(f"{name}: is not exported")
        elif shard.whole != tuple(exported[name].shape):
            wrong.append(f"{name}: has shape {shard.whole}")
        elif not torch.equal(shard.tensor.cpu(), exported[name][shard.box]):
            wrong.append(f"{name}: has other bits at {shard.offsets}")
        else:
            counts[name][shard.box] += 1
    return wrong


class SentWeights:
    """Tests of `EngineContract`."""

    def make_engine(self, directory: Path, device: torch.device) -> TrainEngine:
        """As in `EngineContract`."""
        raise NotImplementedError

    def test_the_weights_that_are_sent_are_those_that_are_exported(
        self, task: Any, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        task.step(engine)
        engine.export(tmp_path / "export")
        exported = load_causal_lm(tmp_path / "export").state_dict()
        counts = {name: torch.zeros_like(x, dtype=torch.int64) for name, x in exported.items()}
        assert covered(engine.weight_shards(), exported, counts) == []
        assert all(bool((each == 1).all()) for each in counts.values())

    def test_generation_shards_have_the_weights_that_are_exported(
        self, task: Any, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        weights = Resharding(
            engine, task.directory, Mesh(), dtype=torch.float32, device=device, together_bytes=1 << 14
        )
        for turn in range(2):
            task.step(engine)
            engine.export(tmp_path / f"{turn}")
            exported = load_causal_lm(tmp_path / f"{turn}").state_dict()
            generation = dict(weights.rollout_weights())
            assert generation.keys() == weights.layouts.keys()
            for name, tensor in generation.items():
                assert torch.equal(weights.layouts[name].whole(tensor).cpu(), exported[name])
        assert weights.received_bytes == 0

    def test_weights_that_are_written_to_a_snapshot_are_there_when_it_is_restored(
        self, task: Any, device: torch.device, tmp_path: Path
    ):
        engine = self.make_engine(task.directory, device)
        if not isinstance(engine, ShardedEngine):
            pytest.skip("the engine takes no weights of another service")
        first = engine.snapshot()
        task.step(engine)
        sha256 = engine.export(tmp_path / "trained")
        trained = [
            (name, shard.tensor.clone()) for name, shard in snapshot_weights(engine, engine.snapshot())
        ]
        engine.restore(first)
        assert engine.export(tmp_path / "first") != sha256
        arriving = engine.snapshot()
        for (name, values), (place, shard) in zip(trained, snapshot_weights(engine, arriving), strict=True):
            assert name == place
            shard.tensor.copy_(values)
        engine.restore(arriving)
        assert engine.export(tmp_path / "received") == sha256
