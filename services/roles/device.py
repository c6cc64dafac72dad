"""The device that a rank computes on."""

from __future__ import annotations

import os

import torch

from rlhf.errors import ConfigError


def rank_device() -> torch.device:
    """Returns this rank's device: the GPU whose index is LOCAL_RANK, or the CPU on a host without GPUs. Makes the GPU
    torch's current device of this thread, and its matrix products of float32 use TF32, which has 10 bits of mantissa.

    Raises:
        ConfigError: The host has no GPU with that index.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"ranks: local rank {local_rank} has no GPU, this host shows {num_gpus}; each rank of a service on a "
            "host needs one of its own, or device = 'cpu' for all ranks to compute on the CPU"
        )
    device = torch.device("cuda", local_rank)
    use_device(device)
    torch.set_float32_matmul_precision("high")
    return device


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of the calling thread; does nothing for a CPU. Each thread that touches CUDA has
    to call this: a thread's current device is GPU 0 at first, and kernels, streams and allocations without a device
    of their own go to the current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_identity(device: torch.device) -> dict[str, str]:
    """Returns the fields `device` and `device_uuid` of RankInfo, by name: ("cuda:0", "GPU-...") or ("cpu", "")."""
    if device.type != "cuda":
        return {"device": "cpu", "device_uuid": ""}
    return {"device": str(device), "device_uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}"}
