"""Which device the ranks of a service get, and libraries that do not fit together."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from check_extras import findings

from nccl_transfer.devices.cupy_cuda import INSTALL_HINT
from rlhf.errors import ConfigError
from services.engines.agreement import new_directory
from services.engines.fsdp.engine import FSDPEngine
from services.engines.implementation import compute_dtype
from services.engines.offloader import Offloader
from services.roles.weight_check import WeightCheck
from services.runtime import gpus, main
from services.runtime.ranks import Ranks
from services.runtime.rounds import make_group
from services.runtime.worker import Worker
from settings.critic import CriticTable
from settings.service import ServiceTable

FITTING = {"torch": "2.13.0", "cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.29.7"}


class Stopped(Exception):
    """Ends a start where the test has seen enough."""


class OnTorch(Worker):
    """Worker that computes with torch."""

    @classmethod
    def uses_torch(cls, table: ServiceTable) -> bool:
        return True


def make_table(**keys: Any) -> ServiceTable:
    return ServiceTable.model_validate({"role": "critic", "address": "127.0.0.1:1", **keys})


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Has torch say that this host has GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Starts a rank up to where ranks join each other; returns CUDA_VISIBLE_DEVICES as the worker's import finds it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def started(table: ServiceTable, worker: type[Worker] = OnTorch) -> str | None:
        seen: list[str | None] = []

        def choose(*_: Any) -> type[Worker]:
            seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            return worker

        def join(*_: Any, **__: Any) -> Ranks:
            raise Stopped

        monkeypatch.setattr(main.Ranks, "join", join)
        monkeypatch.setattr(main, "_without_collection", nullcontext)
        monkeypatch.setattr(main, "_worker_class", choose)
        with suppress(Stopped):
            main._serve(table, "critic", "chosen by the test", (), frozenset(), table, shares=False)
        return seen[0]

    return started


def test_a_service_on_the_cpu_sees_no_gpu_of_its_host(
    start: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert start(make_table(device="cpu")) == ""


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_service_on_gpus_sees_those_of_its_host(
    start: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    show_gpus(monkeypatch, 2)
    assert start(make_table(device=device, ranks=2)) == "0,1"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_fewer_gpus_than_ranks_are_refused_with_both_figures(
    start: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch, device: str
):
    show_gpus(monkeypatch, 1)
    with pytest.raises(
        ConfigError, match=r"critic.ranks: 2 ranks on this host, which shows 1 GPU;.*device to cpu"
    ):
        start(make_table(device=device, ranks=2))


def test_cuda_without_a_gpu_is_refused(start: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch):
    show_gpus(monkeypatch, 0)
    with pytest.raises(
        ConfigError, match=r"device is cuda, and torch .* finds no GPU on this host for its 2 ranks"
    ):
        start(make_table(device="cuda", ranks=2))
    assert start(make_table(device="auto", ranks=2)) == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_cuda_for_a_service_without_a_model_is_refused(start: Callable[..., str | None]):
    with pytest.raises(ConfigError, match="device is cuda, and this service has no model"):
        start(make_table(device="cuda"), Worker)


def test_gpus_that_torch_cannot_use_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    show_gpus(monkeypatch, 0)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    with caplog.at_level(logging.WARNING):
        gpus.check_ranks("critic", "auto", {"LOCAL_RANK": "1"})
        assert not caplog.messages
        gpus.check_ranks("critic", "auto", {"LOCAL_RANK": "0"})
    assert "cannot use them" in caplog.text


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (FITTING, ""),
        ({}, ""),
        (
            {"cupy-cuda12x": "14.2.0"},
            "torch 2.13.0 is built for CUDA 13.0, and cupy-cuda12x 14.2.0 for CUDA 12",
        ),
        (
            {**FITTING, "nvidia-nccl-cu12": "2.32.3"},
            "nvidia-nccl-cu12 2.32.3 and nvidia-nccl-cu13 2.29.7 are installed, which own the same file libnccl.so.2",
        ),
    ],
)
def test_libraries_that_do_not_fit_together_are_named_with_their_versions(
    installed: dict[str, str], said: str
):
    assert gpus.library_conflict("2.13.0", "13.0", installed) == said


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (FITTING, []),
        ({**FITTING, "torch": "2.12.1"}, ["torch 2.12.1 is not the tested 2.13.0"]),
        (
            {"torch": "2.13.0", "cupy-cuda12x": "14.2.0", "nvidia-nccl-cu13": "2.29.7"},
            ["cupy-cuda12x 14.2.0 for CUDA 12"],
        ),
        ({"torch": "2.13.0+cu126", "cupy-cuda12x": "14.2.0", "nvidia-nccl-cu12": "2.27.5"}, []),
        ({**FITTING, "nvidia-nccl-cu12": "2.32.3"}, ["libnccl.so.2"]),
        ({"torch": "2.13.0", "cupy-cuda13x": "14.2.0"}, ["a build for CPUs"]),
    ],
)
def test_extras_that_resolve_to_what_does_not_fit_are_found(installed: dict[str, str], found: list[str]):
    wrong = findings(installed)
    assert len(wrong) == len(found)
    assert all(text in each for text, each in zip(found, wrong, strict=True))


def test_a_build_for_cpus_fits_any_cupy():
    assert gpus.library_conflict("2.13.0+cpu", None, FITTING | {"cupy-cuda12x": "14.2.0"}) == ""


def test_a_service_on_a_host_with_gpus_refuses_libraries_that_do_not_fit(
    tmp_path: Path, start: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch
):
    show_gpus(monkeypatch, 2)
    monkeypatch.setattr(gpus, "installed_versions", lambda: {"cupy-cuda12x": "14.2.0"})
    monkeypatch.setattr(gpus, "built_torch", lambda: ("2.13.0", "13.0"))
    table = make_table(ranks=2)
    start(table)  # no driver here
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    with pytest.raises(
        ConfigError, match=r"services.critic: torch 2.13.0 is built for CUDA 13.0.*install one extra"
    ):
        start(table)
    start(make_table(ranks=2, device="cpu"))


def test_the_versions_are_those_of_this_environment():
    assert gpus.built_torch() == (torch.__version__, torch.version.cuda)
    # The metadata of PyPI's wheel do not name its build, as +cu130.
    assert gpus.installed_versions()["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert importlib.util.find_spec("cupy") is not None or "cupy-cuda13x" not in gpus.installed_versions()


@pytest.mark.parametrize(
    ("needs_torch", "count", "backend"),
    [(True, 1, "cpu:gloo,cuda:nccl"), (True, 0, "gloo"), (False, 1, "gloo")],
)
def test_only_ranks_that_compute_on_gpus_have_nccl(
    monkeypatch: pytest.MonkeyPatch, needs_torch: bool, count: int, backend: str
):
    show_gpus(monkeypatch, count)
    given: list[str] = []

    def init(backend: str, **_: Any) -> None:
        given.append(backend)
        raise Stopped

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setenv("WORLD_SIZE", "1")
    if needs_torch:
        with pytest.raises(Stopped):
            Ranks.join(needs_torch=True)
        assert given == [backend]
    else:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr("services.runtime.ranks._open_store", lambda *_: cast(Any, None))
        monkeypatch.setattr("services.runtime.ranks._meet", lambda *_: 1)
        monkeypatch.setattr("torch.distributed.PrefixStore", lambda *_: None)
        with pytest.raises(Stopped):
            Ranks.join(needs_torch=False)
        assert given == [backend]


def test_ranks_agree_over_gloo(process_group: None, monkeypatch: pytest.MonkeyPatch):
    backends: list[Any] = []
    new_group = dist.new_group

    def noted(*arguments: Any, **options: Any) -> Any:
        backends.append(options["backend"])
        return new_group(*arguments, **options)

    monkeypatch.setattr(dist, "new_group", noted)
    make_group(1)
    assert backends == ["gloo"]


def test_leaving_runs_no_barrier_which_would_be_one_of_nccl(
    process_group: None, monkeypatch: pytest.MonkeyPatch
):
    def barrier(**_: Any) -> None:
        raise AssertionError("a barrier runs on NCCL where there is a GPU")

    destroyed: list[bool] = []
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    Ranks(0, 1, 0, store=cast(Any, object())).leave()
    assert destroyed == [True]


def test_engines_on_gpus_agree_in_host_memory(
    process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    devices: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def run(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[1] if name == "all_gather" else arguments[0]
            devices.append(tensor.device.type)
            return collective(*arguments, **options)

        return run

    for name in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(dist, name, noted(name))
    engine = FSDPEngine.__new__(FSDPEngine)
    engine.device = torch.device("meta")  # stands for a GPU
    engine._has_first_values = True
    engine._offloader = Offloader()
    engine.start_over()
    assert engine._pad_with_dummies([])[0].is_dummy
    with new_directory(tmp_path / "new"):
        pass
    WeightCheck().verify([])
    assert devices
    assert set(devices) == {"cpu"}


@pytest.mark.parametrize(
    ("dtype", "sees_gpu", "expected"),
    [("auto", True, torch.bfloat16), ("auto", False, torch.float32), ("float32", True, torch.float32)],
)
def test_the_type_of_computation_follows_from_the_device(
    dtype: str, sees_gpu: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    table = {"role": "critic", "address": "127.0.0.1:1", "model": "model", "dtype": dtype}
    assert compute_dtype(CriticTable.model_validate(table)) == expected


def test_the_hint_to_install_for_a_gpu_has_the_commands_of_the_docs() -> None:
    documented = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
    commands = re.findall(r"pip install '[^']+'(?: --extra-index-url \S+)?", INSTALL_HINT)
    assert len(commands) == 2
    assert all(command in documented for command in commands)
