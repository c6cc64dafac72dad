"""Reads boxes (hyperrectangles) of tensors from Hugging Face directories, and writes tensors to them file by file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.models.directory import VALUE_HEAD_FILE
from services.models.experts import EXPERTS, ExpertNames, StackedExperts
from services.models.export import tensors_sha256
from services.storage.checkpoint import WeightShard

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 2 << 30
_VALUE_HEAD = "value_head."
_BACKBONE = "backbone."


class WeightsReader:
    """Context manager that opens the safetensors files of a Hugging Face directory and reads tensors by their names
    in the model.

    A value model can be read from the directory of a value model or of a causal language model; in the latter case
    its value head is zero.

    Raises:
        ValueError: On entry: there are no safetensors files, or they are damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open_files = ExitStack()

    def __enter__(self) -> WeightsReader:
        try:
            self._tensors = dict(self._found())
        except (SafetensorError, FileNotFoundError) as error:
            self._open_files.close()
            raise ValueError(
                f"{self._directory} has no safetensors files that can be read: {error}"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def holds(self, name: str, shape: tuple[int, ...]) -> bool:
        """Returns whether the directory has a tensor of this name (in the model) and shape."""
        stored = self._stored(name)
        return stored is not None and tuple(stored.get_shape()) == shape

    @torch.no_grad()
    def fill(self, name: str, shard: WeightShard) -> None:
        """Reads a box of a tensor into `shard.tensor`, converted to the type of that. A value head that the directory
        lacks is filled with zeros.

        Args:
            name: Name of the tensor in the model.
            shard: The box to read; its tensor is overwritten.

        Raises:
            ValueError: The directory lacks the tensor, or has it in a different shape.
        """
        stored = self._stored(name)
        if stored is None and name.startswith(_VALUE_HEAD):
            shard.tensor.zero_()
            return
        if stored is None:
            raise ValueError(f"{self._directory} lacks weights of its model, one is {name}")
        if tuple(stored.get_shape()) != shard.whole:
            raise ValueError(
                f"{self._directory} holds {name} as {stored.get_shape()}, expected {[*shard.whole]}"
            )
        if isinstance(stored, StackedExperts):
            stored.fill(shard.tensor, shard.box)
        else:
            shard.tensor.copy_(stored[shard.box])

    def _stored(self, name: str) -> Any:
        """Returns the safetensors slice of a tensor, or a `StackedExperts`, given its name in the model; None if the
        files lack it."""
        for key in _stored_names(name):
            if key in self._tensors:
                return self._tensors[key]
            for names in {*EXPERTS.values()}:
                if (found := names.stacked(key, self._tensors)) is not None:
                    return found
                if (renamed := names.stored_name(key)) in self._tensors:
                    return self._tensors[renamed]
        return None

    def _found(self) -> Iterator[tuple[str, Any]]:
        """Opens all weight files; yields the name in the file and the safetensors slice of each tensor."""
        index = self._directory / INDEX_FILE
        files = {WHOLE_FILE}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        for name in sorted(files):
            file = self._open_files.enter_context(safe_open(self._directory / name, framework="pt"))
            yield from ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 - no mapping
        if (self._directory / VALUE_HEAD_FILE).is_file():
            head = self._open_files.enter_context(
                safe_open(self._directory / VALUE_HEAD_FILE, framework="pt")
            )
            yield from ((_VALUE_HEAD + key, head.get_slice(key)) for key in head.keys())  # noqa: SIM118


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Converts a floating-point tensor to `dtype`; returns other tensors, and all if `dtype` is None, unchanged."""
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


class WeightsWriter:
    """Writes tensors, added one at a time, as the safetensors files of a Hugging Face directory.

    Args:
        directory: Existing directory.
        sizes: Bytes of every tensor that will be added, by its name in the model, in the order of the files.
        max_file_bytes: Most bytes of a file, unless a single tensor is larger. Tensors are kept in memory until all
            those of their file have been added.
        experts: Names in files of the experts of a mixture of experts; None for other models.
    """

    def __init__(
        self,
        directory: Path,
        sizes: Mapping[str, int],
        max_file_bytes: int = MAX_FILE_BYTES,
        experts: ExpertNames | None = None,
    ) -> None:
        self._directory, self._experts = directory, experts
        self._total_bytes = sum(size for name, size in sizes.items() if not name.startswith(_VALUE_HEAD))
        self._files = _file_of(sizes, max_file_bytes)
        self._missing = Counter(self._files.values())
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._weight_map: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor to host memory, and writes its file if all tensors of the file have been added.

        Raises:
            OSError: The file could not be written.
        """
        file, key = self._files[name], _file_key(name)
        copied = tensor.detach().to("cpu", copy=True).contiguous()
        stored = self._experts.stored(key, copied) if self._experts else {key: copied}
        self._waiting.setdefault(file, {}).update(stored)
        self._weight_map |= dict.fromkeys(stored, file)
        self._missing[file] -= 1
        if not self._missing[file]:
            try:
                save_file(self._waiting.pop(file), self._directory / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{self._directory / file} could not be written: {error}") from error

    def finish(self) -> None:
        """Writes the index file if there are several files. Every tensor must have been added.

        Raises:
            OSError: The index could not be written.
        """
        assert not self._waiting, "every tensor was added"
        weight_map = {key: file for key, file in self._weight_map.items() if file != VALUE_HEAD_FILE}
        if set(weight_map.values()) != {WHOLE_FILE}:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_weights(
    directory: Path,
    sizes: Mapping[str, int],
    gathered: Iterable[tuple[str, Tensor]],
    experts: ExpertNames | None = None,
) -> str:
    """Writes whole tensors as the safetensors files of a Hugging Face directory; returns one sha256 (hex) over all,
    as `services.models.export.tensors_sha256`.

    Args:
        directory: Existing directory.
        sizes: Bytes of every tensor, by its name in the model.
        gathered: Name and whole tensor of each, in the order of `sizes`.
        experts: Names in files of the experts of a mixture of experts. Default: the model is none.

    Raises:
        OSError: A file could not be written.
    """
    writer = WeightsWriter(directory, sizes, MAX_FILE_BYTES, experts)

    def written() -> Iterator[tuple[str, Tensor]]:
        for name, whole in gathered:
            writer.add(name, whole)
            yield name, whole

    sha256 = tensors_sha256(written())
    writer.finish()
    return sha256


def _file_of(sizes: Mapping[str, int], max_file_bytes: int) -> dict[str, str]:
    """Returns the file name of each tensor, by name. Consecutive tensors share a file up to `max_file_bytes`; a value
    head has its own file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if name.startswith(_VALUE_HEAD):
            continue
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    count = len(groups)
    files = (
        [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else [WHOLE_FILE]
    )
    of_backbone = {name: file for group, file in zip(groups, files, strict=True) for name in group}
    return of_backbone | {name: VALUE_HEAD_FILE for name in sizes if name.startswith(_VALUE_HEAD)}


def _stored_names(name: str) -> tuple[str, ...]:
    """Returns the names that a tensor of the model may have in a file: that of the backbone of a value model alone
    also that in a causal language model."""
    if not name.startswith(_BACKBONE):
        return (name,)
    path = name.removeprefix(_BACKBONE)
    return (path, f"model.{path}")


def _file_key(name: str) -> str:
    """Returns the name in a file of a tensor, given its name in the model."""
    return name.removeprefix(_BACKBONE).removeprefix(_VALUE_HEAD)
