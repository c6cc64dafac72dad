"""Adapters that one rank or several train are those of plain peft in one process."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from integration.lora_main import ADAPTERS
from integration.ranks import launch
from integration.three_d_main import ENTROPY_WEIGHT, NUM_STEPS, OPTIONS, TEMPERATURE, VOCABULARY, Rows

DEADLINE_S = 110
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 47,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
}
CASES = ("llama-float64", "llama-float32", "qwen2-float64")
TOLERANCE = {"float64": 1e-8, "float32": 1e-5}
STEPS_TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""After AdamW steps, the first of which moves every weight by the learning rate, however small its gradient is."""
LOGITS_TOLERANCE = {"float64": 1e-12, "float32": 1e-4}
"""Between W x + s B A x and (W + s B A) x."""
SAME_BITS = (
    "seeded",
    "new adapters change nothing",
    "reference before",
    "learned",
    "reference after",
    "resumed",
    "begun_early",
)


@dataclass(frozen=True)
class Run:
    """Results of the ranks of one launch: per rank, a report for each case."""

    directory: Path
    reports: list[dict[str, dict]]

    def all(self) -> list[tuple[str, str, dict]]:
        """Name, dtype and report of every case and rank."""
        return [
            (f"{name}, rank {rank}", name.split("-")[1], report)
            for rank, reports in enumerate(self.reports)
            for name, report in reports.items()
        ]


def plain_loss(model: PeftModel, rows: Rows) -> Tensor:
    """Policy gradient with an entropy bonus, row by row, without padding."""
    total = torch.zeros((), dtype=model.dtype)
    for row in range(rows.prompts.rows):
        prompt, response = rows.prompts.row(row), rows.responses.row(row)
        logits = model(torch.cat((prompt, response))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = (logits[: len(response)] / TEMPERATURE).log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        chosen = log_p.gather(1, response[:, None])[:, 0]
        total = total - (rows.advantages.row(row) * chosen + ENTROPY_WEIGHT * entropy).sum()
    return total / rows.num_tokens


def write_reference(directory: Path, reference: Path, dtype: torch.dtype) -> None:
    """Three steps of plain AdamW on plain peft."""
    reference.mkdir()
    rows = Rows()
    torch.manual_seed(ADAPTERS.seed)
    options = LoraConfig(
        r=ADAPTERS.rank,
        lora_alpha=ADAPTERS.alpha,  # pyright: ignore[reportArgumentType] - peft takes any number
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype), options)
    adapters = {
        name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad
    }
    save(adapters, reference / "first.safetensors")
    adamw = torch.optim.AdamW(adapters.values(), weight_decay=OPTIONS.weight_decay, foreach=False)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        adamw.zero_grad()
        loss = plain_loss(model, rows)
        loss.backward()
        gradients = {name: p.grad for name, p in adapters.items() if p.grad is not None}
        if step == 1:
            save(gradients, reference / "gradients.safetensors")
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        assert norm > OPTIONS.max_grad_norm, "the gradient must be clipped"
        for gradient in gradients.values():
            gradient *= OPTIONS.max_grad_norm / norm
        adamw.param_groups[0]["lr"] = OPTIONS.lr_at(step)
        adamw.step()
        losses.append(float(loss.detach()))
        norms.append(norm)
    (reference / "numbers.json").write_text(json.dumps({"loss": losses, "norm": norms}))
    save(adapters, reference / "adapters.safetensors")
    save(model.merge_and_unload().state_dict(), reference / "merged.safetensors")


def save(tensors: dict[str, Any], path: Path) -> None:
    save_file({name: x.detach().clone() for name, x in tensors.items()}, path)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """Directory of a model, of its reference, and dtype, by case."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(7)
        make().double().save_pretrained(root / name)
    found = {}
    for case in CASES:
        name, dtype = case.split("-")
        write_reference(root / name, root / case, getattr(torch, dtype))
        found[case] = (str(root / name), str(root / case), dtype)
    return found


@pytest.fixture(
    scope="module", params=[(1, 1), (2, 1), (2, 2)], ids=["1 rank", "2 ranks", "2 ranks that divide rows"]
)
def run(request: pytest.FixtureRequest, cases: dict, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("ranks")
    num_ranks, sequence_parallel = request.param
    arguments = (directory, cases, sequence_parallel)
    return Run(directory, launch("integration.lora_main", num_ranks, *arguments, deadline_s=DEADLINE_S))


def beyond(run: Run, key: str, tolerance: dict[str, float]) -> dict[str, float]:
    """Distances from plain peft above tolerance."""
    return {
        f"{name}, {what}": found
        for name, dtype, report in run.all()
        for what, found in report[key].items()
        if not found < tolerance[dtype]
    }


def test_losses_and_gradients_are_those_of_plain_peft(run: Run):
    assert beyond(run, "distances", TOLERANCE) == {}


def test_three_steps_are_those_of_plain_peft(run: Run):
    assert beyond(run, "step distances", STEPS_TOLERANCE) == {}


@pytest.mark.parametrize("what", SAME_BITS)
def test_to_the_bit(run: Run, what: str):
    assert [name for name, _, report in run.all() if not report[what]] == []


def test_data_ranks_have_different_numbers_of_micro_batches(run: Run):
    counts = [report["llama-float64"]["num_micro_batches"] for report in run.reports]
    assert len(set(counts)) == run.reports[0]["llama-float64"]["data_ranks"]


def test_all_ranks_export_the_same_model_which_transformers_and_peft_load(run: Run, cases: dict):
    for name, (directory, _, dtype) in cases.items():
        assert len({reports[name]["exported"] for reports in run.reports}) == 1
        exported = run.directory / name / "export"
        ids = torch.tensor([[1, 5, 9, 11]])
        logits = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        adapted = PeftModel.from_pretrained(base, str(exported / "adapter"))
        torch.testing.assert_close(adapted(ids).logits, logits, rtol=0, atol=LOGITS_TOLERANCE[dtype])
