"""Parts of weights, as a generation mesh keeps them, into vLLM's modules.

vLLM fuses layers that read the same input (q, k, v and gate, up) and repacks what it has fused, for which its loaders
want whole tensors. A part of a fused layer is its layers' parts end to end, so each module is filled here as soon as
the parts of all its layers have come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.rollout.base import check_names
from services.storage.layout import Layout

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class _Module:
    """A module of vLLM, and the names of the weights that make each of its parameters."""

    module: nn.Module
    sources: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> set[str]:
        return {name for names in self.sources.values() for name in names}


@torch.no_grad()
def load_parts(model: nn.Module, layouts: Mapping[str, Layout], parts: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a vLLM model of this rank.

    Args:
        layouts: How ranks keep the tensors of the checkpoint in generation.
        parts: Of this rank, by name; always run to its end. No more of them is held than makes a module.

    Raises:
        ValueError: A part has no place, or did not come.
    """
    modules = [
        _Module(module, sources)
        for path, module in model.named_modules()
        if (sources := _sources(path, module, layouts))
    ]
    came: set[str] = set()
    waiting: dict[str, Tensor] = {}
    parts = iter(parts)
    try:
        for name, part in parts:
            came.add(name)
            waiting[name] = part.t() if layouts[name].transposed else part
            for module in [module for module in modules if name in module.names]:
                if module.names <= waiting.keys():
                    _fill(module, waiting)
            unfilled = {name for module in modules if not module.names <= came for name in module.names}
            waiting = {name: part for name, part in waiting.items() if name in unfilled}
    finally:
        # Other ranks wait in the iterator's collectives, whatever has happened here.
        deque(parts, maxlen=0)
    check_names(came, {name for module in modules for name in module.names})


def _sources(path: str, module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, tuple[str, ...]]:
    """The weights of the checkpoint that make each parameter of a module's own."""
    parent, _, last = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    sources = {
        kind: tuple(f"{prefix}{layer}.{kind}" for layer in FUSED.get(last, (last,)))
        for kind, _ in module.named_parameters(recurse=False)
    }
    # The output layer that the embedding is tied to has no weights of its own in the checkpoint.
    tied = tuple(name for name, layout in layouts.items() if layout.tied)
    return {kind: tied if tied and names == ("lm_head.weight",) else names for kind, names in sources.items()}


def _fill(module: _Module, parts: Mapping[str, Tensor]) -> None:
    """Put a module's parts in place, and have vLLM repack them where it does."""
    for kind, names in module.sources.items():
        fused = torch.cat([parts[name] for name in names])
        parameter = getattr(module.module, kind)
        if parameter.shape == fused.shape:
            parameter.copy_(fused)
        else:
            # On a CPU only the packed form is left of a weight.
            setattr(module.module, kind, nn.Parameter(fused, requires_grad=False))
    repack = getattr(getattr(module.module, "quant_method", None), "process_weights_after_loading", None)
    if repack is not None:
        repack(module.module)
