"""Runs that go on on other meshes and engines: every metric, weight and moment is that of the run that stayed, to
1e-5."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from controller.checkpoints.store import CheckpointStore
from controller.config.config import Config
from integration.harness import Service
from integration.resuming import Results, resumable, with_tables
from integration.test_resume_launched import LAUNCHED, ROLES, launched
from integration.test_warm_resume import deployed
from services.storage.checkpoint import WeightShard, read_manifest, read_shards
from settings.strict import override

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

STEPS, RESUMED_AFTER = 12, 2
TRAINED = ("actor", "critic")
TOLERANCE, SMALL = 1e-5, 0.05
"""Metrics may differ by TOLERANCE times their size, or times SMALL if they are smaller: by 5e-7, the rounding of a
float32 number between 4 and 8, such as the log-probability of a token [nats]. Losses, KL divergences and explained
variances are means of differences of such numbers, and may be close to 0."""
APART = ("transfer/", "rollout/kl", "rollout/parity")
"""Metrics that depend on the mesh: bytes on their way, and rounding itself, by which two engines differ."""
DEFAULTS = {"ranks": 1, "engine": "fsdp", "mesh": "", "shards_over_data": False, "zero.stage": 2}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp-1": {"actor": {}, "critic": {}},
    "fsdp-2": {"actor": {"ranks": 2}, "critic": {"ranks": 2}},
    "3d": {
        "actor": {"ranks": 4, "engine": "3d", "mesh": "1-2-2"},
        "critic": {"ranks": 2, "engine": "3d", "mesh": "1-1-2", "shards_over_data": True},
    },
    "hybrid": {
        "actor": {"ranks": 4, "engine": "3d", "mesh": "2-2-1", "generation_mesh": "1-2-2-1"},
        "critic": {"ranks": 2, "engine": "3d", "mesh": "2-1-1"},
    },
    "zero-2": {
        "actor": {"ranks": 2, "engine": "zero", "zero.stage": 2},
        "critic": {"engine": "zero", "zero.stage": 1},
    },
    "zero-3": {
        "actor": {"engine": "zero", "zero.stage": 3},
        "critic": {"ranks": 2, "engine": "zero", "zero.stage": 3},
    },
    "lora-1": {"actor": {"lora.rank": 8}, "critic": {}},
    "lora-2": {"actor": {"ranks": 2, "lora.rank": 8}, "critic": {"ranks": 2}},
}
"""Other keys of actor and critic, by name of a layout."""


def keys_of(layout: str) -> dict[str, dict[str, Any]]:
    """Values of all keys that layouts differ in, by service."""
    actor, critic = LAYOUTS[layout]["actor"], LAYOUTS[layout]["critic"]
    return {"actor": {**DEFAULTS, "generation_mesh": "", **actor}, "critic": {**DEFAULTS, **critic}}


def settings_of(layout: str) -> list[str]:
    """Options of the command line that change a run to a layout."""
    tables = keys_of(layout)
    return [
        word
        for name, table in tables.items()
        for key, value in table.items()
        for word in ("--set", f"services.{name}.{key}={json.dumps(value)}")
    ]


def tables_of(layout: str) -> dict[str, dict[str, Any]]:
    """The same values as tables of a config."""
    return {
        name: override({}, tuple(f"{key}={json.dumps(value)}" for key, value in table.items()))
        for name, table in keys_of(layout).items()
    }


@pytest.fixture(scope="module")
def stayed(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory, by layout, of a run on that layout, with a checkpoint after each step."""

    @cache
    def run_on(layout: str) -> Path:
        chosen = launched(config, {role: role for role in ROLES}, **tables_of(layout))
        chosen = with_tables(
            chosen, run={"steps": STEPS, "evaluate_every": 2}, checkpoint={"every": 1, "keep": STEPS}
        )
        with resumable(chosen, tmp_path_factory.mktemp(layout), options=LAUNCHED) as run:
            run.finish(run.start())
            return run.run_dir

    return run_on


