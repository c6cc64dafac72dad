"""Sharded checkpoints: one safetensors file per rank, scalars in JSON, nothing pickled.

A shard is a box (hyperrectangle) of a global tensor. The header of each file has the offsets of its boxes, so a
reader copies the overlaps with the boxes that it needs, and the number of ranks may change between writing and
reading. If a rank has several boxes of one tensor, they are named NAME, NAME#1, NAME#2 and so on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nccl_transfer.refs.plans import Slice
from services.storage.publish import sync
from services.storage.written import WrittenFile, write_file

MANIFEST = "manifest.json"
_FORMAT = 1
_BOXES = "boxes"
_HEADER_ALIGNMENT = 64
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of data types in the header of a safetensors file."""
PART = "#"
"""Separates the name of a tensor from the number of a further box in the names of shards."""

Scalars = Mapping[str, int | float]
NO_SCALARS: Scalars = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class WeightShard:
    """A box (hyperrectangle) of a global tensor.

    Attributes:
        tensor: Values of the box.
        offsets: Index in the global tensor of the box's first element, per dimension.
        whole: Shape of the global tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Self:
        """Returns the box that covers a whole tensor; `tensor` is not copied."""
        return cls(tensor, (0,) * tensor.ndim, tuple(tensor.shape))

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices by which the global tensor is indexed to get this box."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))

    @property
    def place(self) -> Slice:
        """Place of this box in the global tensor."""
        return Slice.at(self.offsets, self.tensor.shape)


def file_content(shards: Mapping[str, WeightShard], allocate: Callable[[int], Tensor]) -> Tensor:
    """Copies the shards of one rank to host memory, as the content of their file: a checkpoint is copied once, and
    written as it lies there.

    Args:
        shards: Shards by name. Those on a GPU are copied without waiting for it, so the caller must wait for the GPU
            before it reads the content or changes a shard.
        allocate: Function that returns host memory of so many bytes, uint8.

    Returns:
        What `allocate` has returned, filled: a safetensors file, uint8.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            _BOXES: json.dumps({name: [shard.offsets, shard.whole] for name, shard in shards.items()})
        }
    }
    # The widest elements first: each tensor begins at a multiple of the size of its elements.
    ordered = sorted(shards.items(), key=lambda item: (-item[1].tensor.itemsize, item[0]))
    end = 0
    for name, shard in ordered:
        begin, end = end, end + shard.tensor.nbytes
        shape = [*shard.tensor.shape]
        header[name] = {"dtype": _DTYPES[shard.tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    content = allocate(8 + len(text) + end)
    content[:8].view(torch.int64)[0] = len(text)
    content[8 : 8 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    places = content[8 + len(text) :].split([shard.tensor.nbytes for _, shard in ordered])
    for place, (_, shard) in zip(places, ordered, strict=True):
        x = shard.tensor.detach()
        place.view(x.dtype).view(x.shape).copy_(x, non_blocking=True)
    return content


def write_shards(directory: Path, rank: int, content: Tensor) -> WrittenFile:
    """Writes the file of one rank's shards to an existing directory, given its content (`file_content`), and syncs it
    to disk.

    Raises:
        OSError: the file could not be written.
    """
    # By the rank that has the shards: other hosts of a shared file system cannot sync them.
    return write_file(directory / _file_name(rank), content.numpy().data)


def write_manifest(directory: Path, num_ranks: int, scalars: Scalars) -> WrittenFile:
    """Writes the manifest of a checkpoint: the number of ranks whose shards it contains, and scalars by name; syncs it
    to disk. Called on one rank."""
    manifest = {"format": _FORMAT, "num_ranks": num_ranks, "scalars": dict(scalars)}
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    sync(path)
    return WrittenFile(path)


def read_manifest(directory: Path) -> tuple[int, Scalars]:
    """Returns the number of ranks that wrote a checkpoint, and its scalars by name.

    Raises:
        FileNotFoundError: there is no checkpoint in the directory.
        ValueError: the checkpoint has another format.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint in {directory}: there is no {MANIFEST}") from None
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"checkpoint {directory} has format {manifest.get('format')}, expected {_FORMAT}")
    return manifest["num_ranks"], manifest["scalars"]


def read_shards(
    directory: Path,
    num_ranks: int,
    shards: Mapping[str, WeightShard],
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Fills shards from the overlapping boxes of a checkpoint.

    Args:
        directory: directory of the checkpoint.
        num_ranks: number of ranks that wrote the checkpoint.
        shards: boxes to fill, by name; their tensors are overwritten.
        progressed: called after each box that is copied.

    Raises:
        FileNotFoundError: the file of a rank is missing.
        ValueError: a file is damaged, or the checkpoint lacks a part of a shard, or holds a tensor in another
            shape or dtype.
    """
    missing = {name: shard.tensor.numel() for name, shard in shards.items()}
    for rank in range(num_ranks):
        path = directory / _file_name(rank)
        try:
            with safe_open(path, framework="pt") as file:
                boxes = json.loads(file.metadata()[_BOXES])
                for name, stored_name in _same_tensor(shards, boxes):
                    offsets, whole = boxes[stored_name]
                    if tuple(whole) != shards[name].whole:
                        raise ValueError(
                            f"checkpoint holds {name} as {whole}, expected {[*shards[name].whole]}"
                        )
                    missing[name] -= _copy_overlap(shards[name], file.get_slice(stored_name), offsets, name)
                    progressed()
        except SafetensorError as error:
            raise ValueError(f"checkpoint file {path} is damaged: {error}") from error
    incomplete = sorted(name for name, numel in missing.items() if numel)
    if incomplete:
        raise ValueError(
            f"checkpoint {directory} lacks {len(incomplete)} tensors, the first is {incomplete[0]}"
        )


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _same_tensor(names: Iterable[str], stored_names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields all pairs of a shard's name and a stored box's name that belong to the same tensor."""
    stored: dict[str, list[str]] = {}
    for stored_name in stored_names:
        stored.setdefault(stored_name.partition(PART)[0], []).append(stored_name)
    for name in names:
        yield from ((name, stored_name) for stored_name in stored.get(name.partition(PART)[0], ()))


def _copy_overlap(shard: WeightShard, stored, stored_offsets: list[int], name: str) -> int:
    """Copies the overlap of `stored`, a safetensors slice at `stored_offsets`, with `shard` into the shard; returns the
    number of elements copied. Raises ValueError, with `name`, where the dtypes differ."""
    own, there = shard.place, Slice.at(stored_offsets, stored.get_shape())
    common = own.intersect(there)
    if common is None:
        return 0
    values = stored[common.within(there)]
    if values.dtype != shard.tensor.dtype:
        raise ValueError(f"checkpoint holds {name} as {values.dtype}, expected {shard.tensor.dtype}")
    with torch.no_grad():
        shard.tensor[common.within(own)] = values
    return values.numel()
