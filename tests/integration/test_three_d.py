"""3D-parallel ranks compute what one process with plain transformers does, on every mesh."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from integration.ranks import launch
from integration.three_d_main import ENTROPY_WEIGHT, NUM_STEPS, OPTIONS, TEMPERATURE, VOCABULARY, Rows
from services.models import ValueModel, load_value_model

DEADLINE_S = {"fast": 240, "every mesh": 1100}
"""Of a launch: beside other tests ranks mostly wait for each other."""

pytestmark = pytest.mark.timeout(300)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 5}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, **WINDOW, max_window_layers=2, use_sliding_window=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, **WINDOW)),
}
TOLERANCE = {"float64": 1e-8, "float32": 1e-5}
STEPS_TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""After AdamW steps. The first moves every weight by the learning rate times the sign of its gradient, whatever its
size, so float32 noise in gradients near zero becomes as large as a step."""
Meshes = list[tuple[tuple[int, ...], bool]]
"""p, t, d, where two more numbers are the generation mesh, which permutes the ranks; and whether weights are sharded
over d."""


def replicated(*sizes: tuple[int, ...]) -> Meshes:
    return [(each, False) for each in sizes]


def sharded(*sizes: tuple[int, ...]) -> Meshes:
    return [(each, True) for each in sizes]


FAST = {
    2: [*replicated((1, 2, 1)), *sharded((1, 1, 2))],
    4: [*replicated((1, 2, 2), (2, 2, 1, 1, 2)), *sharded((2, 1, 2))],
}
EVERY = {
    2: [*FAST[2], *replicated((1, 1, 2), (2, 1, 1), (1, 2, 1, 1, 1))],
    3: sharded((1, 1, 3)),
    4: [
        *FAST[4],
        *replicated(
            (2, 1, 2),
            (1, 1, 4),
            (2, 2, 1),
            (1, 2, 2, 1, 1),
            (1, 4, 1, 1, 2),
            (4, 1, 1, 2, 1),
            (2, 2, 1, 2, 1),
        ),
        *sharded((1, 2, 2), (1, 2, 2, 1, 1), (1, 1, 4), (2, 2, 1)),
    ],
    8: [
        *replicated((2, 2, 2), (1, 4, 2), (2, 2, 2, 1, 2), (1, 4, 2, 1, 2), (4, 2, 1, 2, 1)),
        *sharded((2, 2, 2), (2, 2, 2, 1, 2)),
    ],
}
FAST_CASES = ("llama-float64", "llama-float32", "qwen2-float64", "critic-value")
FULL = [pytest.mark.full, pytest.mark.timeout(1200)]
LAUNCHES = [
    *(pytest.param((size, FAST[size], FAST_CASES), id=f"{size} ranks") for size in FAST),
    *(pytest.param((size, EVERY[size], None), id=f"{size} ranks, every mesh", marks=FULL) for size in EVERY),
]


@dataclass(frozen=True)
class Run:
    """What the ranks of one launch left behind: per rank, a report for each case and mesh."""

    directory: Path
    reports: list[dict[str, dict]]


def row_distributions(model: PreTrainedModel, rows: Rows, row: int) -> Tensor:
    """Log-distributions of the response tokens of a row that is computed alone, without padding."""
    prompt, response = rows.prompts.row(row), rows.responses.row(row)
    logits = model(torch.cat((prompt, response))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits[: len(response)] / TEMPERATURE).log_softmax(dim=-1)


def plain_loss(model: PreTrainedModel, rows: Rows) -> Tensor:
    total = torch.zeros((), dtype=model.dtype)
    for row in range(rows.prompts.rows):
        log_p = row_distributions(model, rows, row)
        for position, token in enumerate(rows.responses.row(row)):
            entropy = -(log_p[position].exp() * log_p[position]).sum()
            total = total - (
                rows.advantages.row(row)[position] * log_p[position, token] + ENTROPY_WEIGHT * entropy
            )
    return total / rows.num_tokens


