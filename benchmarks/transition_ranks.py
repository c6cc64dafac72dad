"""One rank of benchmarks.transition: gathers the weights it generates with, and counts what that takes."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from nccl_transfer.refs.mesh import Mesh
from services.engines.three_d.engine import ThreeDParallelEngine
from services.engines.three_d.gather_groups import Kind
from services.engines.three_d.transition import ReceivedBytes
from services.storage.layout import Layout
from settings.engines import VllmTable

CPU = torch.device("cpu")


def memory(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    """VmHWM begins anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def loopback_bytes() -> int:
    """ReceivedBytes over the loopback interface since it is up."""
    found = re.search(r"^\s*lo:\s*(\d+)", Path("/proc/net/dev").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def start(model: Path, mesh: Mesh, kind: Kind) -> ThreeDParallelEngine:
    in_place = kind == "hybridflow"
    return ThreeDParallelEngine(model, mesh, CPU, transition=kind, generates_in_place=in_place)


def measure(model: Path, mesh: Mesh, kind: Kind, turns: int) -> dict[str, Any]:
    """The gather of all weights, on one pair of meshes."""
    # Modules of the case before refer to each other.
    gc.collect()
    before = memory("VmRSS")
    engine = start(model, mesh, kind)
    transition = engine.transition
    assert transition is not None
    trained = {name: x for name, x in engine._kept.items() if engine._stage.layouts[name].is_cut}
    seconds = []
    dist.barrier()
    on_wire = loopback_bytes()
    forget_peak()
    # A barrier is a few hundred bytes.
    dist.barrier()
    weights = dict(engine.rollout_weights())
    dist.barrier()
    on_wire = loopback_bytes() - on_wire
    peak = memory("VmHWM") - before
    inside = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in weights.values()]
    outside = [
        x for x in trained.values() if not any(first <= x.data_ptr() < first + size for first, size in inside)
    ]
    report = {
        "model": gathered_bytes(engine._stage.layouts),
        "received": transition.received.cut,
        "received_whole": transition.received.whole,
        "gathered": sum(size for size in dict(inside).values()),
        "redundant": sum(x.nbytes for x in outside),
        "peak": peak,
        "on_wire": on_wire,
    }
    del weights
    for _ in range(turns):
        dist.barrier()
        started = time.perf_counter()
        weights = dict(engine.rollout_weights())
        seconds.append(time.perf_counter() - started)
        del weights
    return {**report, "seconds": seconds}


def gathered_bytes(layouts: Mapping[str, Layout]) -> int:
    """Bytes of all tensors that are cut into parts, whole, in float32."""
    return sum(4 * math.prod(each.gathered_shape) for each in layouts.values() if each.is_cut)


def measure_vllm(model: Path, mesh: Mesh, turns: int) -> dict[str, Any]:
    """The same where vLLM repacks what comes, a layer at a time; it holds what comes free when that is dropped."""
    # Seconds of import, and not installed everywhere.
    from services.rollout.vllm import VLLMRollout

    engine = ThreeDParallelEngine(model, mesh, CPU, transition="hybridflow", generates_in_place=False)
    transition = engine.transition
    assert transition is not None
    rollout = VLLMRollout(
        model,
        dtype=torch.float32,
        table=VllmTable(kv_cache_gb=0.25, max_model_len=64),
        identity="rlhf-transition",
        layouts=transition.layouts,
        tensor_parallel=mesh.generation_tensor,
    )
    rollout.load_weights(engine.rollout_weights())
    transition.received = ReceivedBytes()
    seconds = []
    before = memory("VmRSS")
    forget_peak()
    for _ in range(turns):
        dist.barrier()
        started = time.perf_counter()
        rollout.load_weights(engine.rollout_weights())
        seconds.append(time.perf_counter() - started)
    peak = memory("VmHWM") - before
    before = memory("VmRSS")
    rollout._engine.collective_rpc(_drop_weights)
    ctypes.CDLL(None).malloc_trim(0)
    layouts = engine._stage.layouts
    return {
        "model": gathered_bytes(layouts),
        "received": transition.received.cut // turns,
        "received_whole": transition.received.whole // turns,
        "gathered": before - memory("VmRSS"),
        "redundant": sum(x.nbytes for name, x in engine._kept.items() if layouts[name].is_cut),
        "peak": peak,
        "on_wire": 0,
        "seconds": seconds,
    }


def _drop_weights(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        # The packed form of a weight hangs on the function that multiplies by it.
        module.__dict__.pop("cpu_linear", None)
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0)
    gc.collect()


@click.command()
@click.option("--rank", required=True, type=int)
@click.option("--directory", required=True, type=click.Path(path_type=Path))
def main(rank: int, directory: Path) -> None:
    job = json.loads((directory / "job.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store-{job['ranks']}", rank=rank, world_size=job["ranks"]
    )
    reports = []
    for sizes, kind in job["cases"]:
        if kind == "vllm":
            reports.append(measure_vllm(directory / "large", Mesh(*sizes), job["turns"]))
            continue
        mesh = Mesh(*sizes, usual_order=kind != "hybridflow")
        # One-off allocations of libraries do not count.
        dict(start(directory / "small", mesh, kind).rollout_weights())
        reports.append(measure(directory / "large", mesh, kind, job["turns"]))
    (directory / f"report-{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
    # vLLM would look for its groups again at the end of the process.
    os._exit(0)


if __name__ == "__main__":
    main()
