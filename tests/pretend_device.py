"""A pretend accelerator: its tensors say that they are on a device of their own and compute on the CPU.

As on a GPU, operations on tensors of two devices raise, and every copy between host and device, and every wait of the
host for the device, is noted with the line that caused it. It has no streams and no memory of its own, and code for
`device.type == "cuda"` does not run on it.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from nccl_transfer.devices.tensors import DeviceBytes, DeviceTensors
from nccl_transfer.store.tensors import to_numpy_carrier, to_torch

NAME = "pretend"


class _Backend(_DummyBackendModule):
    """torch's functions of the backend. Activation checkpointing asks for `get_amp_supported_dtype` where a backend is
    registered, on whatever device it computes."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)

ROOT = Path(__file__).parent.parent
_INDEXING = dict.fromkeys(
    ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"), 1
)
"""Operators that take indices on the host too, which a GPU copies to itself; by the place of the indices."""
_WAITS = frozenset(
    (
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "_unique2",
        "unique_dim",
        "bincount",
    )
)
"""Operators whose result, or its shape, the host needs from the device."""


@dataclass(frozen=True)
class Copy:
    """A copy between host and device.

    Attributes:
        dtype, numel: Of the tensor that was copied.
        where: The line of this project that caused it, as "services/roles/x.py:12 in function".
    """

    dtype: torch.dtype
    numel: int
    where: str


@dataclass
class Log:
    """Copies and waits since `pretending` began, or since the last `clear`.

    Attributes:
        to_device, to_host: Copies in each direction.
        waits: Operator and line of each wait of the host, those of copies to the host not included.
    """

    to_device: list[Copy] = field(default_factory=list)
    to_host: list[Copy] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for noted in (self.to_device, self.to_host, self.waits):
            noted.clear()


class OnDevice(Tensor):
    """A tensor on the pretend device, whose values are in a tensor on the host."""

    host: Tensor
    noted: Log

    @staticmethod
    def __new__(cls, host: Tensor, log: Log) -> OnDevice:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "layout": host.layout}
        made = Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=DEVICE, **layout)
        made.host, made.noted = host, log
        return made

    def __repr__(self) -> str:  # type: ignore[override] - torch's has an argument
        return f"OnDevice({self.host})"

    def tolist(self) -> Any:
        self.noted.to_host.append(Copy(self.dtype, self.numel(), caller()))
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = next(x.noted for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice))
        return _run(log, func, args, kwargs or {})


class PretendTensors(DeviceTensors):
    """Tensors of the device for the store of a rank, whose arena is in memory of the host (`HostCuda`)."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, OnDevice)

    def stream(self) -> int:
        return 7

    def pointer(self, tensor: OnDevice) -> int:
        return tensor.host.data_ptr()

    def tensor(self, memory: DeviceBytes, dtype: str, shape: Sequence[int]) -> Tensor:
        mapped = (ctypes.c_uint8 * memory.nbytes).from_address(memory.pointer)
        mapped.memory = memory  # type: ignore[attr-defined] - keeps it
        flat = torch.frombuffer(mapped, dtype=getattr(torch, dtype)) if memory.nbytes else torch.empty(0)
        return OnDevice(flat.reshape(tuple(shape)), self._log)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def upload(self, array: np.ndarray, dtype: str) -> Tensor:
        return to_torch(array, dtype).to(DEVICE)

    def download(self, tensor: Tensor) -> np.ndarray:
        return to_numpy_carrier(tensor)[0]


class _Mode(TorchDispatchMode):
    """Passes every operator to `_run`, those that make tensors included."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._can_decompose():
            return _run(self._log, func, args, kwargs or {})
        with self:  # in inference mode, operators come here before torch has split them into simpler ones
            return func.decompose(*args, **kwargs or {})


@contextmanager
def pretending() -> Iterator[Log]:
    """Context manager in which tensors can be made on `DEVICE` and moved to it, on the calling thread and in backward
    passes that it starts; yields the log of copies and waits."""
    log = Log()
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(..., device=DEVICE) is then made by a copy that is seen
    try:
        with _Mode(log):
            yield log
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def caller() -> str:
    """Returns the innermost line of the project on the stack, as in `Copy.where`; "?" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "services") or (path.is_relative_to(ROOT) and "test_" in path.name):
            return f"{path.relative_to(ROOT)}:{frame.lineno} in {frame.name}"
    return "?"


def _run(log: Log, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the host's tensors; returns its result, on the device if that is where it belongs."""
    namespace, name = func._schema.name.split("::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_device = [x for x in tensors if isinstance(x, OnDevice)]
    if name == "_to_copy":
        return _copied(log, func, args, kwargs)
    if name == "copy_":
        _note(log, args[1], to_device=isinstance(args[0], OnDevice))
    elif on_device:
        _check_devices(log, namespace, name, args, tensors)
        if name in _WAITS or _has_mask(name, args):
            log.waits.append(f"{name} at {caller()}")
    wanted, kwargs = kwargs.get("device"), {key: x for key, x in kwargs.items() if key != "pin_memory"}
    is_ours = bool(on_device) if wanted is None else torch.device(wanted).type == NAME
    if is_ours and wanted is not None:
        kwargs["device"] = torch.device("cpu")
    result = func(*tree_map_only(OnDevice, _host, args), **tree_map_only(OnDevice, _host, kwargs))
    if not is_ours:
        return result
    known = {id(x.host): x for x in on_device}  # an operator in place returns its argument
    # A view is an inference tensor where what it views is one, also in inference mode.
    is_inference = (
        on_device[0].is_inference() if func.is_view and on_device else torch.is_inference_mode_enabled()
    )
    with torch.inference_mode(is_inference):
        return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else OnDevice(x, log), result)


def _host(x: OnDevice) -> Tensor:
    return x.host


def _copied(log: Log, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Runs `_to_copy`, which changes the device or the type of a tensor, or both."""
    source, wanted = args[0], kwargs.get("device")
    stays = isinstance(source, OnDevice) if wanted is None else torch.device(wanted).type == NAME
    _note(log, source, to_device=stays)
    same = {key: x for key, x in kwargs.items() if key not in ("device", "pin_memory")}
    copied = func(source.host if isinstance(source, OnDevice) else source, *args[1:], **same)
    return OnDevice(copied, log) if stays else copied


def _note(log: Log, source: Tensor, *, to_device: bool) -> None:
    """Notes a copy of `source`, if it crosses between host and device."""
    if isinstance(source, OnDevice) != to_device:
        copy = Copy(source.dtype, source.numel(), caller())
        (log.to_device if to_device else log.to_host).append(copy)


def _check_devices(log: Log, namespace: str, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Raises RuntimeError if an operator mixes tensors of host and device, as torch does: except scalars, and indices,
    which it copies to the device."""
    if namespace == "c10d":  # collectives over several backends
        return
    indices = tree_leaves(args[_INDEXING[name]]) if name in _INDEXING else []
    for x in tensors:
        if isinstance(x, OnDevice) or not x.dim():
            continue
        if any(x is index for index in indices):
            _note(log, x, to_device=True)
            continue
        where = ", ".join(f"{x.device}{list(x.shape)}" for x in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {where}")


def _has_mask(name: str, args: Any) -> bool:
    """Returns whether an operator indexes with a mask, whose positions the host has to count, or repeats elements as
    often as a tensor says."""
    if name == "repeat_interleave":
        return True
    indices = tree_leaves(args[_INDEXING[name]]) if name in _INDEXING else []
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices)
