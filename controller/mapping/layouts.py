"""All layouts of a model on a number of devices, with their costs (HybridFlow, algorithm 2): training mesh, sharding
over data ranks, recomputation, and for actors the mesh and waves of generation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from controller.mapping.dataflow import STAGES, Call
from controller.mapping.pareto import merged_rows, not_dominated_rows
from controller.mapping.problem import Model
from controller.mapping.simulate import (
    Site,
    generation_s,
    inference_s,
    overhead_s,
    rows_together,
    sync_s,
    training_s,
    transition_s,
)
from controller.mapping.work import column_bytes
from controller.mapping.workload import Workload
from settings.memory.generation import cache_bytes, cache_bytes_per_token, decoding_bytes
from settings.memory.predict import generation_parts, idle_parts, predict_rank
from settings.memory.use import ModelUse, RolloutUse, RowSizes
from settings.meshes import Sizes

WAVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of waves that generation may take."""
MIB = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Layouts that are looked at.

    Attributes:
        seconds: Those that take less in a step, all stages together. A step takes at least as long as any model, so
            slower ones than a known plan are in no better one.
        doubling: Only those whose number of ranks is a power of two. Default: any number.
    """

    seconds: float = math.inf
    doubling: bool = False


@dataclass(frozen=True)
class Option:
    """A layout of a model with its costs.

    Attributes:
        times: Seconds of its calls in each stage of a step.
        idle: Bytes of a device that it takes between calls.
        extra: Bytes that it takes beyond these in its largest stage.
        use: Use of the model in this layout.
    """

    times: tuple[float, ...]
    idle: int
    extra: int
    use: ModelUse

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.use.ranks

    @property
    def is_policy(self) -> bool:
        """Whether it is the model that learns and whose responses are generated."""
        return self.use.learns and self.use.rollout is not None

    @property
    def is_kept(self) -> bool:
        """Whether a run with `run.ahead` holds back its calls, except generation, until the next step has generated:
        true for trained models and for a values service."""
        return self.use.learns or (self.use.receives and self.use.engine != "none")


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def meshes(model: Model, site: Site, ranks: int, workload: Workload) -> Iterator[Sizes]:
    """Yields the meshes (p, t, d) of `ranks` ranks that a model can be divided over: t within a machine and a divisor
    of heads, key-value heads and feed-forward units, p of layers, both 1 for mixtures of experts; d of the rows of a
    mini-batch for models that are trained, and at most the rows of a call."""
    shape, use = model.use.shape, model.use
    most = min((call.rows for call in model.calls if call.rows), default=ranks)
    cut = max(1, workload.rows // workload.mini_batches)
    for data in divisors(ranks):
        if data > most or (use.learns and cut % data):
            continue
        if use.engine not in ("3d", "none") or shape.experts is not None:
            if data == ranks:
                yield 1, 1, ranks
            continue
        for tensor in divisors(ranks // data):
            pipeline = ranks // data // tensor
            if shape.layers % pipeline or tensor > site.group.per_machine:
                continue
            sizes = (shape.heads, shape.kv_heads, shape.intermediate)
            if not any(size % tensor for size in sizes) and site.group.within_machine(tensor, site.alignment):
                yield pipeline, tensor, data


def layouts(
    model: Model, site: Site, ranks: int, workload: Workload, bounds: Bounds | None = None
) -> Iterator[Option]:
    """Yields the layouts of a model on `ranks` ranks that fit into a device alone, with their costs.

    Args:
        model: The model.
        site: Devices.
        ranks: Number of ranks.
        workload: Rows.
        bounds: Layouts that are looked at. Default: all.
    """
    bounds = bounds or Bounds()
    use = model.use
    for mesh in meshes(model, site, ranks, workload):
        shards = (False, True) if use.engine == "3d" and mesh[2] > 1 else (False,)
        recomputes = (False, True) if _may_recompute(use) else (False,)
        for is_sharded, recompute in product(shards, recomputes):
            trained = replace(use, mesh=mesh, shards_over_data=is_sharded, activation_checkpointing=recompute)
            yield from _trained(model, trained, site, workload, bounds)


def _may_recompute(use: ModelUse) -> bool:
    """Returns whether a service can recompute activations in the backward pass; one of a reward cannot."""
    return use.learns and use.engine in ("3d", "fsdp") and use.shape.head != "score"


def _trained(model: Model, use: ModelUse, site: Site, workload: Workload, bounds: Bounds) -> Iterator[Option]:
    """Yields the layouts of a use whose mesh of training is chosen."""
    times = _times(model, use, site, workload)
    if sum(times) >= bounds.seconds:
        return
    rows = model.rows(workload)
    alone = replace(use, rollout=None)
    if use.rollout is not None and not use.generates:
        use = replace(use, rollout=_unused(use.rollout, use))
    parts = [_training_memory(alone, rows, stage) for stage in stages(use)]
    if any(idle + beyond > site.group.capacity for idle, beyond in parts):
        return
    if not use.generates:
        yield Option(tuple(times), *memory(use, rows), use)
        return
    for each in _generating(use):
        yield from _waves(model, each, site, workload, times, bounds)


def _unused(rollout: RolloutUse, use: ModelUse) -> RolloutUse:
    """Returns the rollout engine of an actor that does not generate: on the training mesh, without weights of its
    own."""
    if use.engine != "3d":
        return rollout
    return replace(rollout, pipeline=use.mesh[0], tensor=use.mesh[1])


def _generating(use: ModelUse) -> Iterator[ModelUse]:
    """Yields a use with each mesh of generation, whose sizes divide those of training."""
    rollout = use.rollout_engine
    if use.engine == "none":
        if use.mesh[0] == 1 or rollout.engine == "hf":
            yield replace(use, rollout=replace(rollout, pipeline=use.mesh[0], tensor=use.mesh[1]))
        return
    if use.engine != "3d":
        yield use
        return
    for pipeline, tensor in product(divisors(use.mesh[0]), divisors(use.mesh[1])):
        if pipeline == 1 or rollout.engine == "hf":
            yield replace(use, rollout=replace(rollout, pipeline=pipeline, tensor=tensor))


def _waves(
    model: Model, use: ModelUse, site: Site, workload: Workload, others: Sequence[float], bounds: Bounds
) -> Iterator[Option]:
    """Yields the layouts of an actor, one for each number of waves of generation, until a smaller cache takes no less
    memory, but longer."""
    rows, rollout = model.rows(workload), use.rollout_engine
    generated = max((call.rows for call in model.calls if call.kind == "generation"), default=1)
    length = rows.prompt_tokens + rows.response_tokens
    base = others[0] + transition_s(use, site)
    before, together = -1, 0
    held: GeneratingMemory | None = None
    for waves in WAVES:
        fewer = rows_together(use, generated, waves)
        if fewer == together:
            continue
        together = fewer
        first = base + generation(model, use, site, workload, together)
        if first + sum(others[1:]) >= bounds.seconds:
            return
        held = held or GeneratingMemory(use, rows)
        nbytes = cache_of(use, together * length) if rollout.engine != "hf" else rollout.cache_bytes
        each = replace(use, rollout=replace(rollout, cache_tokens=together * length, cache_bytes=nbytes))
        idle, extra = held.of(each)
        if extra == before and rollout.engine == "hf":
            return
        before = extra
        if idle + extra <= site.group.capacity:
            yield Option((first, *others[1:]), idle, extra, each)


def generation(model: Model, use: ModelUse, site: Site, workload: Workload, together: int) -> float:
    """Returns the seconds of a model's calls that generate; see `generation_s`."""
    return sum(
        generation_s(use, site, call.rows, workload, together=together)
        for call in model.calls
        if call.kind == "generation"
    )


