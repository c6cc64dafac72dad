"""The source that the compiler makes of the kernels of `fused` for a GPU, which needs none: in every process the same,
and Triton makes machine code of it."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import scheduler
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from services.compute import fused
from services.compute.torch_internals import compiled

pytest.importorskip("triton", reason="the compiler for GPUs; torch for CUDA brings it, and vLLM for CPUs")

H200 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
COMPILE = torch.compile
KERNELS = ["_norm", "_norm_gradients", "_gated", "_gated_gradients", "_rotated", "_rotated_gradients"]


class Sources:
    """Takes the compiler's place: makes the source for an H200 of each graph, which then runs operation by operation.

    Attributes:
        made: The sources, which contain the settings that they were made with.
    """

    def __init__(self) -> None:
        self.made: list[str] = []

    def compile(
        self, function: Callable[..., Any], *, options: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        def backend(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
            with inductor.patch(options or {}):
                self.made.append(source_of(graph))
            return graph.forward

        return COMPILE(function, backend=backend, **arguments)


def source_of(graph: GraphModule) -> str:
    """Returns the source for an H200 of a graph that was traced for a CPU."""
    values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(x.fake_mode for x in values if isinstance(x, FakeTensor))
    env: Any = mode.shape_env
    with mode, env.ignore_fresh_unbacked_symbols():
        lowered = make_fx(graph, select_decomp_table())(*values)
        inputs = [on_gpu(mode, x) if isinstance(x, FakeTensor) else x for x in values]
        lowering = GraphLowering(lowered, example_inputs=inputs, shape_env=env, is_inference=True)
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(mode):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def on_gpu(mode: Any, x: FakeTensor) -> FakeTensor:
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, empty, torch.device("cuda", 0))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    sources = Sources()
    monkeypatch.setattr(torch, "compile", sources.compile)
    monkeypatch.setattr(DeviceProperties, "create", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(scheduler, "has_triton", lambda: True)
    monkeypatch.setattr(TritonKernel, "inductor_meta_common", classmethod(lambda cls: settings()))
    yield sources
    torch._dynamo.reset()


def settings() -> dict[str, Any]:
    """Returns the settings with which the compiler would choose the blocks of a kernel."""
    return {"deterministic": inductor.deterministic, "compile_threads": inductor.compile_threads}


def operands(name: str, num_rows: int) -> tuple[Any, ...]:
    x_NH, up_NH = (torch.ones(num_rows, 2048, dtype=torch.bfloat16) for _ in range(2))
    weight_H, scale_N1 = torch.ones(2048, dtype=torch.bfloat16), torch.ones(num_rows, 1)
    heads, angles = (torch.ones(num_rows, 4, 64), torch.ones(num_rows, 2, 64)), [torch.ones(num_rows, 64)] * 2
    return {
        "_norm": (x_NH, weight_H, 1e-6),
        "_norm_gradients": (up_NH, x_NH, weight_H, scale_N1),
        "_gated": (x_NH, up_NH),
        "_gated_gradients": (x_NH, up_NH, x_NH),
        "_rotated": (*heads, *angles),
        "_rotated_gradients": (*heads, *angles),
    }[name]


def source(sources: Sources, name: str, num_rows: int) -> str:
    """Returns the source of a kernel in a process whose first call of it has `num_rows` rows."""
    torch._dynamo.reset()
    kernel = fresh(getattr(fused, name))
    with torch.no_grad():
        kernel(*operands(name, num_rows))
    return sources.made[-1]


def fresh(kernel: Any) -> Callable[..., Any]:
    """Returns a kernel as a process has it that has compiled nothing."""
    return compiled(kernel.__wrapped__)


BLOCKS = {
    "pointwise": {"XBLOCK": 256},
    "reduction": {"XBLOCK": 1, "R0_BLOCK": 2048},
    "persistent_reduction": {"XBLOCK": 1},
}
"""Sizes that the compiler may choose, by the kind of a kernel."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_triton_makes_machine_code_of_it_for_an_h200(
    sources: Sources, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    kernels: list[tuple[str, dict[str, Any], Any]] = []

    def noting(kind: str) -> Callable[..., Any]:
        def heuristic(*, triton_meta: dict[str, Any], **_: Any) -> Callable[[Any], None]:
            return lambda kernel: kernels.append((kind, triton_meta, kernel))

        return heuristic

    for kind in BLOCKS:
        monkeypatch.setattr(triton_heuristics, kind, noting(kind))
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    texts = re.findall(
        r"async_compile\.triton\('\w+', '''(.*?)''', device_str", source(sources, name, 8192), re.DOTALL
    )
    for number, text in enumerate(texts):
        run(text, tmp_path / f"kernel_{number}.py")
    assert len(kernels) == len(texts) > 0
    for kind, meta, kernel in kernels:
        blocks = BLOCKS[kind]
        signature = meta["signature"] | dict.fromkeys(blocks, "constexpr")
        made = ASTSource(kernel, signature, meta["constants"] | blocks, meta["configs"][0])
        assert triton.compile(made, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def run(text: str, path: Path) -> None:
    """Runs a Python module, from a file, where Triton looks for the source of its kernels."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("name", KERNELS)
def test_the_code_does_not_depend_on_the_number_of_rows_that_came_first(sources: Sources, name: str) -> None:
    first = source(sources, name, 100)
    assert "def triton_" in first
    assert first == source(sources, name, 30_000)


def test_the_settings_hold_in_every_thread_and_after_every_compilation(sources: Sources) -> None:
    kernel = fresh(fused._gated)
    for size in (8, 16, 32):
        call = threading.Thread(target=kernel, args=[torch.ones(3, size)] * 2)
        call.start()
        call.join()
        kernel(*[torch.ones(3, size + 1)] * 2)
    assert len(sources.made) == 6
    assert all("'deterministic': True" in each for each in sources.made)
    assert all("'compile_threads': 1" in each for each in sources.made)