def state(directory: Path) -> dict[str, Tensor]:
    """Whole weights and moments of a service's checkpoint, by name."""
    num_ranks, _ = read_manifest(directory)
    whole: dict[str, WeightShard] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name, (_, shape) in json.loads(file.metadata()["boxes"]).items():
                name = name.partition("#")[0]
                whole[name] = WeightShard.of_whole(torch.full(shape, torch.nan))
    read_shards(directory, num_ranks, whole)
    return {name: shard.tensor for name, shard in whole.items()}


PAIRS = [
    ("fsdp-2", "fsdp-1"),
    ("fsdp-2", "3d"),
    ("fsdp-2", "hybrid"),
    ("fsdp-2", "zero-2"),
    ("fsdp-2", "zero-3"),
    ("3d", "fsdp-2"),
    ("3d", "hybrid"),
    ("hybrid", "3d"),
    ("zero-3", "fsdp-2"),
    ("zero-2", "3d"),
    ("lora-2", "lora-1"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_elsewhere_with_the_same_results_to_1e_5(
    before: str, after: str, config: Config, stayed: Callable[[str], Path], tmp_path: Path
) -> None:
    if "zero" in before + after:
        pytest.importorskip("deepspeed")
    theirs = stayed(before)
    copy = tmp_path / "runs" / theirs.name
    shutil.copytree(theirs, copy)
    for step in range(RESUMED_AFTER + 1, STEPS + 1):
        CheckpointStore(copy).remove(step)
    with resumable(config, tmp_path, options=LAUNCHED) as run:
        _, err = run.finish(run.resume(*settings_of(after)), 2)
        assert "--elsewhere" in err
        run.finish(run.resume(*settings_of(after), "--elsewhere"))
    worst = max(*compare_metrics(copy, theirs), *compare_states(copy, theirs))
    print(f"{before} -> {after}: {worst[0]:.2g} at most, {worst[1]}")


def compare_metrics(ours: Path, theirs: Path) -> Iterator[tuple[float, str]]:
    """Compares the metrics of two runs; yields the difference of each as a part of its size, and its name."""
    for line, expected in zip(Results.of(ours).metrics, Results.of(theirs).metrics, strict=True):
        step = int(expected["step"])
        if step <= RESUMED_AFTER:
            assert line == expected
            continue
        mine, other = (
            {key: x for key, x in each.items() if not key.startswith(APART)} for each in (line, expected)
        )
        assert mine.keys() == other.keys()
        for name, x in other.items():
            difference = abs(mine[name] - x) / max(abs(x), SMALL)
            assert difference < TOLERANCE, (step, name, mine[name], x)
            yield difference, f"{name} of step {step}"


def compare_states(ours: Path, theirs: Path) -> Iterator[tuple[float, str]]:
    """Compares the checkpoints of two runs; yields the 2-norm of the difference of each weight and moment, as a part of
    that of the tensor, and its name."""
    for step in (RESUMED_AFTER + 1, STEPS):
        for service in TRAINED:
            mine, other = (state(CheckpointStore(each).place(step) / service) for each in (ours, theirs))
            assert mine.keys() == other.keys()
            for name, x in other.items():
                difference = float((mine[name] - x).norm() / (x.norm() or 1))
                assert difference < TOLERANCE, (step, service, name)
                yield difference, f"{name} of {service} after step {step}"


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("lora")])
def test_checkpoints_of_other_engines_are_loaded_bit_by_bit(
    layout: str, config: Config, stayed: Callable[[str], Path], tmp_path: Path
) -> None:
    if "zero" in layout:
        pytest.importorskip("deepspeed")
    chosen = launched(config, {name: name for name in TRAINED}, **tables_of(layout))
    with deployed(chosen, tmp_path / "services.toml"):
        for before, name in product(("fsdp-2", "3d", "zero-3"), TRAINED):
            directory = CheckpointStore(stayed(before)).place(RESUMED_AFTER) / name
            with closing(Service(name, chosen.services[name].address)) as service:
                service.load(directory)
                service.save(tmp_path / before / name)
            loaded, saved = state(tmp_path / before / name), state(directory)
            assert loaded.keys() == saved.keys()
            assert [key for key, x in saved.items() if not torch.equal(loaded[key], x)] == []
