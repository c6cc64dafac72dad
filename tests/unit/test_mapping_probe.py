"""Calibration of the constants of devices: calls that the model of costs has timed itself give its constants back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import tomli_w

from controller.algorithms import find_algorithm
from controller.config.config import load
from controller.config.tracking import TrackingTable
from controller.mapping import probe
from controller.mapping.calibrate import ProbedCall, calibrate, table_text
from controller.mapping.dataflow import Call
from controller.mapping.devices import DeviceGroup, DeviceTable, built_in_devices, device_group, read_devices
from controller.mapping.problem import Model
from controller.mapping.workload import LengthShares, Workload
from controller.optimizer_steps import LONG_STEPS, with_total_steps
from rlhf.errors import ConfigError, RlhfError
from settings.actor import ActorTable
from settings.memory.shape import ModelShape
from settings.memory.use import ModelUse, RolloutUse

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
GROUP = device_group("CPU:2")
SMALL = ModelShape(
    "llama", vocabulary=512, hidden=64, intermediate=128, layers=4, heads=8, kv_heads=4, head_dim=32
)
TRUE = GROUP.table.model_copy(
    update={"efficiency": 0.3, "launch_us": 40.0, "collective_us": 900.0, "call_us": 7000.0}
)


def calls(table: DeviceTable, rows: int, mesh: tuple[int, int, int] = (1, 1, 2)) -> list[ProbedCall]:
    """Calls of an actor of two ranks and a critic of one, as long as the table makes them."""
    engine = "fsdp" if mesh[1] == 1 else "3d"
    rollout = RolloutUse(tensor=mesh[1])
    actor = ModelUse(SMALL, engine=engine, mesh=mesh, rollout=rollout, on_gpu=False)  # type: ignore[arg-type]
    critic = ModelUse(replace(SMALL, head="value"), engine="fsdp", on_gpu=False)
    group = DeviceGroup("CPU", table, 2)
    found = []
    for name, method, use, minis, tokens in (
        ("actor", "generate_sequences", actor, 1, 1),
        ("actor", "generate_sequences", actor, 1, 16),
        ("actor", "compute_log_prob", actor, 1, 16),
        ("actor", "update_actor", actor, 4, 16),
        ("actor", "update_actor", actor, 1, 16),
        ("critic", "compute_values", critic, 1, 16),
        ("critic", "update_critic", critic, 4, 16),
        ("critic", "update_critic", critic, 1, 16),
    ):
        model = Model(name, use, (Call(name, method, rows),), name == "critic")
        workload = Workload(rows, LengthShares.of(8), LengthShares.of(tokens), minis)
        call = ProbedCall(f"{name}.{method}", model, workload, 1.0)
        found.append(replace(call, seconds=call.predicted_s(group)))
    return found


def test_the_constants_of_timed_calls_are_found() -> None:
    found = calibrate(GROUP, calls(TRUE, 128))
    for name in ("efficiency", "launch_us", "call_us"):
        assert getattr(found.table, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
        assert name in found.fitted


@pytest.mark.parametrize(("rows", "mesh"), [(64, (1, 1, 2)), (512, (1, 1, 2)), (128, (1, 2, 1))])
def test_other_rows_and_meshes_are_predicted(rows: int, mesh: tuple[int, int, int]) -> None:
    found = replace(GROUP, table=calibrate(GROUP, calls(TRUE, 128)).table)
    for call in calls(TRUE, rows, mesh):
        assert call.predicted_s(found) == pytest.approx(call.seconds, rel=0.1), call.name


def test_constants_that_no_call_tells_of_stay() -> None:
    alone = [call for call in calls(TRUE, 128) if call.model.name == "critic"]
    found = calibrate(GROUP, alone)
    assert "collective_us" not in found.fitted
    assert found.table.collective_us == GROUP.table.collective_us
    assert found.table.link_gb == GROUP.table.link_gb


def test_a_device_faster_than_its_peak_gets_a_higher_one() -> None:
    fast = TRUE.model_copy(update={"tflops": {"float32": 0.8, "bfloat16": 0.8}, "efficiency": 0.5})
    found = calibrate(GROUP, calls(fast, 4096)).table
    assert found.efficiency <= 1
    assert found.tflops["float32"] * found.efficiency == pytest.approx(0.4, rel=0.1)


def test_a_calibrated_table_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(table_text("CPU", TRUE, ("efficiency", "call_us"), "Measured here."))
    assert read_devices(path) == {"CPU": TRUE}
    assert path.read_text().count("fitted to the timed calls") == 2


def test_a_rate_of_0_and_the_use_of_one_that_is_missing_are_refused(tmp_path: Path) -> None:
    tables = {"CPU": TRUE.model_dump(mode="json") | {"tflops": {"bfloat16": 0.1}}}
    (path := tmp_path / "table.toml").write_text(tomli_w.dumps(tables))
    group = device_group("CPU:2", more=read_devices(path))
    with pytest.raises(ConfigError, match=r"^devices CPU: tflops has no rate for float32$"):
        group.flops("float32")
    path.write_text(path.read_text().replace("0.1", "0.0"))
    with pytest.raises(ConfigError, match=r"CPU.*tflops.bfloat16"):
        read_devices(path)


def test_a_kind_with_a_space_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    table = built_in_devices()["A100-80GB"]
    path.write_text(table_text("my A100", table, (), "Nowhere."))
    assert read_devices(path) == {"my A100": table}


def seconds(use: ModelUse, method: str, minis: int = 1, **constants: float) -> float:
    """Seconds of a call of 128 rows on CPUs, of which only these constants are not 0."""
    base = {"launch_us": 0.0, "collective_us": 0.0, "link_latency_us": 0.0, "call_us": 0.0}
    group = replace(GROUP, table=TRUE.model_copy(update=base | constants))
    workload = Workload(128, LengthShares.of(8), LengthShares.of(16), minis, snapshots=False)
    model = Model("actor", use, (Call("actor", method, 128),))
    return ProbedCall("", model, workload, 1.0).predicted_s(group)


WHOLE = ModelUse(SMALL, mesh=(1, 1, 1), rollout=RolloutUse(), on_gpu=False)
SHARDED = replace(WHOLE, mesh=(1, 1, 2))


@pytest.mark.parametrize(
    ("use", "method", "minis", "constant", "times"),
    [
        pytest.param(WHOLE, "compute_log_prob", 1, "call_us", 1, id="a call"),
        pytest.param(WHOLE, "compute_log_prob", 1, "launch_us", 34 * 4, id="kernels of a forward pass"),
        pytest.param(WHOLE, "generate_sequences", 1, "launch_us", 17 * 34 * 4, id="and of each token"),
        pytest.param(
            WHOLE, "update_actor", 2, "launch_us", 2 * (3 * 34 * 4 + 4 * (4 * 9 + 3)), id="of two updates"
        ),
        pytest.param(
            SHARDED, "compute_log_prob", 1, "collective_us", 3 + 5, id="gathers of four layers and head"
        ),
        pytest.param(SHARDED, "update_actor", 1, "collective_us", 3 + 3 * 5 + 4, id="twice, and reductions"),
        pytest.param(SHARDED, "generate_sequences", 1, "collective_us", 3 + 4 * 9 + 3, id="of each tensor"),
        pytest.param(WHOLE, "update_actor", 1, "collective_us", 0, id="none"),
    ],
)
def test_constants_are_paid_as_often_as_the_work_is_begun(
    use: ModelUse, method: str, minis: int, constant: str, times: int
) -> None:
    without, with_them = seconds(use, method, minis), seconds(use, method, minis, **{constant: 50.0})
    assert with_them - without == pytest.approx(times * 50e-6, rel=1e-6, abs=1e-9)


def test_services_that_do_not_load_their_models_after_a_failed_probe_are_named_beside_its_error() -> None:
    said, loaded = [], []

    def group(name: str, error: RlhfError | None) -> Any:
        def begin_session(*, keep_weights: bool) -> Any:
            assert not keep_weights
            loaded.append(name)
            call: Future[None] = Future()
            call.set_exception(error) if error else call.set_result(None)
            return SimpleNamespace(calls=[call])

        return SimpleNamespace(begin_session=begin_session)

    class FailedRun:
        groups: ClassVar = {
            "actor": group("actor", RlhfError("it is gone")),
            "reference": group("reference", None),
            "critic": group("critic", None),
        }
        config = SimpleNamespace(
            services={name: SimpleNamespace(keeps_state=name != "reference") for name in groups}
        )
        recorder = SimpleNamespace(progress=SimpleNamespace(message=said.append))

        def steps(self, evaluation: Any) -> Iterator[Any]:
            raise KeyboardInterrupt
            yield

    with pytest.raises(KeyboardInterrupt):
        probe._probe(cast(Any, FailedRun()), cast(Any, SimpleNamespace(models=())), ())
    assert loaded == ["actor", "critic"]
    assert said == ["the updates of the probe are not undone in actor until a run begins there: it is gone"]


def test_a_probe_is_reported_to_no_tracker() -> None:
    config = load(QUICKSTART, ("tracking.trackers=['wandb']", "tracking.prometheus_port=9090"))
    assert probe._probe_config(config).tracking == TrackingTable()


@pytest.mark.parametrize("warmup", ["warmup_steps=1000", "warmup_ratio=0.5"])
def test_services_whose_learning_rate_follows_the_run_are_probed(warmup: str) -> None:
    """A probe has six steps, and a warm-up may be longer."""
    config = load(
        QUICKSTART, ("services.actor.optimizer.schedule='cosine'", f"services.actor.optimizer.{warmup}")
    )
    found = with_total_steps(find_algorithm("ppo").configure(probe._probe_config(config))).services["actor"]
    given = config.services["actor"]
    assert isinstance(found, ActorTable)
    assert isinstance(given, ActorTable)
    assert found.optimizer == given.optimizer.model_copy(update={"total_steps": LONG_STEPS})
    assert not found.optimizer.lacks_total_steps


def test_a_probe_trains_on_all_rows_and_writes_none() -> None:
    settings = ("algorithm.on_truncated='drop'", "algorithm.critic_warmup_steps=3", "run.rollouts_every=1")
    config = probe._probe_config(load(QUICKSTART, settings))
    assert (config.algorithm.on_truncated, config.algorithm.critic_warmup_steps) == ("train", 0)
    assert config.run.rollouts_every == 0
