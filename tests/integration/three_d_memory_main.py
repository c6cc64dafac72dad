"""One rank of test_three_d_memory.py: how much memory of its own it takes to load its part of a model, to gather the
whole, tensor by tensor, and to gather what it generates with."""

import json
import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from nccl_transfer.mesh import Mesh
from services.engines.three_d import ThreeDParallelEngine

CPU = torch.device("cpu")
SAMPLE_EVERY_S = 0.001


def anonymous_bytes() -> int:
    """Memory of this process that is no page of a file: a mapped checkpoint does not count."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """The most memory taken since the block began; `bytes` once it has ended."""

    def __enter__(self) -> "Peak":
        self._before = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self._most, anonymous_bytes()) - self._before

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            self._most = max(self._most, anonymous_bytes())


def main(rank: int, sizes: list[int], out: Path, small: Path, large: Path) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(*sizes)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=mesh.size)
    # What libraries take once is not the model's.
    warmed = ThreeDParallelEngine(small, mesh, CPU, transition="hybridflow")
    for _ in (*warmed.full_tensors(), *warmed.rollout_weights()):
        pass
    with Peak() as loading:
        engine = ThreeDParallelEngine(large, mesh, CPU, transition="hybridflow")
    with Peak() as gathering:
        for _ in engine.full_tensors():
            pass
    with Peak() as transition:
        generated = sum(x.nbytes for _, x in engine.rollout_weights())
    kept = sum(x.nbytes for x in engine._kept.values())
    report = {
        "kept": kept,
        "generated": generated,
        "loading": loading.bytes,
        "gathering": gathering.bytes,
        "transition": transition.bytes,
    }
    (out / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), *map(Path, sys.argv[3:6]))
