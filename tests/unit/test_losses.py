"""The losses of actor and critic equal loops written from the formulas, however the mini-batch is cut."""

import math
from collections.abc import Callable
from itertools import compress

import pytest
import torch
from torch import Tensor

from controller.advantage import kl_estimate
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.actor.losses import policy_loss, surrogate_of
from services.actor.surrogates import ppo_clip_loss
from services.critic.losses import clipped_squared_error
from services.roles.loss_options import PolicyLossOptions
from services.roles.losses import AGGREGATIONS, KL_KINDS, aggregate, kl_penalty
from settings.losses import PpoOptions, ValueClipOptions

MAX_LENGTH = 11
SEEDS = range(5)
CUTS = [[8], [1] * 8, [3, 5], [2, 1, 4, 1]]

Rows = list[list[float]]


def close(actual: Tensor, expected: float | list[float] | Rows, tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(
        actual.double(),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


def random_mask(seed: int, rows: int = 8, tokens: int = 6) -> Tensor:
    """Right-padded rows of random length; the first is empty, the second full."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, tokens + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, tokens
    return torch.arange(tokens) < lengths[:, None]


def random_like(mask: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    """Numbers of both signs, also in the padding."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)


def elementwise(formula: Callable[..., float], *columns: Tensor) -> Rows:
    return [
        [formula(*xs) for xs in zip(*rows, strict=True)]
        for rows in zip(*(column.tolist() for column in columns), strict=True)
    ]


def sum_over_mask(values: Rows, mask: Tensor) -> float:
    return sum(sum(compress(row, keep)) for row, keep in zip(values, mask.tolist(), strict=True))


def aggregate_loop(losses: Rows, mask: Tensor, mode: str) -> float:
    sequences = [list(compress(row, keep)) for row, keep in zip(losses, mask.tolist(), strict=True)]
    total = 0.0
    for sequence in sequences:
        if not sequence:
            continue
        if mode == "token-mean":
            total += sum(sequence) / sum(len(other) for other in sequences)
        elif mode == "seq-mean-token-sum":
            total += sum(sequence) / len(sequences)
        elif mode == "seq-mean-token-mean":
            total += sum(sequence) / len(sequence) / len(sequences)
        else:
            total += sum(sequence) / len(sequences) / MAX_LENGTH
    return total


def kl_token(log_prob: float, ref_log_prob: float, kind: str) -> float:
    d = log_prob - ref_log_prob
    if kind.startswith("k1"):
        return d
    if kind.startswith("k2"):
        return d * d / 2
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(x) - x - 1, -10.0), 10.0)


