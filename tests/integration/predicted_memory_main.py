"""One rank of test_predicted_memory.py: the bytes that an engine really allocates, for uses of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from allocations import allocations
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, value_head
from services.compute.microbatch import MicroBatch, pack, pad
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.engines.sharded import ShardedEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm, load_value_model
from services.models.loading import load_on_meta
from services.rollout.base import RolloutSetup
from services.rollout.factory import make_rollout
from services.rollout.sharded import ShardedDecoder
from services.values.inbox import EngineInbox
from services.weights.resharding import Resharding
from services.weights.wanted import weight_shards, whole_weights
from settings.memory.use import ModelUse
from settings.rollout import RolloutServiceTable

CPU = torch.device("cpu")
MICRO_BATCHES = 2
REPEATS = 2
DEADLINE_S = 60
ALL_GATHER = dist.all_gather_single


@dataclass(frozen=True)
class Rows:
    """Rows of a micro-batch, all of one length."""

    count: int
    prompt_tokens: int
    response_tokens: int


def main(cases: Sequence[tuple[ModelUse, Rows]], models: Mapping[str, Path]) -> list[dict[str, int]]:
    patches = {"all_gather_single": all_gather, "reduce_scatter_single": reduce_scatter}
    with mock.patch.multiple(dist, **patches):
        return [measure(use, rows, models[use.shape.family]) for use, rows in cases]


def all_gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
    """Gathers as gloo's all-gather, which it calls, and returns when no thread of gloo holds the output any more:
    `allocations` does not see what these free, and under load they are sometimes the last to let go of a tensor."""
    assert not async_op, "torch computes with what this returns"
    _until_let_go(output, lambda x: ALL_GATHER(x, input, group=group))


def reduce_scatter(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Computes as gloo's reduce-scatter, by an all-reduce of a copy of the input, which this thread frees."""
    assert not async_op, "torch computes with what this returns"
    copy = input.clone()
    _until_let_go(copy, lambda x: dist.all_reduce(x, op, group))
    output.copy_(copy.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def _until_let_go(x: Tensor, communicate: Callable[[Tensor], object]) -> None:
    """Calls a collective with a view of a tensor, and waits until no other thread has one."""
    holders = _num_tensors(x)
    communicate(x.view_as(x))
    deadline = time.monotonic() + DEADLINE_S
    while _num_tensors(x) > holders:
        assert time.monotonic() < deadline, "gloo keeps a tensor"


def _num_tensors(x: Tensor) -> int:
    """Returns the number of tensors that share the memory of `x`, views in other threads included."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def measure(use: ModelUse, rows: Rows, directory: Path, repeats: int = REPEATS) -> dict[str, int]:
    """Returns the bytes of an engine's tensors, exactly, and the peaks of an update and of a forward pass beside them;
    `stage` is the rank's pipeline stage."""
    torch.manual_seed(0)
    if use.engine == "none":
        return measure_rollout_service(use, directory)
    engine = make_engine(use, directory)
    found = measure_generation(use, directory, engine)
    decoder = gathering_decoder(use, directory, engine)
    micro_batches = [_micro_batch(use, rows, engine) for _ in range(MICRO_BATCHES)]
    head: Any = value_head if use.shape.head == "value" else PolicyHead()
    found |= {
        "resident": _storage_bytes(engine._resident()),
        "stage": Mesh(*use.mesh).position(dist.get_rank())[0],
        "forward": _peak(lambda: engine.infer(micro_batches[:1], head), repeats),
    }
    if use.receives:
        arriving = EngineInbox(engine)._arriving
        assert arriving is not None
        found["resident"] += _storage_bytes(arriving.tensors.values())
    if use.learns:
        gradients: list[int] = []

        def note_gradients() -> None:
            gradients.append(_storage_bytes([x.grad for x in engine._kept.values() if x.grad is not None]))

        def loss(output: Any, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            values = output if isinstance(output, Tensor) else output.log_probs_BR
            return values.sum() / rows.count, {}

        engine.step(micro_batches, head, loss, confirm=note_gradients)
        found["gradients"] = gradients[0]
        found["snapshot"] = _storage_bytes(engine.snapshot().tensors.values())
        found["update"] = _peak(lambda: engine.step(micro_batches, head, loss), repeats)
    if decoder is not None:
        found["generation"] = _storage_bytes(decoder.weight_memory().values())
    return found


def measure_generation(use: ModelUse, directory: Path, engine: ShardedEngine) -> dict[str, int]:
    """Returns the bytes of the rank's generation shard, and the peak of a transition, where ranks share the model to
    generate, with weights that are no part of the training engine's memory; with adapters also the bytes of merged
    weights on the rank that has most."""
    if use.rollout is None or not use.rollout.is_shared or use.engine == "3d":
        return {}
    merged = {}
    if use.adapters is not None:
        merged["merged"] = _most(_storage_bytes([shard.tensor for _, shard in engine.local_shards()]))
    mesh = Mesh(*use.mesh, use.rollout.pipeline, use.rollout.tensor, usual_order=True)
    weights = Resharding(engine, directory, mesh, dtype=getattr(torch, use.dtype), device=CPU)
    most = _most(_storage_bytes([x for _, x in weights.rollout_weights()]))
    return {
        "generation": most,
        "transition": _peak(lambda: dict(weights.rollout_weights()), REPEATS),
        **merged,
    }


def _most(nbytes: int) -> int:
    """Returns the largest number that a rank passes. Collective."""
    most = torch.tensor(nbytes)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def gathering_decoder(use: ModelUse, directory: Path, engine: ShardedEngine) -> ShardedDecoder | None:
    """Returns the decoder of rollout engine hf with weights that engine 3d has gathered into memory of their own; None
    for other uses."""
    rollout = use.rollout
    if rollout is None or use.engine != "3d" or use.generates_in_place:
        return None
    mesh = Mesh(*use.mesh, rollout.pipeline, rollout.tensor)
    assert isinstance(engine, ThreeDParallelEngine)
    decoder = ShardedDecoder(
        directory, mesh, engine.generation_shards, dtype=getattr(torch, use.dtype), device=CPU
    )
    decoder.load_weights(engine.rollout_weights())
    return decoder


def measure_rollout_service(use: ModelUse, directory: Path) -> dict[str, int]:
    """Returns the bytes of the weights of a rollout service's rank, and of those that it receives; `stage` as of
    `measure`."""
    table = RolloutServiceTable.model_validate(
        {
            "role": "rollout",
            "address": "127.0.0.1:7101",
            "model": str(directory),
            "ranks": use.ranks,
            "dtype": use.dtype,
            "mesh": "-".join(map(str, use.mesh)) if use.mesh[:2] != (1, 1) else "",
        }
    )
    pipeline, tensor, data = use.mesh
    mesh = Mesh(pipeline, tensor, data, pipeline, tensor)
    rank, dtype = dist.get_rank(), getattr(torch, use.dtype)
    engine = make_rollout(table, RolloutSetup(None, mesh, CPU))
    shards = weight_shards(directory, mesh, rank, dtype, CPU)
    wanted = shards if table.mesh else whole_weights(directory, dtype, CPU)
    buffer = wanted.allocate() if use.receives else {}
    return {
        "resident": _storage_bytes([*engine.weight_memory().values(), *buffer.values()]),
        "stage": mesh.position(rank)[0],
    }


def make_engine(use: ModelUse, directory: Path) -> ShardedEngine:
    """Builds the engine that a use describes, on the default process group."""
    dtype = getattr(torch, use.dtype)
    optimizer = OptimizerOptions() if use.learns else None
    kept = torch.float32 if use.learns and use.adapters is None else dtype
    load = load_value_model if use.shape.head == "value" else load_causal_lm
    if use.engine == "zero":
        # Not imported where DeepSpeed is not installed.
        from services.engines.zero.engine import ZeROEngine

        return ZeROEngine(
            directory,
            use.zero_stage,
            CPU,
            dtype=kept,
            compute_dtype=dtype,
            optimizer=optimizer,
            load=load,
        )
    if use.engine == "3d":
        generates = use.rollout is not None
        mesh = use.mesh
        if use.rollout is not None:
            mesh = (*mesh, use.rollout.pipeline, use.rollout.tensor)
        return ThreeDParallelEngine(
            directory,
            Mesh(*mesh),
            CPU,
            dtype=dtype,
            optimizer=optimizer,
            with_value_head=use.shape.head == "value",
            transition="hybridflow" if generates else None,
            generates_in_place=use.generates_in_place,
            activation_checkpointing=use.activation_checkpointing,
            shards_over_data=use.shards_over_data,
        )
    options: dict[str, Any] = {
        "compute_dtype": dtype,
        "activation_checkpointing": use.activation_checkpointing,
        "directory": directory,
    }
    model: Any = load_on_meta(load, directory, kept)
    if use.adapters is not None:
        adapters = AdapterOptions(rank=use.adapters.rank)
        return LoRAEngine(model, CPU, adapters=adapters, optimizer=OptimizerOptions(), **options)
    options["sequence_parallel"] = use.sequence_parallel
    return FSDPEngine(model, CPU, optimizer=optimizer, **options)


def _micro_batch(use: ModelUse, rows: Rows, engine: ShardedEngine) -> MicroBatch:
    every = np.arange(rows.count)
    prompts, responses = (
        _column(use, rows.count, length) for length in (rows.prompt_tokens, rows.response_tokens)
    )
    if use.packing and engine.packs:
        return pack(prompts, responses, every, ranks=engine.sequence_ranks)
    return pad(prompts, responses, every, 0)


def _column(use: ModelUse, count: int, length: int) -> Jagged[Tensor]:
    ids = torch.randint(3, use.shape.vocabulary, (count * length,))
    return Jagged(ids, np.full(count, length, dtype=np.int64))


def _peak(compute: Callable[[], object], repeats: int) -> int:
    """Returns the most bytes allocated while a function runs: the least of several runs after a first one, in which
    libraries measure and DeepSpeed learns what to gather ahead."""
    compute()
    peaks = []
    for _ in range(repeats):
        with allocations() as found:
            compute()
        peaks.append(found.peak)
    return min(peaks)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of tensors, shared ones counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
