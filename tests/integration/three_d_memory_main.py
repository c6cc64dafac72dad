"""One rank of test_three_d_memory.py: how much memory of its own it takes to load its part of a model, to gather the
whole, tensor by tensor, and to gather what it generates with."""

import re
import threading
from pathlib import Path

import torch

from nccl_transfer.refs.mesh import Mesh
from services.engines.three_d.engine import ThreeDParallelEngine

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


def main(sizes: tuple[int, ...], small: Path, large: Path) -> dict[str, int]:
    mesh = Mesh(*sizes)
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
    return {
        "kept": sum(x.nbytes for x in engine._kept.values()),
        "generated": generated,
        "loading": loading.bytes,
        "gathering": gathering.bytes,
        "transition": transition.bytes,
    }
