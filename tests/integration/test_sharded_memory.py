"""No rank of engines fsdp and zero holds more of a model than it keeps and a piece: when it loads, when it exports.

Memory is that of the process, so modules and file headers are in it, and what allocators keep.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration.ranks import launch
from integration.test_three_d_memory import RETURN_FREED_MEMORY, SLACK_BYTES

pytest.importorskip("deepspeed")

from integration.sharded_memory_main import CASES, SEVERAL_FILES

pytestmark = pytest.mark.full

DEADLINE_S = 110
BLOCKS_AT_A_TIME = 4
"""Of which FSDP2 has something while it computes: what it gathers, the same put in place, and the next one."""


@dataclass(frozen=True)
class Run:
    """Reports of two ranks, and the bytes of the model in float32: of all, of a layer, of the largest tensor."""

    reports: list[dict[str, dict[str, int]]]
    whole: int
    layer: int
    largest: int


def write_model(directory: Path, hidden: int, num_layers: int) -> LlamaForCausalLM:
    """A Llama in bfloat16: loaded as float32, no page of its file serves for its memory."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
    )
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)  # pyright: ignore[reportArgumentType]
    return model


def float32_bytes(model: torch.nn.Module) -> list[int]:
    return [4 * p.numel() for p in model.parameters()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    write_model(out / "small", 64, 2)
    model = write_model(out / "large", 640, 12)
    reports = launch(
        "integration.sharded_memory_main",
        2,
        *(out, out / "small", out / "large"),
        deadline_s=DEADLINE_S,
        environment=RETURN_FREED_MEMORY,
    )
    sizes = float32_bytes(model)
    return Run(
        reports,
        whole=sum(sizes),
        layer=sum(float32_bytes(model.model.layers[0])),
        largest=max(sizes),
    )


def test_loading_takes_what_a_rank_keeps_and_a_piece(run: Run):
    pieces = {name: BLOCKS_AT_A_TIME * run.layer if "fsdp" in name else 2 * run.largest for name in CASES}
    for report in run.reports:
        beyond = {name: found["loading"] - found["resident"] - pieces[name] for name, found in report.items()}
        assert {name for name, excess in beyond.items() if excess > SLACK_BYTES} == {"whole"}


def test_a_rank_keeps_its_share(run: Run):
    shares = {
        "fsdp": 0.5,
        # A weight, and two moments.
        "fsdp that learns": 1.5,
        "zero-3": 0.5,
        # The weight that learns and its copy that computes, its gradient, and two moments.
        "zero-3 that learns": 2.5,
        # The model; the part that learns, and its moments.
        "zero-2 that learns": 2.5,
        "whole": 0.5,
    }
    for report in run.reports:
        found = {name: numbers["resident"] / run.whole for name, numbers in report.items()}
        assert found == pytest.approx(shares, rel=0.02)


def test_exporting_takes_a_file_and_few_tensors(run: Run):
    most = SEVERAL_FILES + 3 * run.largest + SLACK_BYTES
    assert most < 0.4 * run.whole
    first, second = run.reports
    assert {name for name, found in first.items() if found["exporting"] > most} == {"whole"}
    assert {name for name, found in second.items() if found["exporting"] > most - SEVERAL_FILES} == set()
