"""Chooses the kernels that a service computes norms, gated activations and rotary embeddings with."""

from __future__ import annotations

import logging
import time
from typing import Literal

import torch

from rlhf.errors import ConfigError
from services.compute import fused
from services.compute.layers import why_not_fused
from services.runtime.ranks import Ranks

TIMEOUT_S = 300.0
"""Most seconds that a rank waits at start until the other ranks have compiled the kernels."""


def choose_kernels(setting: Literal["auto", "eager", "compiled"], device: torch.device, ranks: Ranks) -> None:
    """Sets the kernels of this process, the same on every rank: with "auto", compiled ones if the device is a GPU and
    all ranks can use them. Collective on GPUs if `setting` is "auto".

    Raises:
        ConfigError: The kernels are to be compiled, and cannot be used on this rank.
        OutOfStep: With "auto", a rank did not come within TIMEOUT_S, or died.
    """
    if setting == "eager" or (setting == "auto" and device.type == "cpu"):
        fused.use(compiled=False)
        return
    why = why_not_fused(device)
    if setting == "compiled":
        if why:
            raise ConfigError(f"kernels: compiled ones cannot be used on this rank: {why}")
        fused.use(compiled=True)
        return
    (num_failed,) = ranks.total([bool(why)], time.monotonic() + TIMEOUT_S)
    fused.use(compiled=not num_failed)
    if why:
        logging.warning("kernels = 'auto': eager ones are used, since compiled ones cannot be: %s", why)
