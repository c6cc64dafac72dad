"""GSPO, CISPO, importance correction and the pretraining loss equal loops written from the papers, in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.actor.losses import policy_loss, pretraining_loss, surrogate_of
from services.actor.rollout_correction import rollout_weights
from services.actor.surrogates import cispo_loss, gspo_loss
from services.roles.loss_options import PolicyLossOptions, read_knobs
from settings.losses import ClipOptions

SEEDS = range(6)
ROWS, TOKENS = 7, 5

Sequences = list[list[tuple[float, ...]]]


def random_mask(seed: int) -> Tensor:
    """Right-padded rows of random length; the first is empty, the second full."""
    lengths = torch.randint(0, TOKENS + 1, (ROWS,), generator=torch.Generator().manual_seed(seed))
    lengths[0], lengths[1] = 0, TOKENS
    return torch.arange(TOKENS) < lengths[:, None]


def random_columns(seed: int, count: int, scale: float = 0.6) -> list[Tensor]:
    """Numbers of both signs, also in the padding."""
    generator = torch.Generator().manual_seed(100 + seed)
    return [scale * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64) for _ in range(count)]


def sequences(mask: Tensor, *columns: Tensor) -> Sequences:
    """Per row its tokens, as tuples of the columns' numbers, without the padding."""
    return [
        [tuple(column[row, t].item() for column in columns) for t in range(TOKENS) if mask[row, t]]
        for row in range(ROWS)
    ]


def total(mask: Tensor, *columns: Tensor, loss: Callable[[list[tuple[float, ...]]], list[float]]) -> float:
    return sum(sum(loss(tokens)) for tokens in sequences(mask, *columns))


def knobs(**given: Any) -> PolicyLossOptions:
    return PolicyLossOptions(**given)


def masked_total(x: Tensor, mask: Tensor) -> float:
    return x[mask].sum().item()


