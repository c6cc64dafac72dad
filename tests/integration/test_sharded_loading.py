"""Ranks that read their parts of a model from files have the bits of those that were given the whole."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from integration.ranks import launch
from services.models.export import write_model
from services.models.value_model import ValueModel
from services.models.weights import INDEX_FILE

pytestmark = pytest.mark.slow

DEADLINE_S = 110
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 47,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2 = Qwen2Config(**SIZES, tie_word_embeddings=True)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8)),
    "qwen2": lambda: Qwen2ForCausalLM(QWEN2).to(torch.bfloat16),  # pyright: ignore[reportArgumentType]
    "reward": lambda: LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_labels": 1}, head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "intermediate_size": 48}, num_local_experts=3)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2)),
    "minimax_m2": lambda: MiniMaxM2ForCausalLM(
        MiniMaxM2Config(**{**SIZES, "intermediate_size": 24}, num_local_experts=3, num_experts_per_tok=2)
    ),
}
CASES = {
    "untied, several files": ("policy", "llama", "float32"),
    "tied": ("policy", "qwen2", "float32"),
    "bfloat16": ("policy", "qwen2", "bfloat16"),
    "adapters": ("lora", "llama", "bfloat16"),
    "new value head": ("value", "llama", "float32"),
    "stored value head": ("value", "critic", "float32"),
    "new score": ("score", "llama", "float32"),
    "stored score": ("score", "reward", "float32"),
    "experts": ("policy", "mixtral", "float32"),
    "experts, bfloat16": ("policy", "qwen3_moe", "bfloat16"),
    "experts, new value head": ("value", "qwen3_moe", "float32"),
    "converted": ("policy", "minimax_m2", "float32"),
}


@dataclass(frozen=True)
class Run:
    """Results of two ranks: a directory for each case, and per rank a report."""

    directory: Path
    reports: list[dict[str, dict]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(7)
        make().save_pretrained(root / name, max_shard_size="20KB" if name == "llama" else "1GB")
    critic = ValueModel(AutoModel.from_pretrained(root / "llama"))
    torch.nn.init.normal_(critic.value_head.weight)
    (root / "critic").mkdir()
    write_model(critic, critic.state_dict(), root / "critic")
    return root


@pytest.fixture(scope="module")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("ranks")
    cases = {name: (kind, models / model, dtype) for name, (kind, model, dtype) in CASES.items()}
    for name in cases:
        (out / name).mkdir()
    return Run(out, launch("integration.sharded_loading_main", 2, out, cases, deadline_s=DEADLINE_S))


def stored_names(directory: Path) -> set[str]:
    """Returns the names of the tensors in all weight files of a directory, which an index has to list, if there is
    one."""
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    if (directory / INDEX_FILE).is_file():
        assert json.loads((directory / INDEX_FILE).read_text())["weight_map"].keys() == found
    return found


@pytest.mark.parametrize("what", ["weights", "step", "export"])
def test_ranks_have_the_bits_of_those_that_were_given_the_whole_model(run: Run, what: str):
    found = {(name, rank): report[name][what] for rank, report in enumerate(run.reports) for name in CASES}
    assert [where for where, same in found.items() if not same] == []


def test_an_engine_that_starts_over_has_the_bits_of_a_new_one(run: Run):
    assert all(report[name]["start over"] for report in run.reports for name in CASES)


def test_all_but_what_transformers_must_convert_is_read_by_parts(run: Run):
    for report in run.reports:
        assert {name for name in CASES if not report[name]["bytes read by parts"]} == {"converted"}


def test_transformers_loads_what_was_exported_in_several_files(run: Run):
    loads: dict[str, Any] = {"value": AutoModel, "score": AutoModelForSequenceClassification}
    for name, (kind, _, _) in CASES.items():
        exported = run.directory / name / "export"
        load = loads.get(kind, AutoModelForCausalLM)
        _, found = load.from_pretrained(exported, output_loading_info=True)
        assert not any(found.values()), name
        assert (exported / INDEX_FILE).is_file() == (name != "converted")


def test_a_mixture_of_experts_is_exported_as_its_family_stores_it(run: Run, models: Path):
    for name, model, key in (
        ("experts", "mixtral", ".experts.2.w3."),
        ("experts, bfloat16", "qwen3_moe", ".experts.4.up_proj."),
        ("converted", "minimax_m2", ".experts.2.w3."),
    ):
        keys = [stored_names(directory) for directory in (models / model, run.directory / name / "export")]
        assert keys[0] == keys[1]
        assert any(key in each for each in keys[0])
