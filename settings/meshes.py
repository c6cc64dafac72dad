"""Meshes of training, p-t-d, and of generation, pg-tg-dg-d, as a configuration names them, and the models that divide
over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

Sizes = tuple[int, int, int]
"""Sizes (p, t, d) of a training mesh: pipeline, tensor and data size."""
GenerationSizes = tuple[int, int, int, int]
"""Sizes (pg, tg, dg, d) of a generation mesh: pipeline, tensor, micro-data and data size."""
Shape = Mapping[str, int]
"""Integers of a model's config.json by key, such as num_hidden_layers."""

NO_SHAPE: Shape = MappingProxyType({})
"""Shape of a model whose config.json cannot be read; every check passes it."""

GENERATION_KEY = "generation_mesh"

NUM_SUGGESTED = 3

VLLM_HEAD_DIM = 32
"""Smallest size of an attention head (head_dim) that vLLM has CPU kernels for."""


def parse(text: str, key: str = "mesh") -> Sizes:
    """Parses a training mesh "p-t-d" into its three sizes; or one of the same form in another key.

    Raises:
        ValueError: The text is not three integers of at least 1.
    """
    sizes = _numbers(text)
    if len(sizes) != 3:
        raise ValueError(f"{key} {text!r} is not p-t-d: pipeline, tensor and data size, for example 1-2-2")
    pipeline, tensor, data = sizes
    return pipeline, tensor, data


def parse_generation(text: str) -> GenerationSizes:
    """Parses a generation mesh "pg-tg-dg-d" into its four sizes.

    Raises:
        ValueError: The text is not four integers of at least 1.
    """
    sizes = _numbers(text)
    if len(sizes) != 4:
        raise ValueError(
            f"generation_mesh {text!r} is not pg-tg-dg-d: pipeline, tensor, micro-data and data size, for example "
            "1-1-2-2"
        )
    pipeline, tensor, micro_data, data = sizes
    return pipeline, tensor, micro_data, data


def generation_sizes(text: str, mesh: str) -> tuple[int, int]:
    """Returns the pipeline and tensor size of generation: pg and tg of generation mesh `text`, or p and t of training
    mesh `mesh` where `text` is empty. Where `mesh` is empty, for data ranks alone, `text` has the form p-t-d, and an
    empty one has the sizes 1 and 1. Raises ValueError where the one that is used cannot be parsed."""
    if not mesh:
        return parse(text, GENERATION_KEY)[:2] if text else (1, 1)
    return parse_generation(text)[:2] if text else parse(mesh)[:2]


def check(text: str, ranks: int, shape: Shape = NO_SHAPE, key: str = "mesh") -> None:
    """Checks that a training mesh "p-t-d" has `ranks` ranks, and that a model of shape `shape` can be divided over
    it; or one of the same form in another key.

    Raises:
        ValueError: It has another number of ranks or the model does not fit; the text says why, and lists the nearest
            meshes that fit.
    """
    sizes = parse(text, key)
    reason = ""
    if math.prod(sizes) != ranks:
        reason = f"has {math.prod(sizes)} ranks, and ranks is {ranks}"
    reason = reason or _misfit(sizes, shape)
    if reason:
        fitting = [other for other in _all_sizes(ranks) if not _misfit(other, shape)]
        raise ValueError(f"{key} {text} {reason}; the nearest that fit: {_nearest(fitting, sizes)}")


def check_generation(text: str, mesh: str) -> None:
    """Checks that the ranks of training mesh `mesh` can generate on generation mesh `text`: each generation shard
    consists of whole training shards, and the data size is the same (HybridFlow, section 5).

    Raises:
        ValueError: The meshes do not fit; the text says why, and lists the nearest generation meshes that do.
    """
    pipeline, tensor, micro_data, data = sizes = parse_generation(text)
    p, t, d = parse(mesh)
    reason = ""
    if p % pipeline:
        reason = f"its {pipeline} pipeline stages do not divide the {p} of mesh {mesh}"
    elif t % tensor:
        reason = f"its tensor size {tensor} does not divide {t}, that of mesh {mesh}"
    elif data != d:
        reason = f"its data size {data} is not {d}, that of mesh {mesh}"
    elif pipeline * tensor * micro_data != p * t:
        reason = (
            f"{pipeline} x {tensor} x {micro_data} is not {p * t}, the ranks of a data rank of mesh {mesh}"
        )
    if reason:
        fitting = [
            (pg, tg, p * t // (pg * tg), d)
            for pg in range(1, p + 1)
            for tg in range(1, t + 1)
            if not (p % pg or t % tg)
        ]
        raise ValueError(
            f"generation_mesh {text}: {reason}; the nearest that fit: {_nearest(fitting, sizes)}"
        )


def check_sequence_parallel(ranks: int, shape: Shape) -> None:
    """Checks that the attention heads of a model can be sharded over a sequence-parallel group of `ranks` ranks: this
    number has to divide the heads of queries, and to divide the heads of keys and values or be a multiple of them.

    Raises:
        ValueError: They cannot; the text says why, and lists the numbers of ranks that can.
    """
    heads = shape.get("num_attention_heads", ranks)
    key_heads = shape.get("num_key_value_heads", heads)

    def fits(size: int) -> bool:
        return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)

    if not fits(ranks):
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
        raise ValueError(
            f"sequence_parallel: {heads} attention heads and {key_heads} key-value heads cannot be dealt out to "
            f"{ranks} ranks; allowed: {allowed}"
        )


