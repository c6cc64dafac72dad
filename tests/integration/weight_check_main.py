"""One rank of test_weight_check.py: flips bits in the weights of the last rank, and writes down what all ranks say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nccl_transfer.refs.mesh import Mesh
from rlhf.errors import CorruptWeights
from services.actor.rollout_check import verify_rollout
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import HeldTensor, NonFiniteGradient, OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm
from services.roles.columns import jagged_ids
from services.roles.weight_check import WeightCheck
from services.rollout.hf import HFRollout
from services.rollout.sharded import ShardedDecoder

CPU, HEAD, OPTIONS = torch.device("cpu"), PolicyHead(), OptimizerOptions(lr=1e-2)
DATA_RANKS = Mesh(1, 1, 2)
PROMPTS, RESPONSES = jagged_ids([[1, 5], [1, 6, 7]]), jagged_ids([[8, 9], [10]])


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum(), {}


def flip(tensor: Tensor) -> None:
    """Flips the lowest bit of the middle element, on the last rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        flat = tensor.detach().view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
        bits[len(bits) // 2] ^= 1


def said(verify: Callable[[], Any]) -> str:
    """Text of the error that this rank raises; empty where there is none."""
    try:
        verify()
    except CorruptWeights as error:
        return str(error)
    return ""


def held(engine: TrainEngine, start: str) -> HeldTensor:
    """The first tensor of more than one element whose name begins so."""
    return next(x for x in engine.held() if x.name.startswith(start) and x.tensor.numel() > 1)


def found(engine: TrainEngine, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Messages for an intact engine, before and after steps, and for a flipped bit in a tensor of each kind: by a
    comparison of replicas alone, by one over time, and by one before an update."""
    micro_batches, check = split(PROMPTS, RESPONSES, token_budget=64, pad_id=0), WeightCheck()
    report: dict[str, Any] = {"intact": said(lambda: check.verify(engine.held()))}
    assert check.is_armed
    check.verify_before_update(engine.held())
    assert not check.is_armed, "there is nothing to compare any more"
    for _ in range(3):
        engine.step(micro_batches, HEAD, loss)
    report["stepped"] = said(lambda: check.verify(engine.held()))
    for kind in kinds:
        each = held(engine, kind)
        flip(each.tensor)
        report[kind] = {
            "name": each.name,
            "replicas": said(lambda: WeightCheck().verify(engine.held())),
            "over time": said(lambda: check.verify(engine.held())),
            "before an update": said(lambda: check.verify_before_update(engine.held())),
        }
        flip(each.tensor)
    report["flipped back"] = said(lambda: check.verify(engine.held()))
    return report


def not_finite(engine: TrainEngine) -> str:
    def poisoned(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(output, micro_batch)[0] * float("nan"), {}

    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        engine.step(split(PROMPTS, RESPONSES, token_budget=64, pad_id=0), HEAD, poisoned if is_last else loss)
    except NonFiniteGradient as error:
        return str(error)
    return ""


def hybrid(directory: Path) -> dict[str, str]:
    """Messages for the weights that an actor generates with: gathered from the tensor ranks that train."""
    mesh = Mesh(1, 2, 1, generation_pipeline=1, generation_tensor=1)
    report = {}
    for name, in_place in (("in place", True), ("copied", False)):
        engine = ThreeDParallelEngine(
            directory, mesh, CPU, optimizer=OPTIONS, transition="hybridflow", generates_in_place=in_place
        )
        assert engine.transition is not None
        decoder = ShardedDecoder(directory, mesh, engine.transition, dtype=torch.float32, device=CPU)
        rollout = HFRollout(decoder, token_budget=64)
        rollout.load_weights(engine.rollout_weights())
        verify = partial(verify_rollout, rollout, engine, WeightCheck())
        report[f"{name}, intact"] = said(verify)
        weights = {each.name: each.tensor for each in rollout.held()}
        # The first half of its rows is of rank 0.
        gathered = weights["generation.model.layers.0.self_attn.q_proj.weight"]
        flip(gathered[: len(gathered) // 4])
        report[name] = said(verify)
        report[f"{name}, loaded again"] = said(verify)
    return report


def main(directory: Path, tied: Path, with_zero: bool) -> dict[str, Any]:
    def three_d(mesh: Mesh = DATA_RANKS, where: Path = directory, **options: Any) -> ThreeDParallelEngine:
        return ThreeDParallelEngine(where, mesh, CPU, optimizer=OPTIONS, **options)

    fsdp = FSDPEngine(load_causal_lm(directory), CPU, optimizer=OPTIONS)
    reports: dict[str, Any] = {
        "3d": found(three_d(), ("weight", "exp_avg_sq")),
        "3d in bfloat16": found(three_d(dtype=torch.bfloat16), ("weight", "copy")),
        "3d, shards over data": found(three_d(shards_over_data=True), ("weight",)),
        "tensor parallel": found(three_d(Mesh(1, 2, 1)), ("weight.model.norm",)),
        "pipeline": found(three_d(Mesh(2, 1, 1), tied), ("weight.model.embed_tokens",)),
        "fsdp": found(fsdp, ("weight", "exp_avg")),
        "not finite": not_finite(fsdp),
        "hybrid": hybrid(directory),
    }
    if with_zero:
        from services.engines.zero.engine import ZeROEngine

        stages = {stage: ZeROEngine(directory, stage, CPU, optimizer=OPTIONS) for stage in (2, 3)}
        reports["zero 2"] = found(stages[2], ("weight", "copy"))
        reports["zero 3"] = found(stages[3], ("weight", "partition"))
    return reports