def plain_steps(model: nn.Module, loss_of) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three AdamW steps in one process, and the first gradient."""
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=OPTIONS.weight_decay, foreach=False)
    losses, norms, first = [], [], {}
    for step in range(NUM_STEPS):
        adamw.zero_grad()
        loss = loss_of()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        assert norm > OPTIONS.max_grad_norm, "the gradient must be clipped"
        for gradient in gradients.values():
            gradient *= OPTIONS.max_grad_norm / norm
        adamw.param_groups[0]["lr"] = OPTIONS.lr_at(step)
        adamw.step()
        losses.append(float(loss.detach()))
        norms.append(norm)
    return losses, norms, first


def write_reference(directory: Path, reference: Path, dtype: torch.dtype) -> None:
    reference.mkdir()
    rows, model = Rows(), AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        log_probs = {
            str(row): row_distributions(model, rows, row).gather(1, rows.responses.row(row)[:, None])[:, 0]
            for row in range(rows.prompts.rows)
        }
    save_file(log_probs, reference / "log_probs.safetensors")
    losses, norms, gradients = plain_steps(model, lambda: plain_loss(model, rows))
    (reference / "numbers.json").write_text(json.dumps({"loss": losses, "norm": norms}))
    save_file(gradients, reference / "gradients.safetensors")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, reference / "weights.safetensors")


def write_value_reference(directory: Path, reference: Path) -> None:
    reference.mkdir()
    rows, model = Rows(), load_value_model(directory, torch.float64)

    def loss() -> Tensor:
        errors = []
        for row in range(rows.prompts.rows):
            prompt, response = rows.prompts.row(row), rows.responses.row(row)
            values = model(torch.cat((prompt, response))[None])[0, len(prompt) - 1 : -1][: len(response)]
            errors.append(values - rows.advantages.row(row))
        return torch.cat(errors).square().sum() / rows.num_tokens

    plain_steps(model, loss)
    save_file({name: p.detach() for name, p in model.named_parameters()}, reference / "weights.safetensors")


def write_data_parallel_cases(root: Path) -> dict[str, tuple[str, str, str]]:
    """Directory of a model, of its reference, and dtype, by case: what engines without model parallelism train on."""
    found = {}
    for name in ("llama", "qwen2"):
        torch.manual_seed(7)
        MODELS[name]().double().save_pretrained(root / name)
        for dtype in ("float64", "float32"):
            reference = root / f"{name}-{dtype}"
            write_reference(root / name, reference, getattr(torch, dtype))
            found[reference.name] = (str(root / name), str(reference), dtype)
    write_value_reference(root / "llama", root / "critic-value")
    return found | {"critic-value": (str(root / "llama"), str(root / "critic-value"), "value")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """Directory of a model, of its reference, and dtype, by case."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(7)
        make().double().save_pretrained(root / name)
        for dtype in ("float64", "float32") if name in ("llama", "qwen2") else ("float64",):
            write_reference(root / name, root / f"{name}-{dtype}", getattr(torch, dtype))
            found[f"{name}-{dtype}"] = (str(root / name), str(root / f"{name}-{dtype}"), dtype)
    torch.manual_seed(8)
    critic = ValueModel(AutoModelForCausalLM.from_pretrained(root / "llama").model)
    nn.init.normal_(critic.value_head.weight)
    critic.backbone.save_pretrained(root / "critic")
    save_file(critic.value_head.state_dict(), root / "critic" / "value_head.safetensors")
    write_value_reference(root / "critic", root / "critic-value")
    return found | {"critic-value": (str(root / "critic"), str(root / "critic-value"), "value")}


@pytest.fixture(scope="module", params=LAUNCHES)
def launched(request: pytest.FixtureRequest, cases: dict, tmp_path_factory: pytest.TempPathFactory) -> Run:
    num_ranks, meshes, names = request.param
    chosen = {name: case for name, case in cases.items() if names is None or name in names}
    directory = tmp_path_factory.mktemp("ranks")
    deadline_s = DEADLINE_S["every mesh" if names is None else "fast"]
    return Run(
        directory,
        launch("integration.three_d_main", num_ranks, directory, meshes, chosen, deadline_s=deadline_s),
    )


