"""Devices of services: rank r of a service takes device number r of its pool or placement. A name gpu:N, or HOST/gpu:N,
is GPU N of a host, HOST/cpu:N is on a host too; any other name only tells which services share the device. Pure
functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_GPU = re.compile(r"(?:(?P<host>.+)/)?gpu:(?P<number>0|[1-9]\d*)")
_OF_HOST = re.compile(r"(?P<host>.+)/(?:gpu|cpu):(?:0|[1-9]\d*)")
_ALMOST = re.compile(r"(?i)(?:.+/)?(?:gpu|cuda)[\s:/_-]*(?P<number>\d+)")

SHOWN_RANKS = 8
"""Most ranks of a service whose devices are written one by one."""


class Gpu(NamedTuple):
    """A GPU that a device's name is bound to.

    Attributes:
        host: Name of its host, which tells GPUs of several hosts apart; empty where there is one host.
        number: Number of the GPU on its host, from 0, as `nvidia-smi` counts.
    """

    host: str
    number: int


def gpu_of(device: str) -> Gpu | None:
    """Returns the GPU that a device's name is bound to; None for a name that is bound to none."""
    found = _GPU.fullmatch(device)
    return Gpu(found["host"] or "", int(found["number"])) if found else None


def host_of(device: str) -> str:
    """Returns the host in a device's name, HOST/gpu:N or HOST/cpu:N; empty for a name without one."""
    found = _OF_HOST.fullmatch(device)
    return found["host"] if found else ""


def check_names(key: str, devices: Sequence[str]) -> None:
    """Raises ValueError if the devices of `key`, a pool or `devices`, contain duplicates, a misspelled name of a GPU,
    or both GPUs and other devices."""
    if len(set(devices)) < len(devices):
        raise ValueError(f"{key}: a device is named twice (given: {', '.join(devices)})")
    for device in devices:
        almost = _ALMOST.fullmatch(device)
        if almost and not gpu_of(device):
            number = int(almost["number"])
            raise ValueError(
                f"{key}: {device!r} is not a valid name of a GPU; use gpu:{number} for GPU {number} of the host, or "
                f"HOST/gpu:{number} if pools contain GPUs of several hosts"
            )
    gpus = [device for device in devices if gpu_of(device)]
    others = [device for device in devices if not gpu_of(device)]
    if gpus and others:
        raise ValueError(
            f"{key}: {gpus[0]!r} is the name of a GPU and {others[0]!r} is not; either all devices or none must be GPUs"
        )


def ranks_line(devices: Sequence[str], ranks: int) -> str:
    """Returns which rank of a service is on which of its devices, as text.

    Args:
        devices: Names of the devices of the service, in order.
        ranks: Number of its ranks.
    """
    taken, others = list(devices[:ranks]), devices[ranks:]
    places = [f"rank {rank} on {device}" for rank, device in enumerate(taken)]
    if ranks > SHOWN_RANKS:
        places = [places[0], "...", places[-1]]
    turns = f"; takes turns on {', '.join(others)} too" if others else ""
    return ", ".join(places) + turns
