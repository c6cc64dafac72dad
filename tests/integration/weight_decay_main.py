"""One rank of test_weight_decay.py: an optimizer step of each engine, without weight decay and with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from integration.three_d_main import HEAD, rows_of
from nccl_transfer.refs.mesh import Mesh
from services.engines.base import OptimizerOptions, TrainEngine
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm

CPU, LR, DECAY = torch.device("cpu"), 1e-2, 3.0


def engines(directory: Path) -> Iterator[tuple[str, Mesh, Callable[[OptimizerOptions], TrainEngine]]]:
    """Yields name, mesh and builder of every engine on two ranks."""
    data = Mesh(data=2)
    yield "fsdp", data, lambda o: FSDPEngine(load_causal_lm(directory, torch.float64), CPU, optimizer=o)
    for name, mesh, sharded in (
        ("3d 1-1-2", data, False),
        ("3d 1-1-2 sharded", data, True),
        ("3d 1-2-1", Mesh(tensor=2), False),
        ("3d 2-1-1", Mesh(pipeline=2), False),
    ):
        keys: dict[str, Any] = {"dtype": torch.float64, "shards_over_data": sharded}
        yield (
            name,
            mesh,
            lambda o, mesh=mesh, keys=keys: ThreeDParallelEngine(directory, mesh, CPU, optimizer=o, **keys),
        )
    try:
        from services.engines.zero.engine import ZeROEngine
    except ImportError:
        return
    for stage in (1, 2, 3):
        yield (
            f"zero {stage}",
            data,
            lambda o, stage=stage: ZeROEngine(directory, stage, CPU, dtype=torch.float64, optimizer=o),
        )


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.full_tensors()}


def main(directory: Path) -> dict[str, dict[str, float]]:
    """Returns for each engine and each weight by how much a step with weight decay takes more of it than one without,
    as a share of lr * decay, which is 1 for a weight that decays and 0 for another; the worst of all elements."""
    report: dict[str, dict[str, float]] = {}
    for name, mesh, build in engines(directory):
        after = []
        for decay in (0.0, DECAY):
            engine = build(OptimizerOptions(lr=LR, weight_decay=decay, weight_decay_on="matrices"))
            before = weights(engine)
            rows = rows_of(mesh, engine.data_rank)
            engine.step(rows.micro_batches(), HEAD, rows.loss)
            after.append(weights(engine))
        shares = {
            key: (after[0][key] - after[1][key]) / (LR * DECAY * x) for key, x in before.items() if x.all()
        }
        report[name] = {
            key: float(share.flatten()[(share - share.mean().round()).abs().argmax()])
            for key, share in shares.items()
        }
    return report
