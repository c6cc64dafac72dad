"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layers: Iterable[nn.Module]) -> None:
    """Enables activation checkpointing for each layer: its forward pass saves only its input, and the backward pass
    runs it again, bit for bit.

    The layer's `forward` is replaced, not the layer wrapped, so that hooks around it, such as FSDP's gather of weights,
    do not run again.
    """
    for layer in layers:
        layer.forward = _recomputing(layer.forward)


def _recomputing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function that computes as `forward`, with activation checkpointing while gradients are enabled."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Models are in eval mode, so no random state needs to be preserved.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
