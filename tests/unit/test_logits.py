"""Log-probabilities and entropy in chunks: the numbers of plain softmax, and never the logits of all positions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute import logits
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.logits import OutputLayer
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.families import load_causal_lm

CPU = torch.device("cpu")
POSITIONS, HIDDEN, VOCABULARY, CHUNK = 23, 6, 40, 5
TEMPERATURE = 0.7


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "MOST_LOGITS", CHUNK * VOCABULARY + VOCABULARY - 1)


def make(dtype: torch.dtype = torch.float64, positions: int = POSITIONS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and token ids."""
    generator = torch.Generator().manual_seed(3)
    hidden_NH = torch.randn(positions, HIDDEN, dtype=dtype, generator=generator)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, generator=generator)
    ids_N = torch.randint(VOCABULARY, (positions,), generator=generator)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), ids_N


def plain(logits_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    log_p_NV = (logits_NV / TEMPERATURE).log_softmax(dim=-1)
    return log_p_NV.gather(1, ids_N[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(dim=-1)


def weighted(scores: tuple[Tensor, Tensor]) -> Tensor:
    """A loss in which every position of both counts differently."""
    factors_N = torch.linspace(-1, 2, len(scores[0]), dtype=scores[0].dtype)
    return (factors_N * scores[0] + factors_N.flip(0).square() * scores[1]).sum()


@pytest.mark.usefixtures("in_chunks")
def test_scores_and_gradients_are_those_of_plain_softmax():
    hidden_NH, weight_VH, ids_N = make()
    expected = plain(hidden_NH @ weight_VH.t(), ids_N)
    found = OutputLayer(weight_VH).scores(hidden_NH, ids_N, TEMPERATURE)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_expected, of_found = (
        torch.autograd.grad(weighted(scores), (hidden_NH, weight_VH)) for scores in (expected, found)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (2.0, 3.0)])
def test_logits_are_scaled_and_capped(scale: float, cap: float | None):
    hidden_NH, weight_VH, ids_N = make()
    logits_NV = scale * (hidden_NH @ weight_VH.t())
    expected = plain(logits_NV if cap is None else cap * (logits_NV / cap).tanh(), ids_N)
    found = OutputLayer(weight_VH, scale=scale, cap=cap).scores(hidden_NH, ids_N, TEMPERATURE)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_expected, of_found = (
        torch.autograd.grad(weighted(scores), (hidden_NH, weight_VH)) for scores in (expected, found)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_may_read_only_one_of_the_two(which: int):
    hidden_NH, weight_VH, ids_N = make()
    expected = plain(hidden_NH @ weight_VH.t(), ids_N)[which].square().sum()
    found = OutputLayer(weight_VH).scores(hidden_NH, ids_N, TEMPERATURE)[which].square().sum()
    of_expected, of_found = (torch.autograd.grad(loss, (hidden_NH, weight_VH)) for loss in (expected, found))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("in_chunks")
def test_logits_that_are_there_already_are_scored_as_they_are():
    hidden_NH, weight_VH, ids_N = make()
    logits_NV = (hidden_NH @ weight_VH.t()).detach().requires_grad_()
    before = logits_NV.detach().clone()
    of_expected, of_found = (
        torch.autograd.grad(weighted(scores), logits_NV)
        for scores in (plain(logits_NV, ids_N), OutputLayer().scores(logits_NV, ids_N, TEMPERATURE))
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(logits_NV.detach(), before)


@pytest.mark.usefixtures("in_chunks")
def test_rows_that_are_no_tokens_have_no_part_and_no_gradient():
    hidden_NH, weight_VH, ids_N = make()
    real = 30
    ids_N %= real
    expected = plain(hidden_NH @ weight_VH[:real].t(), ids_N)
    found = OutputLayer(weight_VH, num_tokens=real).scores(hidden_NH, ids_N, TEMPERATURE)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_expected, of_found = (
        torch.autograd.grad(weighted(scores), (hidden_NH, weight_VH)) for scores in (expected, found)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)
    assert not of_found[1][real:].any()


def test_no_positions_have_no_scores_and_no_gradient():
    hidden_NH, weight_VH, ids_N = make(positions=0)
    log_probs_N, entropy_N = OutputLayer(weight_VH).scores(hidden_NH, ids_N)
    assert log_probs_N.shape == entropy_N.shape == (0,)
    of_hidden, of_weight = torch.autograd.grad(log_probs_N.sum() + entropy_N.sum(), (hidden_NH, weight_VH))
    assert of_hidden.shape == (0, HIDDEN)
    assert not of_weight.any()


@pytest.mark.usefixtures("in_chunks")
def test_products_in_bfloat16_give_scores_and_weight_gradients_in_float32():
    hidden_NH, weight_VH, ids_N = make(torch.float32)
    layer = OutputLayer(weight_VH, compute_dtype=torch.bfloat16)
    scores = layer.scores(hidden_NH, ids_N, TEMPERATURE)
    expected = plain(hidden_NH @ weight_VH.t(), ids_N)
    assert scores[0].dtype == scores[1].dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.1)
    for found, exact in zip(
        torch.autograd.grad(weighted(scores), (hidden_NH, weight_VH)),
        torch.autograd.grad(weighted(expected), (hidden_NH, weight_VH)),
        strict=True,
    ):
        assert found.dtype == torch.float32
        assert 0 < (found - exact).norm() / exact.norm() < 0.02


class Largest(TorchDispatchMode):
    """Notes the most rows of any tensor with a column per token of the vocabulary, weights apart."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.ndim and x.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return result


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine_name", ["fsdp", "3d"])
def test_no_engine_ever_holds_more_logits_than_a_chunk(
    engine_name: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    model = load_causal_lm(tiny_llama_dir)
    # The padded vocabulary of engine 3d, and that of the model; neither is another size of it.
    vocabulary = {"fsdp": 61, "3d": 64}[engine_name]
    hidden: Any = model.config.hidden_size
    assert vocabulary not in (hidden, 48)
    options = OptimizerOptions()
    engine = (
        FSDPEngine(model, CPU, optimizer=options)
        if engine_name == "fsdp"
        else ThreeDParallelEngine(tiny_llama_dir, Mesh(), CPU, optimizer=options)
    )
    lengths = np.full(4, 20, dtype=np.int64)
    prompts, responses = (Jagged(torch.arange(80) % 61, lengths) for _ in range(2))
    micro_batches = split(prompts, responses, token_budget=1000, pad_id=0)
    monkeypatch.setattr(logits, "MOST_LOGITS", hidden * vocabulary)

    def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return output.log_probs_BR.sum() + output.entropy_BR.sum(), {}

    with Largest(vocabulary) as seen:
        engine.infer(micro_batches, PolicyHead())
        engine.step(micro_batches, PolicyHead(entropy_gradient=True), loss)
    # As many rows as the transposed weight has; all positions would be 80 rows and more.
    assert seen.rows == hidden