def clipped(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def gspo_sequence(tokens: list[tuple[float, ...]], low: float, high: float) -> list[float]:
    """max(-A s, -A clip(s)) at every token, s the geometric mean of the tokens' ratios."""
    if not tokens:
        return []
    ratio = math.exp(sum(new - old for new, old, _ in tokens) / len(tokens))
    return [max(-a * ratio, -a * clipped(ratio, 1 - low, 1 + high)) for _, _, a in tokens]


def cispo_sequence(tokens: list[tuple[float, ...]], low: float, high: float) -> list[float]:
    return [-clipped(math.exp(new - old), 1 - low, 1 + high) * a * new for new, old, a in tokens]


def weight_sequence(tokens: list[tuple[float, ...]], correction: str, level: str) -> list[float]:
    """Weights of a sequence's tokens, given the two log-probabilities and the advantage of each."""
    ratios = [math.exp(old - rollout) for old, rollout, _ in tokens]
    if level == "sequence":
        ratios = [math.prod(ratios)] * len(ratios)
    if correction == "truncate":
        return [min(ratio, 1.5) for ratio in ratios]
    if correction == "taper":
        return [
            1.0 if token[2] >= 0 else min(ratio, 1.0) for token, ratio in zip(tokens, ratios, strict=True)
        ]
    return [ratio if 0.6 <= ratio <= 1.5 else 0.0 for ratio in ratios]


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_equals_the_loop(seed: int) -> None:
    mask, (new, old, advantages) = random_mask(seed), random_columns(seed, 3)
    loss, stats = gspo_loss(new, old, advantages, mask, ClipOptions(clip_low=0.2, clip_high=0.3))
    expected = total(mask, new, old, advantages, loss=lambda tokens: gspo_sequence(tokens, 0.2, 0.3))
    assert masked_total(loss, mask) == pytest.approx(expected, rel=1e-6)
    ratios = total(
        mask,
        new,
        old,
        loss=lambda tokens: (
            [math.exp(sum(n - o for n, o in tokens) / len(tokens))] * len(tokens) if tokens else []
        ),
    )
    assert stats["ratio"].item() == pytest.approx(ratios, rel=1e-6)


def test_gspo_of_a_hand_worked_example() -> None:
    # Ratios 2 and 1/2 of one sequence: their geometric mean is 1, so nothing is clipped although each token's would be.
    new = torch.tensor([[math.log(2.0), -math.log(2.0)]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)
    loss, stats = gspo_loss(new, zero, torch.ones(1, 2), mask, ClipOptions(clip_low=0.2, clip_high=0.2))
    (loss.sum() / 2).backward()
    torch.testing.assert_close(loss.detach(), torch.full((1, 2), -1.0, dtype=torch.float64))
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.full((1, 2), -0.5, dtype=torch.float64))
    assert stats["clip_high"].item() == 0


@pytest.mark.parametrize("per_sequence", [True, False], ids=["gspo", "gspo-token"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_gspo_is_that_of_the_paper(seed: int, per_sequence: bool) -> None:
    """-(1/B) (1/n_i) A_t s_i at each token, 0 where the clip holds."""
    mask, (new, old, advantages) = random_mask(seed), random_columns(seed, 3)
    if per_sequence:
        advantages = advantages[:, :1].expand(-1, TOKENS)
    new.requires_grad_()
    options = knobs(
        surrogate="gspo",
        surrogate_options={"clip_low": 0.2, "clip_high": 0.3},
        aggregation="seq-mean-token-mean",
    )
    sizes: dict[str, Any] = {"num_tokens": int(mask.sum()), "num_sequences": ROWS}
    loss, _ = policy_loss(new, old, advantages, mask, surrogate_of(options), options, **sizes)
    loss.backward()
    expected = torch.zeros_like(new)
    for row in range(ROWS):
        n = int(mask[row].sum())
        ratio = math.exp((new - old)[row, :n].sum().item() / max(n, 1))
        for t in range(n):
            a = advantages[row, t].item()
            is_cut = ratio > 1.3 if a > 0 else ratio < 0.8
            expected[row, t] = 0.0 if is_cut else -a * ratio / n / ROWS
    assert new.grad is not None
    torch.testing.assert_close(new.grad, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_equals_the_loop(seed: int) -> None:
    mask, (new, old, advantages) = random_mask(seed), random_columns(seed, 3)
    loss, stats = cispo_loss(new, old, advantages, mask, ClipOptions(clip_low=0.4, clip_high=0.3))
    expected = total(mask, new, old, advantages, loss=lambda tokens: cispo_sequence(tokens, 0.4, 0.3))
    assert masked_total(loss, mask) == pytest.approx(expected, rel=1e-9)
    high = total(mask, new, old, loss=lambda tokens: [float(math.exp(n - o) > 1.3) for n, o in tokens])
    assert stats["clip_high"].item() == high


def test_cispo_of_a_hand_worked_example() -> None:
    # Ratios 3 and 1/2, clipped to 1.25 and not at all; the weight carries no gradient, and no token is cut off.
    new = torch.tensor([[math.log(3.0), math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)
    advantages = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    loss, _ = cispo_loss(new, zero, advantages, mask, ClipOptions(clip_low=1.0, clip_high=0.25))
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-1.25 * 2 * math.log(3), 0.5 * math.log(0.5)])
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-2.5, 0.5])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["truncate", "mask", "taper"])
def test_importance_weights_equal_the_loop(correction: str, level: str, seed: int) -> None:
    mask, (old, rollout, advantages) = random_mask(seed), random_columns(seed, 3)
    weights, stats = rollout_weights(
        old, rollout, advantages, mask, correction=correction, level=level, low=0.6, high=1.5
    )
    expected = [
        weight
        for tokens in sequences(mask, old, rollout, advantages)
        for weight in weight_sequence(tokens, correction, level)
    ]
    assert weights[mask].tolist() == pytest.approx(expected, rel=1e-9)
    plain = [
        ratio
        for tokens in sequences(mask, old, rollout)
        for ratio in (
            [math.exp(sum(o - r for o, r in tokens))] * len(tokens)
            if level == "sequence"
            else [math.exp(o - r) for o, r in tokens]
        )
    ]
    assert stats["rollout_ratio"].item() == pytest.approx(sum(plain), rel=1e-9)
    cut = sum(weight != pytest.approx(ratio) for weight, ratio in zip(expected, plain, strict=True))
    assert stats["rollout_cut"].item() == cut


def test_importance_weights_of_a_hand_worked_example() -> None:
    # Ratios 4 and 1/4: truncated at 2, masked outside [0.5, 2]; their product, the sequence's ratio, is 1.
    old = torch.tensor([[math.log(4.0), -math.log(4.0)]], dtype=torch.float64)
    zero, mask = torch.zeros_like(old), torch.ones(1, 2)

    def weights(correction: str, level: str, *advantages: float) -> list[float]:
        given = torch.tensor([advantages or (0.0, 0.0)], dtype=torch.float64)
        return rollout_weights(
            old, zero, given, mask, correction=correction, level=level, low=0.5, high=2.0
        )[0][0].tolist()  # fmt: skip

    assert weights("truncate", "token") == pytest.approx([2.0, 0.25])
    assert weights("mask", "token") == [0.0, 0.0]
    assert weights("mask", "sequence") == pytest.approx([1.0, 1.0])
    assert weights("taper", "token", -1.0, -1.0) == pytest.approx([1.0, 0.25])
    assert weights("taper", "token", 1.0, 1.0) == [1.0, 1.0]


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
def test_the_weights_multiply_the_surrogate_and_nothing_else(surrogate: str) -> None:
    mask, (new, old, advantages, rollout, ref, entropy) = random_mask(3), random_columns(3, 6)
    terms = {"entropy_coefficient": 0.1, "kl_loss_coefficient": 0.2, "kl_loss_estimator": "k1"}
    corrected = knobs(
        surrogate=surrogate, rollout_correction="truncate", rollout_correction_high=1.5, **terms
    )
    sizes: dict[str, Any] = {
        "num_tokens": int(mask.sum()),
        "num_sequences": ROWS,
        "entropy_BT": entropy,
        "ref_log_probs_BT": ref,
    }
    columns = (new, old, advantages, mask, surrogate_of(corrected), corrected)
    loss, stats = policy_loss(*columns, **sizes, rollout_log_probs_BT=rollout)
    rows, surrogates = [], policy_tokens(new, old, advantages, mask, knobs(surrogate=surrogate))
    for tokens in sequences(mask, old, rollout, surrogates, entropy, new - ref):
        weights = weight_sequence([token[:3] for token in tokens], "truncate", "token")
        rows += [
            (w * s, w * s - 0.1 * h + 0.2 * kl)
            for w, (_, _, s, h, kl) in zip(weights, tokens, strict=True)
        ]  # fmt: skip
    assert loss.item() == pytest.approx(sum(whole for _, whole in rows) / len(rows), rel=1e-6)
    assert stats["pg_loss"].item() == pytest.approx(sum(pg for pg, _ in rows), rel=1e-6)


def policy_tokens(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: PolicyLossOptions
) -> Tensor:
    """The surrogate of each token on its own: the loss with every other token's advantage set to 0."""
    found = torch.zeros_like(new)
    for row in range(ROWS):
        for t in range(TOKENS):
            only = torch.zeros_like(advantages)
            only[row, t] = advantages[row, t]
            columns = (new, old, only, mask, surrogate_of(options), options)
            found[row, t], _ = policy_loss(*columns, num_tokens=1, num_sequences=1)
    return found


@pytest.mark.parametrize("cut", [[7], [1] * 7, [3, 4]])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["gspo", "cispo"])
def test_the_micro_batches_change_neither_loss_nor_gradient(
    surrogate: str, level: str, cut: list[int]
) -> None:
    mask, (new, old, advantages, rollout) = random_mask(2), random_columns(2, 4)
    options = knobs(
        surrogate=surrogate,
        rollout_correction="mask",
        rollout_correction_level=level,
        aggregation="seq-mean-token-mean",
    )

    def run(parts: list[int]) -> tuple[float, Tensor]:
        weights = new.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        columns = [x.split(parts) for x in (weights, old, advantages, mask, rollout)]
        for one, two, three, four, five in zip(*columns, strict=True):
            share, _ = policy_loss(
                one,
                two,
                three,
                four,
                surrogate_of(options),
                options,
                num_tokens=int(mask.sum()),
                num_sequences=ROWS,
                rollout_log_probs_BT=five,
            )
            loss = loss + share
        loss.backward()
        assert weights.grad is not None
        return loss.item(), weights.grad

    whole, parts = run([ROWS]), run(cut)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_pretraining_loss_equals_the_loop(seed: int) -> None:
    mask, (log_probs,) = random_mask(seed), random_columns(seed, 1)
    tokens = [x for row in sequences(mask, log_probs) for (x,) in row]
    share, stats = pretraining_loss(log_probs, mask, 16.0, num_tokens=3 * len(tokens))
    assert share.item() == pytest.approx(16.0 * sum(-x for x in tokens) / (3 * len(tokens)), rel=1e-9)
    assert stats["pretrain_loss"].item() == pytest.approx(sum(-x for x in tokens), rel=1e-9)


