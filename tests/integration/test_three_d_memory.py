"""No rank of a mesh ever holds more of the model than its part and one tensor."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from integration.ranks import launch

pytestmark = pytest.mark.slow

DEADLINE_S = 110
SLACK_BYTES = 12 << 20
"""Modules, file headers and what allocators keep."""

# The C library would keep much of what is freed, and hide what is needed at a time.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def write_model(directory: Path, hidden: int) -> tuple[int, int]:
    """A Llama; returns the bytes of all its weights and of the largest."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    sizes = [4 * p.numel() for p in model.parameters()]
    return sum(sizes), max(sizes)


@pytest.mark.parametrize(
    "mesh", [(1, 2, 1, 1, 1), pytest.param((2, 1, 1, 1, 1), marks=pytest.mark.full)], ids=str
)
def test_a_rank_takes_the_memory_of_its_part_and_of_one_tensor(tmp_path: Path, mesh: tuple[int, ...]):
    torch.manual_seed(0)
    write_model(tmp_path / "small", 64)
    whole, largest = write_model(tmp_path / "large", 1024)
    reports = launch(
        "integration.three_d_memory_main",
        2,
        *(mesh, tmp_path / "small", tmp_path / "large"),
        deadline_s=DEADLINE_S,
        environment=RETURN_FREED_MEMORY,
    )
    for report in reports:
        assert 0.45 * whole < report["kept"] < 0.55 * whole
        assert report["loading"] < report["kept"] + largest + SLACK_BYTES < 0.8 * whole
        # The tensor, the one before it, and the copy that gloo gathers into.
        assert report["gathering"] < 3 * largest + SLACK_BYTES < 0.3 * whole
        # What it generates with, of which its part was there; and what gloo gathers a layer into.
        layer = whole / 4
        assert report["generated"] == pytest.approx(whole, rel=0.01)
        assert report["transition"] < report["generated"] - report["kept"] + layer + SLACK_BYTES
