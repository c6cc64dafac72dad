"""A deployment listens only on the hosts that the config names, and its stores run no pickles written to them.

The deployments are those of other tests; what they start in other ways is checked there with `assert_closed`.
"""

from __future__ import annotations

from pathlib import Path

from integration.harness import Cluster
from integration.listeners import assert_closed, attack


def test_services_of_rlhf_deploy_listen_on_the_configured_hosts_alone(cluster: Cluster) -> None:
    assert_closed(cluster.processes.living(), cluster.config)


def test_a_pickle_written_into_every_store_that_can_be_reached_does_not_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    assert attack(cluster.processes.living(), marker) == []
    assert not marker.exists()
    with cluster.service("actor") as actor:
        assert len(actor.versions) == 2
