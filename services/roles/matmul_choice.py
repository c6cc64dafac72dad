"""Chooses the library that a service multiplies matrices with on CPUs: the configured one, or the faster one by
measurements of all ranks."""

from __future__ import annotations

import time
from typing import Literal

from rlhf.errors import ConfigError
from services.compute import matmul
from services.runtime.ranks import Ranks

TIMEOUT_S = 60.0
"""Most seconds that a rank waits at start for the measurements of the other ranks."""


def choose_matmul(setting: Literal["auto", "mkl", "onednn"], ranks: Ranks) -> None:
    """Sets the library that this process multiplies matrices with on the CPU, the same one on every rank. Collective
    if `setting` is "auto".

    Args:
        setting: Library to use; "auto" measures both on all ranks and takes the faster one.
        ranks: Ranks of the service.

    Raises:
        ConfigError: This build of torch does not have the library.
        OutOfStep: With "auto", a rank did not measure within TIMEOUT_S, or died.
    """
    if setting == "auto":
        setting = matmul.faster(*ranks.total(matmul.measure(), time.monotonic() + TIMEOUT_S))
    try:
        matmul.use(setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error
