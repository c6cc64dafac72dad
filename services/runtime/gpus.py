"""The GPUs of this host: whether the ranks of a service compute on them, and whether the installed libraries fit
together. Imports torch only where a worker that computes with it has been imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rlhf.errors import ConfigError
from settings.service import ServiceTable

DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver shows GPUs to this process."""

_CUPY, _NCCL = re.compile(r"cupy-cuda(\d+)x"), re.compile(r"nvidia-nccl-cu\d+")
_RIGHT_EXTRA = "install one extra, cu13 or cu12, into a new environment (docs/gpus.md)"


def prepare(name: str, table: ServiceTable, environment: MutableMapping[str, str]) -> None:
    """Hides the GPUs of this host from this process where `device` of its service is cpu; else checks, on a host with
    GPUs, that torch, cupy and NCCL fit together. Must be called before anything imports torch or cupy.

    Args:
        name: Name of the service.
        table: Its table.
        environment: Environment of this process, which gets an empty CUDA_VISIBLE_DEVICES to hide GPUs.

    Raises:
        ConfigError: The libraries do not fit together.
    """
    if table.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif table.needs_torch and DRIVER.exists():
        conflict = library_conflict(*built_torch(), installed_versions())
        if conflict:
            raise ConfigError(f"services.{name}: {conflict}; {_RIGHT_EXTRA}")


def check_ranks(name: str, device: str, environment: Mapping[str, str]) -> None:
    """Checks that this host has a GPU for each of the service's ranks on it, unless they compute on the CPU. Imports
    torch. Logs a warning, on local rank 0, where torch cannot use the GPUs of the host and so the CPU is used.

    Args:
        name: Name of the service.
        device: `device` of its table.
        environment: Environment of this rank, with the number of ranks on this host.

    Raises:
        ConfigError: There is no GPU and `device` is cuda, or there are GPUs, but fewer than ranks.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("WORLD_SIZE") or 1)
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            f"services.{name}.ranks: {num_ranks} ranks on this host, which shows {num_gpus} GPU"
            f"{'s' if num_gpus > 1 else ''}; each rank needs one of its own, or set services.{name}.device to cpu"
        )
    if num_gpus or device == "cpu":
        return
    if device == "cuda":
        raise ConfigError(
            f"services.{name}.device is cuda, and torch {torch.__version__} finds no GPU on this host for its "
            f"{num_ranks} rank{'s' * (num_ranks != 1)}; allowed without one: auto, cpu"
        )
    if DRIVER.exists() and environment.get("LOCAL_RANK", "0") == "0":
        logging.warning(
            "warning: this host has NVIDIA GPUs, but torch %s cannot use them, so ranks compute on the CPU; "
            "device = 'cuda' makes this an error",
            torch.__version__,
        )


def library_conflict(torch: str, torch_cuda: str | None, installed: Mapping[str, str]) -> str:
    """Returns which libraries do not fit together; "" where all do.

    Args:
        torch: Version of torch.
        torch_cuda: Version of CUDA that torch is built for, such as "13.0"; None for a build for CPUs, or no torch.
        installed: Versions of the installed packages by normalized name.
    """
    nccls = [f"{name} {version}" for name, version in sorted(installed.items()) if _NCCL.fullmatch(name)]
    if len(nccls) > 1:
        return f"{' and '.join(nccls)} are installed, which own the same file libnccl.so.2"
    for name, version in sorted(installed.items()):
        cupy = _CUPY.fullmatch(name)
        if cupy and torch_cuda and cupy[1] != torch_cuda.partition(".")[0]:
            return f"torch {torch} is built for CUDA {torch_cuda}, and {name} {version} for CUDA {cupy[1]}"
    return ""


def built_torch() -> tuple[str, str | None]:
    """Returns the version of the installed torch, and that of the CUDA it is built for, None for a build for CPUs,
    without importing it; ("", None) where there is no torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "", None
    spec = importlib.util.spec_from_file_location("version", Path(torch.origin).parent / "version.py")
    assert spec is not None, "it ends with .py"
    assert spec.loader is not None
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return version.__version__, version.cuda


def installed_versions() -> dict[str, str]:
    """Returns the version of every installed package, by its normalized name."""
    return {
        re.sub(r"[-_.]+", "-", each.name).lower(): each.version
        for each in importlib.metadata.distributions()
        if each.name
    }
