"""The machine's rate of matrix products, at the shapes of a stage of an iteration.

A stage's share is the time that its matrix products would take at that rate, over the time that the stage took. What
counts is what the stage needs: a prompt that several responses share is read once, each token attends to itself and
those before it, and padding is no work. Every core multiplies at the same time, each with one thread, as ranks do.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from settings.memory.shape import ModelShape

REPEATS = 7
LEAST_S = 0.01
"""Shortest time of a series of products, so that the clock's resolution does not matter."""


@dataclass(frozen=True)
class MatmulShape:
    """A product [batch, m, k] x [batch, k, n]; `kind` is "forward", "input gradient", "weight gradient" or
    "attention"."""

    kind: str
    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True)
class MatmulWork:
    """Products of one shape's rate: as many operations as `flops`, at the rate at which `shape` is multiplied."""

    shape: MatmulShape
    flops: float


def update_work(
    model: ModelShape, tokens: int, rows: int, length: int, outputs: int, together: int
) -> list[MatmulWork]:
    """One forward and one backward pass.

    Args:
        tokens: Read, prompts that are shared counted once.
        rows: Sequences.
        length: Tokens of a sequence.
        outputs: Tokens whose logits are computed; 0 for a critic.
        together: Tokens of a micro-batch.
    """
    work = forward_work(model, tokens, rows, length, outputs, together)
    backward = []
    for each in work:
        shape = each.shape
        if shape.kind == "attention":
            backward += [each, each]
            continue
        of_x = MatmulShape("input gradient", 1, shape.m, shape.n, shape.k)
        of_weight = MatmulShape("weight gradient", 1, shape.n, shape.m, shape.k)
        backward += [MatmulWork(of_x, each.flops), MatmulWork(of_weight, each.flops)]
    return work + backward


def forward_work(
    model: ModelShape, tokens: int, rows: int, length: int, outputs: int, together: int
) -> list[MatmulWork]:
    """One forward pass; arguments as of `update_work`."""
    work = [
        MatmulWork(
            MatmulShape("forward", 1, min(together, tokens), k, n),
            2.0 * tokens * k * n * model.layers * times,
        )
        for k, n, times in layer_products(model)
    ]
    if outputs:
        shape = MatmulShape("forward", 1, min(together, outputs), model.hidden, model.vocabulary)
        work.append(MatmulWork(shape, 2.0 * outputs * model.hidden * model.vocabulary))
    return work + attention_work(model, rows, length, together)


def attention_work(model: ModelShape, rows: int, length: int, together: int) -> list[MatmulWork]:
    """Scores and weighted values, of half of all pairs of tokens."""
    batch = max(1, min(rows, together // length)) * model.heads
    flops = 2.0 * rows * model.heads * model.layers * model.head_dim * length * (length + 1) / 2
    scores = MatmulShape("attention", batch, length, model.head_dim, length)
    values = MatmulShape("attention", batch, length, length, model.head_dim)
    return [MatmulWork(scores, flops), MatmulWork(values, flops)]


def generation_work(
    model: ModelShape, prompts: int, rows: int, prompt_tokens: int, new_tokens: int
) -> list[MatmulWork]:
    """A pass over the distinct prompts, and a decoding step for each further token of every row."""
    work = forward_work(
        model, prompts * prompt_tokens, prompts, prompt_tokens, prompts, prompts * prompt_tokens
    )
    steps = new_tokens - 1
    work += [
        MatmulWork(MatmulShape("forward", 1, rows, k, n), 2.0 * rows * k * n * model.layers * times * steps)
        for k, n, times in layer_products(model)
    ]
    output = MatmulShape("forward", 1, rows, model.hidden, model.vocabulary)
    work.append(MatmulWork(output, output.flops * steps))
    # The mean number of tokens that a new one attends to.
    read = prompt_tokens + 1 + steps // 2
    group = model.heads // model.kv_heads
    scores = MatmulShape("attention", rows * model.kv_heads, group, model.head_dim, read)
    values = MatmulShape("attention", rows * model.kv_heads, group, read, model.head_dim)
    return [*work, *(MatmulWork(shape, shape.flops * model.layers * steps) for shape in (scores, values))]


def layer_products(model: ModelShape) -> list[tuple[int, int, int]]:
    """(in, out, number) of the weights of one layer."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = [
        (model.hidden, queries, 1),
        (model.hidden, keys, 2),
        (queries, model.hidden, 1),
        (model.hidden, model.intermediate, 2),
        (model.intermediate, model.hidden, 1),
    ]
    merged: dict[tuple[int, int], int] = {}
    for k, n, times in found:
        merged[k, n] = merged.get((k, n), 0) + times
    return [(k, n, times) for (k, n), times in merged.items()]


def seconds(work: Sequence[MatmulWork], rates: dict[MatmulShape, float]) -> float:
    """Seconds of the products at the measured rates."""
    return sum(each.flops / rates[each.shape] for each in work)


def measure(shapes: Sequence[MatmulShape], cores: int) -> dict[MatmulShape, float]:
    """Operations per second of each shape on one core while all cores multiply; the mean over them."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(cores)
    with context.Pool(cores, _keep_barrier, (barrier,)) as pool:
        found = pool.map(_rates, [list(shapes)] * cores, chunksize=1)
    return {shape: statistics.mean(each[shape] for each in found) for shape in shapes}


_barrier: list[object] = []


def _keep_barrier(barrier: object) -> None:
    _barrier.append(barrier)


def _rates(shapes: list[MatmulShape]) -> dict[MatmulShape, float]:
    torch.set_num_threads(1)
    _barrier[0].wait(60)  # type: ignore[attr-defined]
    return {shape: shape.flops / min(map(_best, _ways(shape))) for shape in shapes}


@torch.inference_mode()
def _best(run: Callable[[], Tensor]) -> float:
    """Seconds of one product, the median of some series of them."""
    run()
    begun = time.perf_counter()
    run()
    times = max(1, int(LEAST_S / (time.perf_counter() - begun)))
    series = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(times):
            run()
        series.append((time.perf_counter() - begun) / times)
    return statistics.median(series)


def _ways(shape: MatmulShape) -> list[Callable[[], Tensor]]:
    """The product by each library that torch has."""
    if shape.kind == "attention":
        a, b = torch.rand(shape.batch, shape.m, shape.k), torch.rand(shape.batch, shape.k, shape.n)
        return [lambda: a @ b]
    onednn = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
    if shape.kind == "weight gradient":
        x, y = torch.rand(shape.k, shape.n), torch.rand(shape.k, shape.m)
        left, right = (y, x) if shape.m <= shape.n else (x, y)
        ways = [lambda: y.t() @ x]
        return [*ways, lambda: onednn(left.t(), right.t(), None, "none", [], "")] if onednn else ways
    x, weight = torch.rand(shape.m, shape.k), torch.rand(shape.n, shape.k)
    if shape.kind == "input gradient":
        weight = torch.rand(shape.k, shape.n).t()
    ways = [lambda: F.linear(x, weight)]
    return [*ways, lambda: onednn(x, weight, None, "none", [], "")] if onednn else ways
