"""Training meshes p-t-d as a configuration names them, and which of them a model fits on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Sizes = tuple[int, int, int]
"""Pipeline, tensor and data size."""

NUM_SUGGESTED = 3

VLLM_HEAD_DIM = 32
"""Smallest attention head that vLLM has kernels for on a CPU."""


def parse(text: str) -> Sizes:
    """The sizes in "p-t-d".

    Raises:
        ValueError: The text is not three numbers of at least 1.
    """
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"mesh {text!r} is not p-t-d: pipeline, tensor and data size, for example 1-2-2")
    pipeline, tensor, data = map(int, parts)
    return pipeline, tensor, data


def check(text: str, ranks: int, model: Path) -> None:
    """Checks that a mesh has as many ranks as there are, and that the model divides over it, as far as its directory
    can be read.

    Raises:
        ValueError: It does not; the text says why, and the nearest meshes that do.
    """
    sizes = parse(text)
    shape = _shape_of(model)
    reason = ""
    if math.prod(sizes) != ranks:
        reason = f"has {math.prod(sizes)} ranks, and ranks is {ranks}"
    reason = reason or _misfit(sizes, shape)
    if reason:
        fitting = [other for other in _all_sizes(ranks) if not _misfit(other, shape)]
        nearest = sorted(fitting, key=lambda other: _distance(other, sizes))[:NUM_SUGGESTED]
        names = ", ".join("-".join(map(str, other)) for other in nearest)
        raise ValueError(f"mesh {text} {reason}; the nearest that fit: {names}")


def check_vllm(tensor_parallel: int, text: str, model: Path) -> None:
    """Checks that vLLM can generate with a model, as far as its directory can be read, on groups of so many ranks of a
    training mesh; "" is the mesh whose ranks all have rows of their own.

    Raises:
        ValueError: It cannot; the text says why.
    """
    pipeline, tensor, _ = parse(text) if text else (1, 1, 1)
    if pipeline * tensor % tensor_parallel:
        raise ValueError(
            f"vllm.tensor_parallel {tensor_parallel} needs groups of as many ranks with the same rows, and those of "
            + (f"mesh {text} are {pipeline * tensor}" if text else "engine fsdp are 1")
        )
    shape = _shape_of(model)
    heads, key_value_heads = (
        shape.get(f"num_{name}_heads", tensor_parallel) for name in ("attention", "key_value")
    )
    for key, size in (
        ("num_attention_heads", heads),
        ("intermediate_size", shape.get("intermediate_size", 0)),
    ):
        if size % tensor_parallel:
            raise ValueError(
                f"vllm.tensor_parallel {tensor_parallel} does not fit the model, which has {key} {size}"
            )
    if key_value_heads % tensor_parallel and tensor_parallel % key_value_heads:
        raise ValueError(
            f"vllm.tensor_parallel {tensor_parallel} does not fit the model, which has num_key_value_heads "
            f"{key_value_heads}: one must divide the other"
        )
    head_dim = shape.get("head_dim") or shape.get("hidden_size", VLLM_HEAD_DIM * heads) // heads
    if head_dim < VLLM_HEAD_DIM:
        raise ValueError(
            f"rollout_engine vllm needs attention heads of at least {VLLM_HEAD_DIM} dimensions, and the model's have "
            f"{head_dim}; use rollout_engine hf"
        )


def _misfit(sizes: Sizes, shape: Mapping[str, int]) -> str:
    """Why a model does not divide over a mesh; empty where it does."""
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


def _shape_of(model: Path) -> dict[str, int]:
    """The sizes in a model's config.json; none where it cannot be read, which is told elsewhere."""
    try:
        config: Any = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if isinstance(value, int)}


def _all_sizes(ranks: int) -> Iterator[Sizes]:
    for pipeline in range(1, ranks + 1):
        for tensor in range(1, ranks // pipeline + 1):
            if ranks % (pipeline * tensor) == 0:
                yield pipeline, tensor, ranks // (pipeline * tensor)


def _distance(sizes: Sizes, wanted: Sizes) -> float:
    """By how many factors of two, over all axes, two meshes differ."""
    return sum(abs(math.log2(size / other)) for size, other in zip(sizes, wanted, strict=True))
