"""The devices of a pool are those of its ranks: what each rank sees, and what is refused before and after the start."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from client.session import Session
from controller.config.config import Config, load
from controller.config.devices import gpu_of, ranks_line
from controller.role_groups.cluster import Cluster
from controller.role_groups.device_check import check_devices
from controller.role_groups.discovery import Discovery
from deploy import cli, supervisor
from deploy.devices import gpu_variables, gpus_by_service, visible_gpus
from deploy.launch import LaunchOptions
from deploy.state import Deployment
from deploy.supervisor import Supervisor
from integration.harness import free_ports
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2
from settings.strict import override, read_toml, validate

CONFIG = Path(__file__).parents[2] / "deploy" / "quickstart" / "disaggregated.toml"
ON_GPUS = tuple(f"services.{name}.device=auto" for name in ("actor", "rollout", "critic", "reference"))
TWO_POOLS = (
    "pools={left=['gpu:2','gpu:0'],right=['gpu:3','gpu:1']}",
    *(f"services.{name}.pool={'left' if name in ('actor', 'critic') else 'right'}"
      for name in ("actor", "critic", "rollout", "reference", "reward")),
)  # fmt: skip
"""GPU r of a rank is not number r of the host."""


def configured(*settings: str, on: tuple[str, ...] = ON_GPUS) -> Config:
    """The config without its placement, and with these settings."""
    tables = {key: value for key, value in read_toml(CONFIG).items() if key != "placement"}
    return validate(Config, override(tables, (*on, *settings)), "of the test")


def names_of(config: Config) -> list[str]:
    return list(config.services)


def started(config: Config, sees: dict[str, tuple[str, ...]]) -> dict[str, worker_pb2.DescribeResponse]:
    """Descriptions of services whose ranks took the GPU number LOCAL_RANK of those that they see."""
    return {
        name: worker_pb2.DescribeResponse(
            ranks=[
                worker_pb2.RankInfo(device_uuid=f"GPU-{sees[name][rank]}" if sees.get(name) else "")
                for rank in range(table.ranks)
            ]
        )
        for name, table in config.services.items()
    }


def test_each_rank_takes_the_device_of_its_number_and_sees_the_whole_pool() -> None:
    config = configured(*TWO_POOLS)
    sees = gpus_by_service(config, names_of(config), ["0", "1", "2", "3"])
    assert sees == {
        "actor": ("2", "0"),
        "critic": ("2", "0"),
        "rollout": ("3", "1"),
        "reference": ("3", "1"),
    }, "the reward, a function, computes on no GPU"
    check_devices(config, started(config, sees))
    assert gpu_variables(sees["actor"], {}) == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    for given in ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}):
        assert gpu_variables(sees["actor"], given) == {"CUDA_VISIBLE_DEVICES": "2,0"}, (
            "the order is inherited"
        )
    assert gpu_variables((), {}) == {}


def test_a_service_that_was_restarted_on_a_gpu_of_another_pool_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(*TWO_POOLS)
    sees = gpus_by_service(config, names_of(config), ["0", "1", "2", "3"])
    cluster = Cluster(config, Session())
    groups = {
        name: SimpleNamespace(name=name, description=description)
        for name, description in started(config, sees).items()
    }
    cluster.groups.update(groups)  # type: ignore[arg-type]
    again = started(config, sees | {"rollout": ("2", "1")})["rollout"]

    async def find(self: Discovery, *args: object) -> worker_pb2.DescribeResponse:
        return again

    monkeypatch.setattr(Discovery, "find", find)
    before = groups["rollout"].description
    try:
        with pytest.raises(ConfigError, match=r"services\.rollout rank 0 are on one GPU, GPU-2"):
            cluster.reconnect("rollout")
        assert groups["rollout"].description is before
    finally:
        cluster.groups.clear()
        cluster.close()


def test_gpus_are_numbered_as_this_process_sees_them(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-8d3a"}, tmp_path) == ["2", "GPU-8d3a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    (none := tmp_path / "none").mkdir()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, none) == []
    config = configured("placement=colocate")
    assert gpus_by_service(config, ["actor"], ["5", "7"]) == {"actor": ("5", "7")}


def test_on_a_host_without_gpus_and_for_services_on_the_cpu_names_only_order_calls() -> None:
    config = configured(*TWO_POOLS)
    assert gpus_by_service(config, names_of(config), []) == {}
    on_cpu = configured(*TWO_POOLS, on=())
    assert gpus_by_service(on_cpu, names_of(on_cpu), ["0", "1", "2", "3"]) == {}
    free = configured("placement=colocate", "devices=['left','right']")
    assert gpus_by_service(free, names_of(free), ["0"]) == {}


def test_a_placement_without_names_takes_the_gpus_of_its_host_in_order() -> None:
    config = configured("placement=disaggregated")
    assert config.device_order("actor") == ("gpu:0", "gpu:1")
    assert config.device_order("rollout") == ("gpu:2", "gpu:3")
    assert load(CONFIG).device_order("rollout") == ("cpu:2", "cpu:3")


@pytest.mark.parametrize(
    ("settings", "visible", "said"),
    [
        (
            (),
            "012",
            r"services.rollout: there is no gpu:3 on this host, which shows 3 GPUs \(gpu:0 to gpu:2\)",
        ),
        (
            ("pools.right=['b/gpu:0','b/gpu:1']",),
            "0123",
            r"services.rollout: b/gpu:0 is on another host than gpu:2 of services.actor, .*name it by --host",
        ),
        (
            ("pools.left=['a/gpu:0','b/gpu:0']", "pools.right=['a/gpu:2','a/gpu:3']"),
            "0123",
            r"services.actor: b/gpu:0 is on another host than a/gpu:0 of services.actor, .*name it by --host",
        ),
    ],
)
def test_gpus_that_a_service_cannot_have_are_refused_before_the_start(
    settings: tuple[str, ...], visible: str, said: str
) -> None:
    config = configured(*TWO_POOLS, *settings)
    with pytest.raises(ConfigError, match=said) as raised:
        gpus_by_service(config, names_of(config), list(visible))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("['gpu:0','gpu:0']", r"pools.left: a device is named twice \(given: gpu:0, gpu:0\)"),
        (
            "['gpu 0','x']",
            r"pools.left: 'gpu 0' is not a valid name of a GPU; use gpu:0 for GPU 0 of the host",
        ),
        ("['a/cuda:07','x']", r"'a/cuda:07' is not a valid name of a GPU; use gpu:7 .* HOST/gpu:7 if"),
        ("['gpu:0','second']", r"pools.left: 'gpu:0' is the name of a GPU and 'second' is not"),
        ("['gpu:0']", r"services.actor.pool: 'left' has 1 device for 2 ranks"),
    ],
)
def test_names_that_are_almost_gpus_are_refused(devices: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(*TWO_POOLS, f"pools.left={devices}")


def test_names_of_gpus() -> None:
    assert gpu_of("gpu:12") == ("", 12)
    assert gpu_of("A100-80GB/3/gpu:7") == ("A100-80GB/3", 7)
    assert gpu_of("cpu:0") is gpu_of("device 0") is gpu_of("gpu:x") is gpu_of("left") is None


@pytest.mark.parametrize(
    ("sees", "said"),
    [
        (
            dict.fromkeys(("actor", "critic", "rollout", "reference"), ("0", "1")),
            r"services.actor rank 0 and services.rollout rank 0 are on one GPU, GPU-0, and their pools share no "
            r"device: gpu:2 and gpu:3; rlhf-deploy gives ranks the GPUs",
        ),
        (
            {"actor": ("2", "0"), "critic": ("0", "2")},
            r"device gpu:2 is GPU-2 for services.actor rank 0 and GPU-0 for services.critic rank 0",
        ),
        (
            {"rollout": ("1", "1")},
            r"services.rollout rank 0 and rank 1 are on one GPU, GPU-1; each rank needs",
        ),
    ],
)
def test_ranks_on_other_gpus_than_their_pools_say_are_refused(
    sees: dict[str, tuple[str, ...]], said: str
) -> None:
    config = configured(*TWO_POOLS)
    with pytest.raises(ConfigError, match=said):
        check_devices(config, started(config, sees))


def test_services_without_pools_and_ranks_on_cpus_pass() -> None:
    config = configured()
    check_devices(config, started(config, dict.fromkeys(config.services, ("0", "1"))))
    pooled = configured(*TWO_POOLS)
    check_devices(pooled, started(pooled, {}))


def test_what_the_launcher_gives_to_ranks_always_passes_the_check() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        placement = chosen.choice(("colocate", "standalone", "split", "interleaved", "disaggregated"))
        numbers = chosen.sample(range(10), 10)
        config = configured(
            f"placement={placement}",
            f"devices={[f'gpu:{number}' for number in numbers]}",
            f"services.reference.ranks={chosen.randint(1, 3)}",
        )
        visible = [f"id{number}" for number in chosen.sample(range(16), 10)]
        sees = gpus_by_service(config, names_of(config), visible)
        check_devices(config, started(config, sees))
        for name, gpus in sees.items():
            assert gpus == tuple(visible[int(each[4:])] for each in config.device_order(name))


def test_ranks_are_started_with_the_gpus_of_their_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, that print what they see."""
    config = tmp_path / "two.toml"
    tables = [
        f'[services.{name}]\nrole = "reward"\nranks = 2\npool = "{name}"\naddress = "127.0.0.1:{port}"\n'
        for name, port in zip(("one", "two"), free_ports(2), strict=True)
    ]
    config.write_text(
        '[data]\ntrain = "t.jsonl"\nheldout = "h.jsonl"\n[pools]\none = ["gpu:1", "gpu:0"]\n'
        'two = ["gpu:2", "gpu:3", "gpu:0"]\n' + "".join(tables)
    )
    monkeypatch.setattr(supervisor, "visible_gpus", lambda environment: ["4", "5", "6", "7"])
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    program = (
        "import json, os; print(json.dumps([os.environ[key] for key in "
        "('LOCAL_RANK', 'CUDA_VISIBLE_DEVICES', 'CUDA_DEVICE_ORDER')]), flush=True)"
    )
    said: list[str] = []
    launcher = LaunchOptions(lambda job: [sys.executable, "-c", program], grace_s=5.0)
    with Supervisor(
        load(config), Deployment(str(config), str(tmp_path)), (), launcher, said.append
    ) as running:
        running.start()
        for service in running._services:
            for process in service.processes:
                process.wait(20)
    seen = {
        name: sorted(json.loads(line) for line in (tmp_path / f"{name}.log").read_text().splitlines())
        for name in ("one", "two")
    }
    assert seen["one"] == [["0", "5,4", "PCI_BUS_ID"], ["1", "5,4", "PCI_BUS_ID"]]
    assert seen["two"] == [["0", "6,7,4", "PCI_BUS_ID"], ["1", "6,7,4", "PCI_BUS_ID"]]
    assert ", GPUs 5, 4, log" in said[0]


def test_check_and_dry_run_print_the_device_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = free_ports(2)
    settings = [
        part
        for setting in (
            f"services.reward.address='127.0.0.1:{one}'",
            "services.reward.ranks=2",
            f"services.critic.address='127.0.0.1:{two}'",
            "placement=colocate",
            "devices=['gpu:3','gpu:1','gpu:0']",
        )
        for part in ("--set", setting)
    ]
    monkeypatch.setattr(cli, "visible_gpus", lambda environment: ["8", "9", "10", "11"])
    checked = CliRunner().invoke(cli.main, ["check", str(CONFIG), "--only", "reward", *settings])
    assert checked.exit_code == 0, checked.output
    said = "rank 0 on gpu:3, rank 1 on gpu:1"
    assert f"reward: {said} (CUDA_VISIBLE_DEVICES 11,9)\n" in checked.output
    assert ranks_line(["gpu:3", "gpu:1", "gpu:0"], 2) == f"{said}; takes turns on gpu:0 too"
    assert ranks_line([f"gpu:{n}" for n in range(16)], 16) == "rank 0 on gpu:0, ..., rank 15 on gpu:15"
