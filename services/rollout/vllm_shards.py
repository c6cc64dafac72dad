"""Loads the weight shards of a generation mesh into vLLM's modules.

vLLM fuses layers with the same input (q, k, v and gate, up) and repacks the fused weights; its loaders take whole
tensors. The shard of a fused layer is the concatenation of its layers' shards, so each module is filled here as soon as
the shards of all its layers are there.
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
    """A module of vLLM, and the checkpoint's weights that its parameters consist of.

    Attributes:
        module: The module.
        sources: For each parameter, by name, the names of the weights that are concatenated to it, in order.
    """

    module: nn.Module
    sources: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> set[str]:
        """Names of all weights of the checkpoint that the module's parameters consist of."""
        return {name for names in self.sources.values() for name in names}


@torch.no_grad()
def load_parts(model: nn.Module, layouts: Mapping[str, Layout], parts: Iterable[tuple[str, Tensor]]) -> None:
    """Replaces all weights of this rank's vLLM model by its generation shards, which are copied.

    Args:
        model: vLLM's model.
        layouts: Layouts of the checkpoint's tensors on the generation mesh, by name.
        parts: Name and tensor of each of this rank's shards. Always run to its end, since it may be collective.
            Shards are kept only until all shards of their module are there.

    Raises:
        ValueError: A shard belongs to no parameter, or has another shape, or a parameter's shard is missing.
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
        # Other ranks wait in the iterator's collectives, even if this rank failed.
        deque(parts, maxlen=0)
    check_names(came, {name for module in modules for name in module.names})


def _sources(path: str, module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, tuple[str, ...]]:
    """Returns, for each parameter of a module (not of its children), the names of the checkpoint's weights that it
    consists of."""
    parent, _, last = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    sources = {
        kind: tuple(f"{prefix}{layer}.{kind}" for layer in FUSED.get(last, (last,)))
        for kind, _ in module.named_parameters(recurse=False)
    }
    # A tied output layer has no weights of its own in the checkpoint.
    tied = tuple(name for name, layout in layouts.items() if layout.tied)
    return {kind: tied if tied and names == ("lm_head.weight",) else names for kind, names in sources.items()}


def _fill(module: _Module, parts: Mapping[str, Tensor]) -> None:
    """Sets a module's parameters to the concatenation of their shards, given by the checkpoint's names, and lets vLLM
    repack them."""
    for kind, names in module.sources.items():
        fused = torch.cat([parts[name] for name in names])
        parameter = getattr(module.module, kind)
        if parameter.shape == fused.shape:
            parameter.copy_(fused)
        elif not parameter.numel():
            # On a CPU, vLLM keeps only the packed form of a weight.
            setattr(module.module, kind, nn.Parameter(fused, requires_grad=False))
        else:
            # Not replaced: CUDA graphs would go on reading the memory of the old one.
            raise ValueError(
                f"{' + '.join(names)}: this rank's shard has shape {list(fused.shape)}, in vLLM it has "
                f"{list(parameter.shape)}"
            )
    repack = getattr(getattr(module.module, "quant_method", None), "process_weights_after_loading", None)
    if repack is not None:
        repack(module.module)
