"""Every engine sends, from all of its ranks together, the bits that it exports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration.ranks import launch
from integration.test_hybrid import SIZES

DEADLINE_S = 200

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


def case(engine: str, model: str = "untied", *, trained: bool = True, **keys: Any) -> dict[str, Any]:
    mesh = keys.pop("p_t_d", None)
    found = {"keys": {"engine": engine, **keys}, "model": model, "trained": trained}
    if mesh:
        found["keys"]["mesh"] = "-".join(map(str, mesh))
        found["mesh"] = mesh
    return found


def zero(stage: int, model: str = "untied", *, trained: bool = True) -> dict[str, Any]:
    return case("zero", model, trained=trained, zero={"stage": stage})


QUICK = {
    "fsdp": case("fsdp", "tied"),
    "3d 1-4-1": case("3d", p_t_d=(1, 4, 1)),
    "3d 2-2-1, tied": case("3d", "tied", p_t_d=(2, 2, 1)),
    "lora": case("fsdp", lora={"rank": 2}),
}
EVERY = {
    **QUICK,
    "fsdp, frozen": case("fsdp", trained=False),
    "3d 4-1-1": case("3d", p_t_d=(4, 1, 1)),
    "3d 1-2-2": case("3d", p_t_d=(1, 2, 2)),
    "3d 1-1-4, sharded": case("3d", "tied", p_t_d=(1, 1, 4), shards_over_data=True),
    "3d 1-2-2, sharded": case("3d", p_t_d=(1, 2, 2), shards_over_data=True),
    "3d 2-1-2, tied": case("3d", "tied", p_t_d=(2, 1, 2)),
}
ZERO = {
    **{f"zero {stage}": zero(stage, "tied" if stage == 2 else "untied") for stage in (1, 2, 3)},
    **{f"zero {stage}, frozen": zero(stage, trained=False) for stage in (2, 3)},
}


def check(cases: dict[str, dict[str, Any]], directory: Path) -> None:
    models, out = directory / "models", directory / "out"
    out.mkdir()
    sizes: dict[str, Any] = {**SIZES, "max_position_embeddings": 128}
    for tied in (True, False):
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
        model.save_pretrained(models / ("tied" if tied else "untied"))
    reports = launch("integration.weights_main", 4, cases, models, out, deadline_s=DEADLINE_S)
    assert [(name, each) for report in reports for name in cases for each in report[name]["wrong"]] == []
    for name in cases:
        assert all(report[name]["same"] for report in reports)
        held = reports[0][name]["held"]
        assert 0 not in held, f"{name}: some elements are on no rank"
        if "mesh" not in cases[name] and "frozen" not in name:
            assert held == [1], f"{name}: the model is there more than once"


@pytest.mark.slow
def test_four_ranks_send_what_they_export(tmp_path: Path):
    check(QUICK, tmp_path)


@pytest.mark.full
def test_every_engine_and_mesh_sends_what_it_exports(tmp_path: Path):
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    check(EVERY | (ZERO if has_deepspeed else {}), tmp_path)
