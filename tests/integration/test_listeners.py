"""A deployment listens only on the hosts that the config names, and only on the ports that SECURITY.md lists; its
stores run no pickles written to them.

The deployments are those of other tests; what they start in other ways is checked there with `assert_closed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from integration.harness import ROOT, Cluster, abstract_sockets
from integration.listeners import assert_closed, attack, ports_by_process
from nccl_transfer.transports.tcp_wire import ADVERT

ELSEWHERE = {"store", "nccl", "metrics"}
"""Names of ports that a deployment on one host without GPUs does not have, whose controller serves no metrics."""


def listed() -> set[str]:
    """Names of the ports in the table of SECURITY.md."""
    section = (ROOT / "SECURITY.md").read_text().partition("## Open ports")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \|", section, re.MULTILINE)
    assert rows[0] == "name"
    return set(rows[1:])


def open_ports(cluster: Cluster) -> Iterator[str]:
    """Name of each port of the ranks, as in SECURITY.md. A rank without torch has no port of gloo, any other two."""
    places = ports_by_process(cluster.processes.living())
    arenas = abstract_sockets()
    for name in cluster.config.services:
        with cluster.service(name) as service:
            for rank in service.description.ranks:
                ours = {port for _, port in places.pop(rank.pid)}
                known = {
                    "rpc": int(rank.endpoint.address.rpartition(":")[2]),
                    "rows": ADVERT.unpack(rank.endpoint.adverts["tcp"])[0],
                }
                assert set(known.values()) <= ours
                yield from known
                if rank.endpoint.adverts["memfd"].decode() in arenas:
                    yield "arena"
                rest = ours - set(known.values())
                yield from ["gloo"] * min(len(rest), 2)
                assert len(rest) <= 2, f"{name}: {rest}"
    assert not places, "a process that is no rank has a port"


def test_services_listen_on_the_configured_hosts_alone(cluster: Cluster) -> None:
    assert_closed(cluster.processes.living(), cluster.config)


def test_every_open_port_is_one_that_the_page_on_security_lists(cluster: Cluster) -> None:
    assert set(open_ports(cluster)) == listed() - ELSEWHERE


def test_a_pickle_written_into_every_store_that_can_be_reached_does_not_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    assert attack(cluster.processes.living(), marker) == []
    assert not marker.exists()
    with cluster.service("actor") as actor:
        assert len(actor.versions) == 2
