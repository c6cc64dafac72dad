"""Files of checkpoints: content that the library of safetensors reads, and writes past the page cache."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.engines.snapshots import own_mapping
from services.storage import written
from services.storage.checkpoint import WeightShard, file_content, read_shards, write_shards
from services.storage.written import WrittenFile, write_file

CPU = torch.device("cpu")
SIZES = (0, 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5, (40 << 20) + 7)


def copied(shards: dict[str, WeightShard]) -> torch.Tensor:
    return file_content(shards, lambda num_bytes: own_mapping(num_bytes, CPU))


def test_the_content_of_a_file_is_what_the_library_reads(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
        "transposed": torch.randn(4, 3).t(),
        "int8": torch.arange(7, dtype=torch.int8),
        "int64": torch.arange(5),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "part": whole[2:4, 1:5],
    }
    shards = {
        name: WeightShard.of_whole(x.clone() if name != "transposed" else x) for name, x in tensors.items()
    }
    shards["part"] = WeightShard(whole[2:4, 1:5], (2, 1), (6, 8))
    content = copied(shards)
    file = write_shards(tmp_path, 0, content)
    read = load_file(file.path)
    assert read.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (read[name].dtype, read[name].shape) == (x.dtype, x.shape)
        assert torch.equal(read[name], x)
    back = {"part": WeightShard(torch.zeros(2, 4), (2, 1), (6, 8))}
    read_shards(tmp_path, 1, back)
    assert torch.equal(back["part"].tensor, whole[2:4, 1:5])


def test_a_rank_without_shards_writes_a_file_that_is_read(tmp_path: Path) -> None:
    assert load_file(write_shards(tmp_path, 0, copied({})).path) == {}
    read_shards(tmp_path, 1, {})


def test_the_content_is_a_copy_that_later_changes_do_not_reach(tmp_path: Path) -> None:
    x = torch.arange(1000.0)
    content = copied({"x": WeightShard.of_whole(x)})
    x.zero_()
    write_shards(tmp_path, 0, content)
    assert load_file(tmp_path / "rank-00000.safetensors")["x"].tolist() == list(range(1000))


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_file_has_every_byte_and_its_sha256_wherever_the_memory_begins(
    num_bytes: int, offset: int, tmp_path: Path
) -> None:
    memory = memoryview(mmap.mmap(-1, num_bytes + 4096))[offset : offset + num_bytes]
    memory[:] = os.urandom(num_bytes)
    path = tmp_path / "file"
    path.write_bytes(b"longer than nothing")
    file = write_file(path, memory)
    assert path.read_bytes() == memory
    assert file == WrittenFile(path, hashlib.sha256(memory).hexdigest())
    assert WrittenFile(path).digest() == file.sha256


def no_direct_writes(descriptor: int, command: int, argument: int = 0) -> int:
    if command == written.fcntl.F_SETFL and argument & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return 0


def test_a_file_system_without_direct_writes_gets_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = own_mapping(3 * mmap.PAGESIZE + 1, CPU).random_()
    with monkeypatch.context() as patched:
        patched.setattr(written.fcntl, "fcntl", no_direct_writes)
        write_file(tmp_path / "file", content.numpy().data)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()


def test_a_file_system_that_refuses_a_direct_write_gets_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    content = own_mapping(3 * mmap.PAGESIZE + 1, CPU).random_()
    with monkeypatch.context() as patched:
        patched.setattr(written.os, "write", refuse)
        write_file(tmp_path / "file", content.numpy().data)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()


def test_a_direct_write_that_ends_within_a_page_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write

    def cut(descriptor: int, content: memoryview) -> int:
        flags = written.fcntl.fcntl(descriptor, written.fcntl.F_GETFL)
        written.fcntl.fcntl(descriptor, written.fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            return whole(descriptor, content[:100])
        finally:
            written.fcntl.fcntl(descriptor, written.fcntl.F_SETFL, flags)

    content = own_mapping(3 * mmap.PAGESIZE + 1, CPU).random_()
    with monkeypatch.context() as patched:
        patched.setattr(written.os, "write", cut)
        write_file(tmp_path / "file", content.numpy().data)
    assert (tmp_path / "file").read_bytes() == content.numpy().tobytes()


def test_a_full_disk_is_an_error_of_the_write(tmp_path: Path) -> None:
    content = own_mapping(1 << 20, CPU)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "file", content.numpy().data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
