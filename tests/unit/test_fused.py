"""Kernels that torch.compile makes compute what plain operations compute, rounded once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama
from unit.test_linear import make
from unit.test_packing import make_model

from rlhf.errors import ConfigError
from services.compute import fused
from services.compute.layers import GatedMLP, speed_up_layers, why_not_fused
from services.roles.kernel_choice import choose_kernels
from services.runtime.ranks import Ranks

CPU = torch.device("cpu")
ROUNDING = 2**-8
"""Of bfloat16, relative to numbers up to 1."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    fused.use(compiled=False)


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Returns the output of a function and the gradients of its inputs, for a gradient of the output that bfloat16
    holds exactly."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(make(*y.shape, seed=9).bfloat16().to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def exact_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)])


@pytest.mark.parametrize("shape", [(2, 5, 48), (1, 300, 48)])
def test_a_norm_and_its_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    x, weight = make(*shape, dtype=torch.bfloat16), make(48, seed=1, dtype=torch.bfloat16)
    ours = gradients(lambda x, weight: fused.rms_norm(x, weight, 1e-6), x, weight)
    for found, exact in zip(ours, gradients(exact_norm, x.double(), weight.double()), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(2, 5, 48), (1, 300, 48)])
def test_a_gated_activation_and_its_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    gate, up = (make(*shape, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    exact = gradients(lambda gate, up: F.silu(gate) * up, gate.double(), up.double())
    for ours, theirs in zip(gradients(fused.gated, gate, up), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("rows_of_angles", [1, 2])
def test_a_rotation_and_its_gradients_are_those_of_float64(rows_of_angles: int) -> None:
    query = make(2, 7, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    key = make(2, 2, 7, 16, seed=1, dtype=torch.bfloat16)
    angles = make(rows_of_angles, 7, 8, seed=2).repeat(1, 1, 2) * 10
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotation(query: Tensor, key: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in fused.rotated(query, key, cos, sin)])

    def exact(query: Tensor, key: Tensor) -> Tensor:
        return exact_rotation(query, key, cos.double(), sin.double())

    theirs = gradients(exact, query.double(), key.double())
    for ours, each in zip(gradients(rotation, query, key), theirs, strict=True):
        torch.testing.assert_close(ours.double(), each, rtol=ROUNDING, atol=ROUNDING)


def test_a_forward_pass_has_the_same_bits_with_and_without_gradients() -> None:
    x, weight, angles = make(2, 3, 5, 48), make(48, seed=1), make(1, 5, 48, seed=2)
    operands = [each.bfloat16().requires_grad_() for each in (x, weight)]
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def outputs() -> list[Tensor]:
        x, weight = operands
        return [fused.rms_norm(x, weight, 1e-6), fused.gated(x, x + 1), *fused.rotated(x, x + 1, cos, sin)]

    learning = outputs()
    assert all(each.requires_grad for each in learning)
    with torch.no_grad():
        assert all(map(torch.equal, outputs(), learning))


@pytest.mark.parametrize("recomputes", [False, True])
def test_kernels_are_compiled_once_for_any_number_of_rows(recomputes: bool) -> None:
    weight = make(24, seed=1).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return fused.rms_norm(fused.gated(x * 2, x), weight, 1e-6)

    def learn(num_rows: int) -> int:
        x = make(1, num_rows, 24).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        y.sum().backward()
        return counters["stats"]["unique_graphs"]

    before = learn(7)
    assert [learn(num_rows) for num_rows in (1, 2, 300, 5000)] == [before] * 4


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_computes_the_same_with_the_kernels_and_keeps_its_names(kind: str) -> None:
    plain = make_model(kind).float()
    model = copy.deepcopy(plain)
    speed_up_layers(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert sum(isinstance(each, GatedMLP) for each in model.modules()) == len(model.model.layers)
    ids = torch.arange(24).view(2, 12)
    found = []
    for each, compiled in ((plain, False), (model, False), (model, True)):
        fused.use(compiled=compiled)
        logits = each(ids, use_cache=False).logits
        weights = dict(each.named_parameters())
        found.append([logits.detach(), *torch.autograd.grad(logits.square().mean(), list(weights.values()))])
    for theirs, eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(eager, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_uses_the_kernels_in_all_its_layers_while_they_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("rms_norm", "gated", "rotated"):
        of_module = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *a, name=name, of_module=of_module: calls.append(name) or of_module(*a)
        )
    model = make_model("llama").float()
    speed_up_layers(model)
    layers = len(model.model.layers)
    for compiled in (False, True):
        fused.use(compiled=compiled)
        model(torch.arange(8)[None], use_cache=False)
        expected = {"rms_norm": 2 * layers + 1, "gated": layers, "rotated": layers} if compiled else {}
        assert {name: calls.count(name) for name in set(calls)} == expected


def test_other_activations_and_other_models_of_the_process_stay_as_they_are() -> None:
    theirs, rotate = make_model("llama"), modeling_llama.apply_rotary_pos_emb
    theirs.model.layers[0].mlp.act_fn = nn.GELU()
    speed_up_layers(theirs)
    assert type(theirs.model.layers[0].mlp).__name__ == "LlamaMLP"
    untouched = make_model("llama")
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert "forward" not in vars(untouched.model.layers[0].self_attn)


def test_they_can_be_used_here_and_are_not_in_use_after_the_check() -> None:
    assert why_not_fused(CPU) == ""
    assert not fused.in_use()


@pytest.mark.parametrize("name", ["_norm", "_norm_gradients", "_gated_gradients", "_rotated_gradients"])
def test_wrong_results_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(fused, name)

    def wrong(*operands: Any) -> Any:
        first, *others = right(*operands)
        return first * 1.1, *others

    monkeypatch.setattr(fused, name, wrong)
    assert "not close" in why_not_fused(CPU)
    assert not fused.in_use()


def test_without_a_compiler_a_gpu_computes_eagerly_and_a_demand_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.roles.kernel_choice.why_not_fused", lambda device: "no C compiler")
    fused.use(compiled=True)
    choose_kernels("auto", torch.device("cuda"), Ranks(0, 1, 0))
    assert fused.name_in_use() == "eager"
    assert "eager ones are used, since compiled ones cannot be: no C compiler" in caplog.text
    with pytest.raises(
        ConfigError, match="kernels: compiled ones cannot be used on this rank: no C compiler"
    ):
        choose_kernels("compiled", CPU, Ranks(0, 1, 0))


def test_a_gpu_computes_with_the_kernels_and_a_cpu_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.roles.kernel_choice.why_not_fused", lambda device: "")
    chosen = []
    cases: list[tuple[Literal["auto", "eager", "compiled"], str]] = [
        ("auto", "cuda"),
        ("auto", "cpu"),
        ("compiled", "cpu"),
        ("eager", "cuda"),
    ]
    for setting, device in cases:
        choose_kernels(setting, torch.device(device), Ranks(0, 1, 0))
        chosen.append(fused.name_in_use())
    assert chosen == ["compiled", "eager", "compiled", "eager"]