def ppo_token(
    log_prob: float, old_log_prob: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    ratio = math.exp(min(max(log_prob - old_log_prob, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def value_token(value: float, old_value: float, target: float, clip: float | None) -> float:
    if clip is None:
        return (value - target) ** 2 / 2
    clipped = min(max(value, old_value - clip), old_value + clip)
    return max((value - target) ** 2, (clipped - target) ** 2) / 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mean_over_tokens_is_exact(dtype: torch.dtype):
    mask, x = torch.ones(2, 1).to(dtype), torch.full((2, 1), 3.0, dtype=torch.float64)
    mean = aggregate(x, mask, "seq-mean-token-mean", num_tokens=2, num_sequences=2)
    assert mean.item() == 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_equals_the_loop(mode, seed):
    mask = random_mask(seed)
    loss = random_like(mask, seed)
    share = aggregate(
        loss, mask, mode, num_tokens=int(mask.sum()), num_sequences=len(mask), max_response_tokens=MAX_LENGTH
    )
    close(share, aggregate_loop(loss.tolist(), mask, mode))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_mini_batch_of_empty_sequences_has_no_loss_and_no_gradient(mode):
    loss = torch.ones(2, 3, requires_grad=True)
    share = aggregate(
        loss, torch.zeros(2, 3), mode, num_tokens=0, num_sequences=2, max_response_tokens=MAX_LENGTH
    )
    share.backward()
    assert share.item() == 0
    assert loss.grad is not None
    assert not loss.grad.any()


def test_unknown_aggregation_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="'mean'; known: " + ", ".join(AGGREGATIONS)):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "mean", num_tokens=1, num_sequences=1)


@pytest.mark.parametrize("max_response_tokens", [None, 0])
def test_the_length_normalised_sum_needs_a_length(max_response_tokens):
    with pytest.raises(ValueError, match="positive max_response_tokens"):
        aggregate(
            torch.ones(1, 1),
            torch.ones(1, 1),
            "seq-mean-token-sum-norm",
            num_tokens=1,
            num_sequences=1,
            max_response_tokens=max_response_tokens,
        )


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_penalty_equals_the_formula(kind, scale):
    mask = random_mask(0)
    log_probs, ref = random_like(mask, 1, scale), random_like(mask, 2, scale)
    close(kl_penalty(log_probs, ref, kind), elementwise(lambda p, q: kl_token(p, q, kind), log_probs, ref))


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_gradient_of_straight_through_kl_is_the_log_ratio(kind):
    mask = random_mask(0)
    log_probs, ref = random_like(mask, 1).requires_grad_(), random_like(mask, 2)
    kl_penalty(log_probs, ref, kind).sum().backward()
    torch.testing.assert_close(log_probs.grad, (log_probs - ref).detach())


def test_the_gradient_of_k3_is_its_own():
    log_probs = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    kl_penalty(log_probs, torch.zeros(2, dtype=torch.float64), "k3").sum().backward()
    assert log_probs.grad is not None
    close(log_probs.grad, [1 - math.exp(-0.5), 1 - math.exp(1.0)])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_controller_and_services_estimate_the_same_kl(kind):
    mask = random_mask(0)
    log_probs, ref = random_like(mask, 1)[mask], random_like(mask, 2)[mask]
    lengths = mask.sum(dim=1).numpy()
    column = kl_estimate(Jagged(log_probs.numpy(), lengths), Jagged(ref.numpy(), lengths), kind)
    torch.testing.assert_close(torch.from_numpy(column.values), kl_penalty(log_probs, ref, kind))


def test_unknown_kl_penalty_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"'k2\+'; known: k1, k2, k3, k1\+, k3\+"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k2+")


def test_ppo_clip_of_a_hand_worked_example():
    """Inside the clip, above it, below it with A < 0, above it with A < 0, and beyond the dual clip."""
    ratio = torch.tensor([[1.1, 1.5, 0.5, 2.0, 5.0]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, 2.0, -2.0, -2.0, -2.0]], dtype=torch.float64)
    log_probs = ratio.log().requires_grad_()
    loss, stats = ppo_clip_loss(
        log_probs,
        torch.zeros_like(ratio),
        advantages,
        torch.ones_like(ratio),
        PpoOptions(clip_low=0.2, clip_high=0.3, dual_clip=3.0),
    )
    close(loss.detach(), [[-2.2, -2.6, 1.6, 4.0, 6.0]])
    loss.sum().backward()
    assert log_probs.grad is not None
    close(log_probs.grad, [[-2.2, 0.0, 0.0, 4.0, 0.0]])  # -A r where nothing is clipped
    assert [stats[name].item() for name in ("clip_low", "clip_high", "clip_dual")] == [1, 1, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [0.0, 1.5, 3.0])
def test_ppo_clip_equals_the_formula(dual_clip, seed):
    mask = random_mask(seed)
    log_probs, old, advantages = (random_like(mask, 10 * seed + k) for k in range(3))
    options = PpoOptions(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    loss, _ = ppo_clip_loss(log_probs, old, advantages, mask, options)
    expected = elementwise(
        lambda p, q, a: ppo_token(p, q, a, 0.2, 0.28, dual_clip or None), log_probs, old, advantages
    )
    close(loss, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_log_ratio_is_clamped(sign):
    one = torch.ones(1, 1, dtype=torch.float64)
    _, stats = ppo_clip_loss(100 * sign * one, 0 * one, -one, one, PpoOptions(dual_clip=0))
    assert stats["ratio"].item() == pytest.approx(math.exp(20 * sign))


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_statistics_are_sums_over_the_mask(seed):
    mask = random_mask(seed)
    log_probs, old, advantages = (random_like(mask, 10 * seed + k) for k in range(3))
    _, stats = ppo_clip_loss(log_probs, old, advantages, mask, PpoOptions(clip_high=0.3))
    formulas = {
        "ratio": lambda d, a: math.exp(d),
        "approx_kl": lambda d, a: math.exp(d) - 1 - d,
        "clip_low": lambda d, a: float(a < 0 and math.exp(d) < 0.8),
        "clip_high": lambda d, a: float(a > 0 and math.exp(d) > 1.3),
        "clip_dual": lambda d, a: float(a < 0 and math.exp(d) > 3.0),
    }
    assert stats.keys() == formulas.keys()
    for name, formula in formulas.items():
        close(stats[name], sum_over_mask(elementwise(formula, log_probs - old, advantages), mask))


def test_the_first_step_on_a_batch_has_the_gradient_of_the_policy():
    """At ratio 1 both branches of the maximum are equal, and the gradient must be whole: -A."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    log_probs = random_like(mask, 0).requires_grad_()
    advantages = random_like(mask, 1)
    loss, _ = ppo_clip_loss(log_probs, log_probs.detach(), advantages, mask, PpoOptions())
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.0, 0.5, 5.0])
def test_value_loss_equals_the_formula(clip, seed):
    mask = random_mask(seed)
    values, old, returns = (random_like(mask, 10 * seed + k) for k in range(3))
    loss, _ = clipped_squared_error(values, old, returns, mask, ValueClipOptions(value_clip=clip))
    close(loss, elementwise(lambda v, v_old, r: value_token(v, v_old, r, clip or None), values, old, returns))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_statistics_are_sums_over_the_mask(seed):
    mask = random_mask(seed)
    values, old, returns = (random_like(mask, 10 * seed + k) for k in range(3))
    _, stats = clipped_squared_error(values, old, returns, mask, ValueClipOptions(value_clip=0.5))
    formulas = {
        "value": lambda v, v_old, r: v,
        "squared_error": lambda v, v_old, r: (v - r) ** 2,
        "clip": lambda v, v_old, r: float(value_token(v, v_old, r, 0.5) > value_token(v, v_old, r, None)),
    }
    assert stats.keys() == formulas.keys()
    for name, formula in formulas.items():
        close(stats[name], sum_over_mask(elementwise(formula, values, old, returns), mask))


def test_value_loss_by_hand():
    """Return 0, old value 1, clip 0.5: 0.8 is inside, 0.2 is cut off at 0.5, 2 is worse than its clip."""
    values = torch.tensor([[0.8, 0.2, 2.0]], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, 3, dtype=torch.float64)
    loss, stats = clipped_squared_error(values, ones, 0 * ones, ones, ValueClipOptions())
    close(loss.detach(), [[0.32, 0.125, 2.0]])
    loss.sum().backward()
    assert values.grad is not None
    close(values.grad, [[0.8, 0.0, 2.0]])
    assert stats["clip"].item() == 1


def full_options(mode: str = "token-mean", kl_kind: str = "k3") -> PolicyLossOptions:
    given = {"entropy_coefficient": 0.1, "kl_loss_coefficient": 0.2, "kl_loss_estimator": kl_kind}
    return PolicyLossOptions.model_validate({**given, "aggregation": mode, "max_response_tokens": MAX_LENGTH})


PPO = surrogate_of(PolicyLossOptions())


@pytest.mark.parametrize("kl_kind", KL_KINDS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_policy_loss_equals_the_whole_formula(mode, kl_kind):
    mask = random_mask(3)
    log_probs, old, advantages, entropy, ref = (random_like(mask, k) for k in range(5))
    loss, stats = policy_loss(
        log_probs,
        old,
        advantages,
        mask,
        PPO,
        full_options(mode, kl_kind),
        num_tokens=int(mask.sum()),
        num_sequences=len(mask),
        entropy_BT=entropy,
        ref_log_probs_BT=ref,
    )
    pg = elementwise(lambda p, q, a: ppo_token(p, q, a, 0.2, 0.2, 3.0), log_probs, old, advantages)
    kl = elementwise(lambda p, q: kl_token(p, q, kl_kind), log_probs, ref)
    expected = (
        aggregate_loop(pg, mask, mode)
        - 0.1 * aggregate_loop(entropy.tolist(), mask, mode)
        + 0.2 * aggregate_loop(kl, mask, mode)
    )
    close(loss, expected)
    close(stats["pg_loss"], sum_over_mask(pg, mask))
    close(stats["entropy"], sum_over_mask(entropy.tolist(), mask))
    close(stats["ref_kl"], sum_over_mask(kl, mask))


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (PolicyLossOptions(entropy_coefficient=0.1), "the entropy"),
        (PolicyLossOptions(kl_loss_coefficient=0.1), "a reference"),
    ],
)
def test_a_coefficient_without_its_tensor_is_an_error(options, missing):
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=missing):
        policy_loss(x, x, x, x, PPO, options, num_tokens=1, num_sequences=1)


@pytest.mark.parametrize(
    "setting", [{"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1}, {"dual_clip": 1.0}], ids=str
)
def test_a_clip_out_of_its_range_is_an_error(setting):
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        surrogate_of(PolicyLossOptions(surrogate_options=setting))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_policy_loss_gradient_and_statistics_do_not_depend_on_the_micro_batches(mode, cut):
    mask = random_mask(5)
    logits = random_like(mask, 0)
    old, advantages, ref = (random_like(mask, k) for k in range(1, 4))

    def train(cut: list[int]) -> tuple[float, Tensor, dict[str, float]]:
        """Every micro-batch is padded to its own longest row only."""
        parameter = logits.clone().requires_grad_()
        loss, totals = 0.0, dict[str, float]()
        for rows in torch.arange(len(mask)).split(cut):
            width = int(mask[rows].sum(dim=1).max())
            share, stats = policy_loss(
                parameter[rows, :width],
                old[rows, :width],
                advantages[rows, :width],
                mask[rows, :width],
                PPO,
                full_options(mode),
                num_tokens=int(mask.sum()),
                num_sequences=len(mask),
                entropy_BT=parameter[rows, :width].square(),
                ref_log_probs_BT=ref[rows, :width],
            )
            share.backward()
            loss += share.item()
            for name, value in stats.items():
                totals[name] = totals.get(name, 0.0) + value.item()
        assert parameter.grad is not None
        return loss, parameter.grad, totals

    loss, gradient, totals = train(cut)
    whole_loss, whole_gradient, whole_totals = train([len(mask)])
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-15)
    assert totals == pytest.approx(whole_totals, rel=1e-12)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_loss_and_gradient_do_not_depend_on_the_micro_batches(mode, cut):
    mask = random_mask(6)
    values, old, returns = (random_like(mask, k) for k in range(3))

    def train(cut: list[int]) -> tuple[float, Tensor]:
        parameter = values.clone().requires_grad_()
        loss = 0.0
        for rows in torch.arange(len(mask)).split(cut):
            loss_BT, _ = clipped_squared_error(
                parameter[rows], old[rows], returns[rows], mask[rows], ValueClipOptions()
            )
            share = aggregate(
                loss_BT,
                mask[rows],
                mode,
                num_tokens=int(mask.sum()),
                num_sequences=len(mask),
                max_response_tokens=MAX_LENGTH,
            )
            share.backward()
            loss += share.item()
        assert parameter.grad is not None
        return loss, parameter.grad

    loss, gradient = train(cut)
    whole_loss, whole_gradient = train([len(mask)])
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-15)


def test_what_is_in_the_padding_reaches_neither_loss_nor_gradient_nor_statistics():
    mask = random_mask(7)
    columns = [random_like(mask, k) for k in range(5)]

    def train(padding: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs, *rest = (torch.where(mask, column, padding) for column in columns)
        old, advantages, entropy, ref = rest
        parameter = log_probs.requires_grad_()
        loss, stats = policy_loss(
            parameter,
            old,
            advantages,
            mask,
            PPO,
            full_options(),
            num_tokens=int(mask.sum()),
            num_sequences=len(mask),
            entropy_BT=entropy,
            ref_log_probs_BT=ref * 2,
        )
        loss.backward()
        assert parameter.grad is not None
        return loss.detach(), parameter.grad, stats

    torch.testing.assert_close(train(1e30), train(0.0), rtol=0, atol=0)