def check_vllm(mesh: str, generation_mesh: str, shape: Shape = NO_SHAPE) -> None:
    """Checks that vLLM can generate with a model: without pipeline stages, with sizes that the tensor size divides,
    and attention heads of at least `VLLM_HEAD_DIM`.

    Args:
        mesh: Training mesh "p-t-d"; empty: data ranks only.
        generation_mesh: Generation mesh "pg-tg-dg-d", or "p-t-d" where `mesh` is empty; empty: the sizes of `mesh`.
        shape: Shape of the model. Default: unknown, which passes.

    Raises:
        ValueError: vLLM cannot generate with the model; the text says why.
    """
    pipeline, tensor_parallel = generation_sizes(generation_mesh, mesh)
    if pipeline > 1:
        p, t, d = parse(mesh or generation_mesh)
        instead = f"1-{t}-{p}-{d}" if mesh else f"1-{t}-{p * d}"
        raise ValueError(
            f"rollout_engine vllm generates without pipeline stages, and generation_mesh {generation_mesh or mesh} has "
            f"{pipeline}; for example generation_mesh {instead}"
        )
    heads = shape.get("num_attention_heads", tensor_parallel)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = shape.get(key, 0)
        if size % tensor_parallel:
            raise ValueError(
                f"rollout_engine vllm on {tensor_parallel} tensor ranks does not fit the model, which has {key} {size}"
            )
    head_dim = shape.get("head_dim") or shape.get("hidden_size", VLLM_HEAD_DIM * heads) // heads
    if head_dim < VLLM_HEAD_DIM:
        raise ValueError(
            f"rollout_engine vllm needs attention heads of at least {VLLM_HEAD_DIM} dimensions, and the model's have "
            f"{head_dim}; use rollout_engine hf"
        )


def check_alone(rollout_engine: str, mesh: str, generation_mesh: str) -> None:
    """Checks that each rank generates alone, with whole weights.

    Args:
        rollout_engine: Name of the rollout engine, for the message.
        mesh, generation_mesh: As in `check_vllm`.

    Raises:
        ValueError: Several ranks generate together on the generation mesh.
    """
    pipeline, tensor = generation_sizes(generation_mesh, mesh)
    if pipeline * tensor > 1:
        p, t, d = parse(mesh or generation_mesh)
        instead = f"use generation_mesh 1-1-{p * t}-{d}" if mesh else "leave it empty"
        raise ValueError(
            f"rollout_engine {rollout_engine} takes whole weights, and {pipeline * tensor} ranks share them on "
            f"generation_mesh {generation_mesh or mesh}; {instead}"
        )


def _misfit(sizes: Sizes, shape: Shape) -> str:
    """Returns the reason that a model cannot be divided over a training mesh; empty where it can."""
    pipeline, tensor, _ = sizes
    divisors = {
        "num_hidden_layers": (pipeline, "layers", "stages"),
        "num_attention_heads": (tensor, "attention heads", "tensor ranks"),
        "num_key_value_heads": (tensor, "key-value heads", "tensor ranks"),
        "intermediate_size": (tensor, "hidden units of a feed-forward layer", "tensor ranks"),
    }
    for key, (parts, what, over) in divisors.items():
        if shape.get(key, 0) % parts:
            return f"does not fit the model: its {shape[key]} {what} cannot be dealt out to {parts} {over}"
    return ""


def _all_sizes(ranks: int) -> Iterator[Sizes]:
    for pipeline in range(1, ranks + 1):
        for tensor in range(1, ranks // pipeline + 1):
            if ranks % (pipeline * tensor) == 0:
                yield pipeline, tensor, ranks // (pipeline * tensor)


def _numbers(text: str) -> tuple[int, ...]:
    """Parses integers of at least 1 that are joined by dashes. Returns an empty tuple for any other text."""
    parts = text.split("-")
    return tuple(map(int, parts)) if all(part.isdecimal() and int(part) > 0 for part in parts) else ()


def _nearest(fitting: Iterable[Sequence[int]], wanted: Sequence[int]) -> str:
    nearest = sorted(fitting, key=lambda other: _distance(other, wanted))[:NUM_SUGGESTED]
    return ", ".join("-".join(map(str, other)) for other in nearest)


def _distance(sizes: Sequence[int], wanted: Sequence[int]) -> float:
    """Returns the distance of two meshes: the sum over their axes of |log2(size / other size)|."""
    return sum(abs(math.log2(size / other)) for size, other in zip(sizes, wanted, strict=True))