def test_texts_without_tokens_have_no_pretraining_loss() -> None:
    share, _ = pretraining_loss(torch.ones(1, 2), torch.zeros(1, 2), 16.0, num_tokens=0)
    assert share.item() == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_log_ratios_of_tokens_and_of_sequences_are_clamped(sign: int) -> None:
    far, zero, mask = torch.full((1, 2), 500.0 * sign), torch.zeros(1, 2), torch.ones(1, 2)
    found = [loss_of(far, zero, zero, mask, ClipOptions())[1]["ratio"] for loss_of in (gspo_loss, cispo_loss)]
    for level in ("token", "sequence"):
        _, stats = rollout_weights(
            far, zero, zero, mask, correction="truncate", level=level, low=0.5, high=2.0
        )
        found.append(stats["rollout_ratio"])
    assert [x.item() for x in found] == pytest.approx([2 * math.exp(20 * sign)] * 4)


def test_padding_reaches_neither_ratio_nor_weight() -> None:
    mask, (new, old, advantages) = random_mask(1), random_columns(1, 3)
    poisoned = torch.where(mask, old, 1e9)
    for loss_of in (gspo_loss, cispo_loss):
        clean, _ = loss_of(new, old, advantages, mask, ClipOptions(clip_low=0.2, clip_high=0.2))
        dirty, _ = loss_of(new, poisoned, advantages, mask, ClipOptions(clip_low=0.2, clip_high=0.2))
        torch.testing.assert_close(clean[mask], dirty[mask])
    weights = [
        rollout_weights(x, new, x, mask, correction="mask", level="sequence", low=0.5, high=2.0)[0][mask]
        for x in (old, poisoned)
    ]
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        (
            {"surrogate": "trpo"},
            "loss: surrogate: 'trpo' is unknown; known: cispo, gspo, ppo, or module:object",
        ),
        (
            {"rollout_correction": "clip"},
            "loss: rollout_correction: must be 'none', 'truncate', 'mask' or 'taper' (given: 'clip')",
        ),
        (
            {"rollout_correction_level": "row"},
            "loss: rollout_correction_level: must be 'token' or 'sequence' (given: 'row')",
        ),
        (
            {"rollout_correction": "mask", "rollout_correction_low": 3.0},
            "loss: rollout_correction_high: must be above rollout_correction_low, 3 (given: 2)",
        ),
    ],
)
def test_what_cannot_be_is_refused(knob: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        read_knobs(PolicyLossOptions, actor_pb2.PolicyLoss(**knob), ())


def test_a_correction_needs_the_rollout() -> None:
    x, options = torch.zeros(1, 1), knobs(rollout_correction="mask")
    with pytest.raises(ValueError, match="log-probabilities of the rollout"):
        policy_loss(x, x, x, x, surrogate_of(options), options, num_tokens=1, num_sequences=1)
