"""One rank of test_sharded_loading.py: an engine that reads its parts of a model from files, beside one that is given
the whole."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from integration.three_d_main import HEAD, OPTIONS, Rows, rows_of
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import Head, value_head
from services.compute.microbatch import MicroBatch
from services.engines.base import Snapshot
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models import weights
from services.models.families import load_causal_lm, load_classifier, load_value_model
from services.models.loading import Model, load_on_meta
from services.reward.model import last_score

CPU = torch.device("cpu")
LOADS = {
    "policy": load_causal_lm,
    "lora": load_causal_lm,
    "value": load_value_model,
    "score": load_classifier,
}


def make_engine(kind: str, model: Any, dtype: torch.dtype, directory: Path | None) -> FSDPEngine:
    if kind == "lora":
        adapters = AdapterOptions(rank=4, seed=3)
        return LoRAEngine(
            model, CPU, adapters=adapters, optimizer=OPTIONS, compute_dtype=dtype, directory=directory
        )
    return FSDPEngine(
        model, CPU, optimizer=OPTIONS, compute_dtype=dtype, directory=directory, load=LOADS[kind]
    )


def read_off(kind: str, rows: Rows) -> tuple[Head[Any], Any]:
    """Head and loss for a model of this kind."""
    if kind == "value":
        return value_head, rows.value_loss
    if kind == "score":
        return last_score, score_loss
    return HEAD, rows.loss


def score_loss(scores_S: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return (scores_S - 1).square().sum() / 11, {}


def same(a: Snapshot, b: Snapshot) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(x, b.tensors[name]) for name, x in a.tensors.items()
    )


def bytes_on_meta(model: Model) -> int:
    return sum(p.nbytes for p in model.parameters() if p.is_meta)


def run(kind: str, directory: Path, dtype: torch.dtype, out: Path) -> dict:
    rows = rows_of(Mesh(data=dist.get_world_size()), dist.get_rank())
    micro_batches = rows.micro_batches()
    stored = dtype if kind == "lora" else torch.float32
    model = load_on_meta(LOADS[kind], directory, stored)
    report: dict[str, Any] = {"bytes read by parts": bytes_on_meta(model)}
    engine = make_engine(kind, model, dtype, directory)
    other = make_engine(kind, LOADS[kind](directory, stored), dtype, None)
    initial = engine.snapshot()
    report["weights"] = same(initial, other.snapshot())
    learned = [each.step(micro_batches, *read_off(kind, rows)) for each in (engine, other)]
    report["step"] = learned[0] == learned[1] and same(engine.snapshot(), other.snapshot())
    hashes = [each.export(out / name) for each, name in ((engine, "export"), (other, "other"))]
    report["export"] = hashes[0] == hashes[1]
    engine.start_over()
    report["start over"] = same(engine.snapshot(), initial)
    report["start over"] &= engine.step(micro_batches, *read_off(kind, rows)) == learned[0]
    return report


def main(out: Path, cases: dict[str, tuple[str, Path, str]]) -> dict[str, dict]:
    # Less than these models have.
    weights.MAX_FILE_BYTES = 20_000
    return {
        name: run(kind, directory, getattr(torch, dtype), out / name)
        for name, (kind, directory, dtype) in cases.items()
    }