def policies(run: Run) -> list[tuple[str, str, dict]]:
    """Name, dtype and report of each case, mesh and rank of a policy."""
    return [
        (f"{name}, rank {rank}", name.split("-")[1], report)
        for rank, reports in enumerate(run.reports)
        for name, report in reports.items()
        if "-value-" not in name
    ]


def beyond(tolerance: dict[str, float], run: Run, *keys: str) -> dict[str, float]:
    """What is further from the reference than its tolerance."""
    return {
        f"{name}: {key}": report[key]
        for name, dtype, report in policies(run)
        for key in keys
        if not report[key] <= tolerance[dtype]
    }


def test_every_rank_loads_the_parts_that_are_its_own(launched: Run):
    assert {name: r["wrong_parts"] for name, _, r in policies(launched) if r["wrong_parts"]} == {}


def test_the_parts_gather_to_the_model(launched: Run):
    assert {name: r["wrong_whole"] for name, _, r in policies(launched) if r["wrong_whole"]} == {}


def test_log_probs_come_out_where_results_are_collected(launched: Run):
    for name, dtype, report in policies(launched):
        assert report["num_outputs"] == (report["num_micro_batches"] if report["sees_outputs"] else 0), name
        assert report["log_probs"] <= 10 * TOLERANCE[dtype], name


def test_loss_and_every_gradient_are_those_of_one_process(launched: Run):
    assert beyond(TOLERANCE, launched, "loss", "gradients") == {}


def test_gradient_norms_and_losses_of_three_steps_are_those_of_one_process(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "norms", "losses") == {}


def test_weights_after_three_steps_are_those_of_one_process(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "weights") == {}


def test_a_step_that_fails_somewhere_is_refused_everywhere_and_moves_nothing(launched: Run):
    for name, _, report in policies(launched):
        fails_here = report["sees_outputs"] and report["data"][0] == report["data"][1] - 1
        assert report["refused"] == ["NonFiniteGradient", "KeyError" if fails_here else "PeerRankFailed"], (
            name
        )


def test_a_checkpoint_of_one_mesh_continues_on_another(launched: Run):
    assert beyond(STEPS_TOLERANCE, launched, "resumed") == {}


def test_a_snapshot_comes_back(launched: Run):
    assert all(report["restored"] for _, _, report in policies(launched))


def test_all_ranks_know_the_hash_of_the_export(launched: Run):
    for name in launched.reports[0]:
        assert len({reports[name].get("exported") for reports in launched.reports}) == 1


def test_an_export_is_a_hugging_face_directory_with_the_same_logits(launched: Run):
    ids = torch.tensor([[5, 9, 3, 60]])
    for name in launched.reports[0]:
        if "-value-" in name:
            continue
        exported = AutoModelForCausalLM.from_pretrained(launched.directory / name / "export")
        whole = load_file(launched.directory / name / "whole.safetensors")
        assert all(torch.equal(x, whole[key]) for key, x in exported.state_dict().items()), name
        copy = AutoModelForCausalLM.from_config(exported.config).to(exported.dtype).eval()
        copy.load_state_dict(whole)
        assert torch.equal(copy(ids).logits, exported.eval()(ids).logits), name


def test_value_models_learn_as_in_one_process(launched: Run):
    for reports in launched.reports:
        assert {name: r for name, r in reports.items() if "-value-" in name and not r["weights"] < 1e-8} == {}


def test_the_export_of_a_value_model_is_one(launched: Run, cases: dict):
    expected = load_file(Path(cases["critic-value"][1]) / "weights.safetensors")
    for name in launched.reports[0]:
        if "-value-" in name:
            loaded = load_value_model(launched.directory / name / "export", torch.float64).state_dict()
            for key, x in loaded.items():
                torch.testing.assert_close(x, expected[key], rtol=1e-8, atol=1e-10)
