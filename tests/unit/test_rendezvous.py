"""Where ranks meet: memory that only its user can open, and what torchrun's backend `rlhf` asks for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from rlhf.rendezvous import VARIABLE, LocalRendezvous
from services.runtime import torchrun


def backend(endpoint: str = "", nodes: int = 1, **conf: str) -> torchrun.RendezvousHandler:
    return torchrun.create(RendezvousParameters("rlhf", endpoint, "run", nodes, nodes, **conf))


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="rlhf")
    assert found.load()() is torchrun.create


def test_processes_meet_in_memory_of_another_and_close_frees_it() -> None:
    local = LocalRendezvous()
    FileStore(local.path, 2).set("key", "value")
    code = f"from torch.distributed import FileStore; print(FileStore({local.path!r}, 2).get('key').decode())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "value\n"
    local.close()
    assert not os.path.exists(local.path)


def test_each_start_of_ranks_on_one_host_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    one = backend()
    places = []
    for _ in range(2):
        info = one.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        places.append(os.readlink(os.environ[VARIABLE]) + str(Path(os.environ[VARIABLE]).stat().st_ino))
    assert len(set(places)) == 2


@pytest.mark.parametrize("rank", [{}, {"rank": "2"}, {"rank": "-1"}])
def test_several_hosts_need_a_number_each(rank: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"needs their number, --nnodes N, and on each host its own"):
        backend("10.0.0.1:1", nodes=2, **rank)


def test_several_hosts_need_an_endpoint() -> None:
    with pytest.raises(ValueError, match=r"needs --rdzv-endpoint HOST:PORT"):
        backend("10.0.0.1", nodes=2, rank="0")


def test_the_store_of_several_hosts_listens_on_the_endpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first, second = (backend(f"127.0.0.1:{port}", nodes=2, rank=str(rank)) for rank in range(2))
    first.next_rendezvous().store.set("key", "value")
    assert second.next_rendezvous().store.get("key") == b"value"
    assert os.environ[VARIABLE] == f"tcp://127.0.0.1:{port}"
    # All of 127.0.0.0/8 is this host: a store on every interface would take this place too.
    with socket.create_server(("127.0.0.2", port)):
        pass
    with pytest.raises(RendezvousClosedError, match="cannot restart"):
        first.next_rendezvous()