def service_times(model: Model, use: ModelUse, site: Site, workload: Workload, together: int) -> list[float]:
    """Returns the seconds of a model's calls in each stage, with `together` rows in a replica's KV cache."""
    times = _times(model, use, site, workload)
    if any(call.kind == "generation" for call in model.calls):
        times[0] += transition_s(use, site) + generation(model, use, site, workload, together)
    return times


def cache_of(use: ModelUse, tokens: int) -> int:
    """Returns the bytes of a rank's KV cache of `tokens` tokens, rounded up to MiB."""
    rollout = use.rollout_engine
    per_token = cache_bytes_per_token(use.shape, rollout.tensor, use.itemsize) // rollout.pipeline
    return -(-tokens * per_token // MIB) * MIB


def call_times(model: Model, use: ModelUse, site: Site, workload: Workload, together: int) -> list[float]:
    """Returns the seconds of each of a model's calls, in order, with `together` rows in a replica's KV cache. The
    first call that generates also has the transition."""
    times = [_call_s(call, model, use, site, workload) for call in model.calls]
    generating = [number for number, call in enumerate(model.calls) if call.kind == "generation"]
    for number in generating:
        times[number] += generation_s(use, site, model.calls[number].rows, workload, together=together)
    if generating:
        times[generating[0]] += transition_s(use, site)
    return times


def _times(model: Model, use: ModelUse, site: Site, workload: Workload) -> list[float]:
    """Returns the seconds of a model's calls in each stage, generation without its own work."""
    times = [0.0] * len(STAGES)
    for call in model.calls:
        times[call.stage] += _call_s(call, model, use, site, workload)
    return times


def _call_s(call: Call, model: Model, use: ModelUse, site: Site, workload: Workload) -> float:
    """Returns the seconds of a call with the fetch of its columns; of generation, of the fetch alone."""
    fetch = overhead_s(use, site) + _transfer_s(call, use, site, workload)
    if call.kind == "inference" and call.method != "tokenize":
        return fetch + inference_s(use, site, call.rows, workload)
    if call.kind == "training":
        return fetch + training_s(use, site, call.rows, workload, is_critic=model.is_critic)
    return sync_s(use, site) if call.kind == "sync" else fetch


def _transfer_s(call: Call, use: ModelUse, site: Site, workload: Workload) -> float:
    """Returns the seconds to fetch the columns of a call that other services made, as if these were on other
    machines: each data rank fetches its rows."""
    nbytes = sum(column_bytes(name, workload) for name in call.reads) * call.rows / use.row_parts
    if not nbytes:
        return 0.0
    return site.send(nbytes, site.group.count + 1, site.group.per_machine)


def memory(use: ModelUse, rows: RowSizes) -> tuple[int, int]:
    """Returns the bytes of a device that a rank takes between calls, and at most beyond these in a stage, as
    `settings.memory` predicts them: the most over pipeline stages. With a CPU, host memory is the device's."""
    if use.generates:
        return GeneratingMemory(use, rows).of(use)
    parts = [_training_memory(use, rows, stage) for stage in stages(use)]
    idle = max(idle for idle, _ in parts)
    return idle, max(map(sum, parts)) - idle


class GeneratingMemory:
    """Memory of a rank that generates, by the size of its KV cache.

    Args:
        use: Use of the model; the sizes of its cache do not matter.
        rows: Rows of a step.
    """

    def __init__(self, use: ModelUse, rows: RowSizes) -> None:
        self._rows = rows
        self._stages = []
        alone = replace(use, rollout=None)
        for stage in stages(use):
            idle, beyond = _training_memory(alone, rows, stage)
            parts = idle_parts(use, stage)
            transition, generation = generation_parts(use, rows, stage)
            host = idle - sum(idle_parts(alone, stage).values())
            kept = [{**parts, **each} for each in (transition, generation)]
            for each in kept:
                each.pop("KV cache", None)
                each.pop("decoding", None)
            held = sum(nbytes for name, nbytes in parts.items() if name != "KV cache") + host
            largest = [sum(each.values()) + host for each in kept]
            self._stages.append((held, held + beyond, *largest, "KV cache" in parts))

    def of(self, use: ModelUse) -> tuple[int, int]:
        """Returns the bytes between calls, and at most beyond these, of the use with a size of its KV cache."""
        cache, decoding = cache_bytes(use, self._rows), decoding_bytes(use, self._rows)
        idle, most = 0, 0
        for held, training, transition, generating, keeps_cache in self._stages:
            kept = cache if keeps_cache else 0
            idle = max(idle, held + kept)
            most = max(most, training + kept, transition + kept, generating + cache + decoding)
        return idle, most - idle


def stages(use: ModelUse) -> list[int]:
    """Returns the candidates for the pipeline stage with the highest memory: the first, with the most micro-batches in
    flight; the second, with neighbours on both sides; and the last, with the head."""
    return sorted({0, min(1, use.mesh[0] - 1), use.mesh[0] - 1})


@lru_cache(maxsize=1 << 16)
def _training_memory(use: ModelUse, rows: RowSizes, stage: int) -> tuple[int, int]:
    """Returns the bytes of a rank between calls, and the most beyond these in a stage without generation."""
    found = predict_rank(use, rows, stage)
    host = 0 if use.on_gpu else 1
    sizes = {name: each.device_bytes + host * each.host_bytes for name, each in found.items()}
    return sizes["idle"], max(sizes.values()) - sizes["idle"]


def not_dominated(options: Sequence[Option]) -> list[Option]:
    """Returns the Pareto front of options by their times, `idle` and `extra`; the first of equal ones."""
    return [options[i] for i in not_dominated_rows(costs_of(options))]


def merged(options: Sequence[Option], more: Sequence[Option]) -> list[Option]:
    """Returns the options of two lists, each without dominated ones, that are not dominated by others of both."""
    both = [*options, *more]
    return [both[i] for i in merged_rows(costs_of(options), costs_of(more))]


def costs_of(options: Sequence[Option]) -> np.ndarray:
    """Returns the costs of layouts [layouts, stages + 2]: seconds of each stage, `idle` and `extra`."""
    width = len(options[0].times) + 2 if options else 2
    return np.array([(*each.times, each.idle, each.extra) for each in options], float).reshape(-1, width)
