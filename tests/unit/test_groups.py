"""Groups of a mesh: tensors are added up in buckets, and no group has a gloo device of its own."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nccl_transfer.refs.mesh import Mesh
from services.engines.three_d.groups import MeshGroups
from services.runtime import process_groups
from services.runtime.process_groups import add_up

pytestmark = pytest.mark.usefixtures("process_group")


def gloo_threads() -> int:
    """Threads that look after connections of gloo."""
    names = (task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return sum(name == "gloo_tcp_loop" for name in names)


def gloo_threads_reach(count: int) -> bool:
    """Waits for so many; they give themselves their names."""
    deadline = time.monotonic() + 10
    while gloo_threads() < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return gloo_threads() >= count


def test_groups_share_the_device_of_the_default_group():
    whole = dist.group.WORLD
    assert whole is not None
    assert gloo_threads_reach(1)
    time.sleep(0.1)
    before = gloo_threads()
    mesh_groups = MeshGroups(Mesh())
    x = torch.ones(3)
    for group in (mesh_groups.pipeline, mesh_groups.tensor, mesh_groups.data, mesh_groups.ends):
        dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1, 1]
    # Those that others make have a thread more. It was started last, so the others would have their names by now.
    dist.new_group([0])
    assert gloo_threads_reach(before + 1)
    assert gloo_threads() == before + 1


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_tensors_are_added_up_where_they_are(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_groups, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(process_groups, "BUCKETS_UNDER_WAY", 2)
    sizes = []

    class Done:
        def wait(self) -> None:
            pass

    def doubled(x: torch.Tensor, **options: object) -> Done:
        sizes.append(x.nbytes)
        x *= 2
        return Done()

    monkeypatch.setattr(dist, "all_reduce", doubled)
    shapes = [(4, 5), (1,), (3, 2, 2), (30,), (0,), (7, 1)]
    tensors = [torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape) for shape in shapes]
    before = [x.clone() for x in tensors]
    whole = dist.group.WORLD
    assert whole is not None
    add_up(tensors, whole)
    assert all(torch.equal(x, 2 * old) for x, old in zip(tensors, before, strict=True))
    assert sum(sizes) == sum(x.nbytes for x in tensors)
    assert all(size <= max(bucket_bytes, 120) for size in sizes)
