"""The matmul library of a service: the configured one, or the one that all ranks together measured as faster."""

from __future__ import annotations

import time
from typing import Literal

from rlhf.errors import ConfigError
from services.compute import matmul
from services.runtime.ranks import Ranks

TIMEOUT_S = 60.0
"""Longest wait at start for the measurements of the other ranks."""


def choose_matmul(setting: Literal["auto", "mkl", "onednn"], ranks: Ranks) -> None:
    """Sets the library of this process, the same on every rank. Collective where the setting is "auto".

    Raises:
        ConfigError: This build of torch does not have the configured library.
    """
    if setting == "auto":
        setting = matmul.faster(*ranks.total(matmul.measure(), time.monotonic() + TIMEOUT_S))
    try:
        matmul.use(setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error
