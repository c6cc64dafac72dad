"""Move the memory under tensors to the host and back, while the tensors and all views of them stay what they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Parked:
    """A storage that was emptied, and its bytes in host memory."""

    storage: torch.UntypedStorage
    host: torch.UntypedStorage


def park(tensors: Iterable[Tensor]) -> list[Parked]:
    """Copy the storages of tensors to the host and free them; until `unpark` nothing may read the tensors."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
    parked = []
    for storage in storages.values():
        host = torch.UntypedStorage(storage.nbytes())
        host.copy_(storage)
        storage.resize_(0)
        parked.append(Parked(storage, host))
    return parked


def unpark(parked: Iterable[Parked]) -> None:
    """Give the tensors their memory back, with the same bits."""
    for item in parked:
        item.storage.resize_(item.host.nbytes())
        item.storage.copy_(item.host)


def num_bytes(parked: Iterable[Parked]) -> int:
    return sum(item.host.nbytes() for item in parked)
