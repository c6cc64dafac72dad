"""One rank of test_sharded_memory.py: how much memory of its own it takes to load its part of a model and to export."""

from collections.abc import Callable
from pathlib import Path

import torch

from integration.three_d_memory_main import Peak
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.sharded import ShardedEngine
from services.engines.zero.engine import ZeROEngine
from services.models import weights
from services.models.families import load_causal_lm
from services.models.loading import load_on_meta

CPU = torch.device("cpu")
SEVERAL_FILES, ONE_FILE = 8 << 20, 1 << 40


def fsdp(directory: Path, optimizer: OptimizerOptions | None) -> FSDPEngine:
    model = load_on_meta(load_causal_lm, directory, torch.float32)
    return FSDPEngine(model, CPU, optimizer=optimizer, directory=directory)


def fsdp_of_whole(directory: Path, optimizer: OptimizerOptions | None) -> FSDPEngine:
    return FSDPEngine(load_causal_lm(directory), CPU, optimizer=optimizer)


def zero(stage: int) -> Callable[[Path, OptimizerOptions | None], ZeROEngine]:
    return lambda directory, optimizer: ZeROEngine(directory, stage, CPU, optimizer=optimizer)


LEARNS = OptimizerOptions()
CASES: dict[str, tuple[Callable[..., ShardedEngine], OptimizerOptions | None, int]] = {
    "fsdp": (fsdp, None, SEVERAL_FILES),
    "fsdp that learns": (fsdp, LEARNS, SEVERAL_FILES),
    "zero-3": (zero(3), None, SEVERAL_FILES),
    "zero-3 that learns": (zero(3), LEARNS, SEVERAL_FILES),
    "zero-2 that learns": (zero(2), LEARNS, SEVERAL_FILES),
    # What no service does: it must be seen.
    "whole": (fsdp_of_whole, None, ONE_FILE),
}


def resident_bytes(engine: ShardedEngine) -> int:
    """Of weights and optimizer state that the engine has on this rank for life."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in engine._resident()}
    return sum(storages.values())


def main(out: Path, small: Path, large: Path) -> dict[str, dict[str, int]]:
    report = {}
    for name, (make, optimizer, weights.MAX_FILE_BYTES) in CASES.items():
        # What libraries take once is not the model's.
        make(small, optimizer).export(out / "warmed")
        with Peak() as loading:
            engine = make(large, optimizer)
        with Peak() as exporting:
            engine.export(out / "exported")
        report[name] = {
            "resident": resident_bytes(engine),
            "loading": loading.bytes,
            "exporting": exporting.bytes,
        }
        del engine
    return report
