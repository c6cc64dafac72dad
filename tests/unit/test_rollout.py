"""Samples of the rollout engine: the model's own distribution, a stream per row, nothing else."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from services.engines.base import EngineOffloaded
from services.models.families import load_causal_lm
from services.rollout import sampling as rollout_sampling
from services.rollout.base import Generation, GenerationStopped, SamplingOptions, check_generation
from services.rollout.hf import HFRollout
from services.rollout.sampling import choose, draw, log_distribution, row_seeds, uniforms
from settings.engines import LOWEST_TEMPERATURE, REPETITION_PENALTIES

# Many of them, so that responses end at different times.
EOS = (2, 3, 4, 5, 6, 7, 8)
PROMPTS = [[1, 10, 11], [1, 20], [1, 30, 31, 32, 33, 34], [1, 10, 11], [1, 40], [50], [1, 30, 31, 32, 33, 35]]
SEEDS = row_seeds(17, step=0, call="generate", rows=np.arange(len(PROMPTS)))
SAMPLED = SamplingOptions(max_new_tokens=12, eos_ids=EOS, temperature=1.3)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    return load_causal_lm(tiny_llama_dir)


@pytest.fixture
def engine(tiny_llama_dir: Path) -> HFRollout:
    return HFRollout(load_causal_lm(tiny_llama_dir), token_budget=1000)


def same(a: Generation, b: Generation) -> bool:
    return torch.equal(a.responses.values, b.responses.values) and torch.equal(
        a.log_probs.values, b.log_probs.values
    )


@torch.no_grad()
def forward_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float
) -> Tensor:
    """Of one row, with nothing beside it and no cache."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(dim=-1)


def test_greedy_is_the_greedy_of_transformers(engine: HFRollout, tiny_llama_dir: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    options = SamplingOptions(max_new_tokens=12, eos_ids=EOS, greedy=True)
    responses = engine.generate(PROMPTS, options, SEEDS).responses.tolist()
    for prompt, response in zip(PROMPTS, responses, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(EOS),
        )
        assert response == expected[0, len(prompt) :].tolist()


def test_log_probs_are_those_of_a_plain_forward_at_the_temperature(engine: HFRollout, model: PreTrainedModel):
    generation = engine.generate(PROMPTS, SAMPLED, SEEDS)
    for i, prompt in enumerate(PROMPTS):
        response = generation.responses.row(i)
        expected = forward_log_probs(model, prompt, response.tolist(), temperature=1.3).gather(
            1, response[:, None]
        )
        torch.testing.assert_close(generation.log_probs.row(i).double(), expected[:, 0], atol=1e-5, rtol=0)


def test_absolute_positions_are_not_shifted_by_the_padding():
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4)
    model = GPT2LMHeadModel(config).eval()
    engine = HFRollout(model, token_budget=1000)
    generation = engine.generate(PROMPTS, SamplingOptions(max_new_tokens=6), SEEDS)
    for i, prompt in enumerate(PROMPTS):
        response = generation.responses.row(i)
        expected = forward_log_probs(model, prompt, response.tolist(), temperature=1.0).gather(
            1, response[:, None]
        )
        torch.testing.assert_close(generation.log_probs.row(i).double(), expected[:, 0], atol=1e-5, rtol=0)


def test_a_row_says_the_same_alone_shuffled_and_in_smaller_batches(engine: HFRollout, tiny_llama_dir: Path):
    together = engine.generate(PROMPTS, SAMPLED, SEEDS).responses.tolist()
    alone = [
        engine.generate([PROMPTS[i]], SAMPLED, SEEDS[[i]]).responses.tolist()[0] for i in range(len(PROMPTS))
    ]
    order = np.array([4, 2, 6, 0, 5, 1, 3])
    shuffled = engine.generate([PROMPTS[i] for i in order], SAMPLED, SEEDS[order]).responses.tolist()
    small = HFRollout(load_causal_lm(tiny_llama_dir), token_budget=40)
    assert alone == together
    assert shuffled == [together[i] for i in order]
    assert small.generate(PROMPTS, SAMPLED, SEEDS).responses.tolist() == together
    assert len({len(response) for response in together}) > 2, "rows must end at different times"


def test_equal_prompts_with_other_seeds_differ(engine: HFRollout):
    responses = engine.generate(PROMPTS, SAMPLED, SEEDS).responses.tolist()
    assert PROMPTS[0] == PROMPTS[3]
    assert responses[0] != responses[3]


def test_the_same_call_gives_the_same_bits_twice(engine: HFRollout):
    assert same(engine.generate(PROMPTS, SAMPLED, SEEDS), engine.generate(PROMPTS, SAMPLED, SEEDS))


def test_a_response_ends_with_its_first_end_token_or_at_the_limit(engine: HFRollout):
    generation = engine.generate(PROMPTS * 8, SAMPLED, row_seeds(1, 0, "g", np.arange(8 * len(PROMPTS))))
    for response, reason in zip(generation.responses.tolist(), generation.finish_reasons, strict=True):
        assert not {*EOS} & {*response[:-1]}
        assert reason == ("stop" if response[-1] in EOS else "length")
        assert len(response) == 12 or reason == "stop"
    assert set(generation.finish_reasons) == {"stop", "length"}


def test_without_end_tokens_every_response_has_full_length(engine: HFRollout):
    generation = engine.generate(PROMPTS, SamplingOptions(max_new_tokens=9), SEEDS)
    assert generation.responses.lengths.tolist() == [9] * len(PROMPTS)


def test_what_is_drawn_follows_the_distribution(engine: HFRollout, model: PreTrainedModel):
    num_rows = 20_000
    options = SamplingOptions(max_new_tokens=1, temperature=0.8, top_k=20, top_p=0.9)
    seeds = row_seeds(3, 0, "generate", np.arange(num_rows))
    drawn = engine.generate([[1, 10, 11]] * num_rows, options, seeds).responses.values
    with torch.no_grad():
        logits = model(torch.tensor([[1, 10, 11]])).logits[:, -1]
    expected = num_rows * log_distribution(logits, options)[0].double().exp()
    counts = torch.bincount(drawn, minlength=61)
    assert counts[expected == 0].sum() == 0
    kept = expected > 5
    chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert degrees > 5
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_new_weights_change_what_is_generated(engine: HFRollout, model: PreTrainedModel):
    before = engine.generate(PROMPTS, SAMPLED, SEEDS)
    engine.load_weights((name, tensor * 0.5) for name, tensor in model.state_dict().items())
    halved = engine.generate(PROMPTS, SAMPLED, SEEDS)
    engine.load_weights(model.state_dict().items())
    assert not same(before, halved)
    assert same(before, engine.generate(PROMPTS, SAMPLED, SEEDS))


def test_weights_of_another_model_are_refused(engine: HFRollout, model: PreTrainedModel):
    weights = dict(model.state_dict())
    weights["head.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(
        ValueError, match=r"'lm_head\.weight'.* did not come, .*'head\.weight'.* have no place"
    ):
        engine.load_weights(weights.items())


def test_generation_can_be_stopped(engine: HFRollout):
    with pytest.raises(GenerationStopped, match="stopped after 7 new tokens"):
        engine.generate(PROMPTS, SAMPLED, SEEDS, should_stop=lambda: True)


def test_progress_ends_at_all_rows_and_all_tokens(tiny_llama_dir: Path):
    engine = HFRollout(load_causal_lm(tiny_llama_dir), token_budget=40)
    reports: list[tuple[int, int]] = []
    generation = engine.generate(
        PROMPTS, SAMPLED, SEEDS, progress=lambda num_rows, num_tokens: reports.append((num_rows, num_tokens))
    )
    assert reports == sorted(reports)
    assert reports[-1] == (len(PROMPTS), len(generation.responses.values))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "row 1 has an empty prompt"), ([1] * 60, "row 1 has 60 prompt tokens, with 12 new ones")],
)
def test_a_prompt_that_cannot_be_continued_is_named(engine: HFRollout, prompt: list[int], reason: str):
    with pytest.raises(ValueError, match=reason):
        engine.generate([[1], prompt], SAMPLED, SEEDS[:2])


def test_no_prompts_at_all_are_refused(engine: HFRollout):
    with pytest.raises(ValueError, match="no prompts"):
        engine.generate([], SAMPLED, SEEDS[:0])


def test_a_model_that_is_not_finite_is_an_error_and_no_text(engine: HFRollout, model: PreTrainedModel):
    engine.load_weights((name, tensor * float("nan")) for name, tensor in model.state_dict().items())
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(PROMPTS, SAMPLED, SEEDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish_reasons": ["stop"]}, "3 responses and 1 finish reasons for 3 prompts"),
        (
            {"finish_reasons": ["stop", "abort", "length"]},
            "finish reasons other than stop and length: {'abort'}",
        ),
        (
            {"responses": Jagged(torch.ones(3), np.array([1, 0, 2]))},
            "0 tokens for row 1, which has to have 1 to 4",
        ),
        (
            {"responses": Jagged(torch.ones(8), np.array([1, 2, 5]))},
            "5 tokens for row 2, which has to have 1 to 4",
        ),
        (
            {"log_probs": Jagged(torch.ones(5), np.array([1, 2, 2]))},
            "other numbers of log-probabilities than of tok",
        ),
        (
            {"log_probs": Jagged(torch.full((6,), torch.nan), np.array([1, 2, 3]))},
            "not finite, first seen in row 0",
        ),
    ],
)
def test_responses_that_do_not_fit_the_prompts_are_an_error(changes: dict[str, Any], said: str):
    lengths = np.array([1, 2, 3])
    made = Generation(Jagged(torch.ones(6), lengths), Jagged(-torch.ones(6), lengths), ["stop"] * 3)
    check_generation(made, 3, 4)
    with pytest.raises((RuntimeError, FloatingPointError), match=said):
        check_generation(replace(made, **changes), 3, 4)


def test_sleep_on_cpu_frees_nothing_and_says_so(engine: HFRollout):
    assert engine.sleep() == 0
    with pytest.raises(EngineOffloaded, match="asleep"):
        engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert engine.wake() == 0
    assert engine.generate(PROMPTS, SAMPLED, SEEDS).responses.rows == len(PROMPTS)


def test_an_engine_that_could_not_fall_asleep_is_awake_and_one_that_could_not_wake_sleeps(
    engine: HFRollout, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> int:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_free_memory", fail)
        with pytest.raises(MemoryError, match="no room"):
            engine.sleep()
    engine.generate(PROMPTS, SAMPLED, SEEDS)
    engine.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_take_memory", fail)
        with pytest.raises(MemoryError, match="no room"):
            engine.wake()
    with pytest.raises(EngineOffloaded, match="asleep"):
        engine.generate(PROMPTS, SAMPLED, SEEDS)


def test_row_seeds_are_a_function_of_seed_step_call_and_row_alone():
    seeds = row_seeds(5, 2, "generate", np.arange(1000))
    assert np.array_equal(seeds[[900, 3]], row_seeds(5, 2, "generate", np.array([900, 3])))
    others = [row_seeds(6, 2, "generate", np.arange(1000)), row_seeds(5, 3, "generate", np.arange(1000))]
    others.append(row_seeds(5, 2, "evaluate", np.arange(1000)))
    assert len(np.unique(np.concatenate((seeds, *others)))) == 4000
    assert (seeds >= 0).all()


def test_uniforms_are_the_published_philox():
    # The first block of counter 0 and key 0, from the known-answer tests of Random123.
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    expected = [(word + 0.5) / 2**32 for word in words]
    assert uniforms(np.array([0], dtype=np.int64), 4)[0].tolist() == expected


def test_a_row_draws_the_same_numbers_however_many_are_asked_for():
    assert np.array_equal(uniforms(SEEDS, 21)[:, :6], uniforms(SEEDS, 6))
    assert np.array_equal(uniforms(SEEDS, 6)[[4]], uniforms(SEEDS[[4]], 6))


def test_uniforms_are_uniform():
    numbers = uniforms(row_seeds(0, 0, "g", np.arange(2000)), 50)
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert abs(chi_square - 99) < 5 * (2 * 99) ** 0.5


def test_a_token_is_drawn_where_the_cumulative_probability_passes_the_number():
    log_probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log().expand(4, -1)
    numbers = torch.tensor([1e-10, 0.2499, 0.2501, 1 - 1e-10], dtype=torch.float64)
    assert draw(log_probs, numbers).tolist() == [1, 1, 3, 3]


def test_top_k_keeps_the_k_most_probable():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    kept = log_distribution(logits, SamplingOptions(max_new_tokens=1, top_k=2)).exp()
    expected = torch.tensor([3.0, 2.0]).softmax(dim=0)
    torch.testing.assert_close(kept, torch.tensor([[0, expected[0], expected[1], 0]]))


def test_min_p_keeps_what_is_probable_enough_beside_the_most_probable_before_top_p_sums():
    probabilities = torch.tensor([[0.4, 0.1, 0.3, 0.05, 0.15]])
    options = SamplingOptions(max_new_tokens=1, min_p=0.3)
    kept = log_distribution(probabilities.log(), options).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.4, 0, 0.3, 0, 0.15]]) / 0.85)
    # 0.4 and 0.3 are 0.70 of all tokens, and 0.82 of those that are kept.
    nucleus = log_distribution(probabilities.log(), replace(options, top_p=0.8)).exp()
    torch.testing.assert_close(nucleus, torch.tensor([[4 / 7, 0, 3 / 7, 0, 0]]))


def test_a_repetition_penalty_needs_the_tokens_so_far():
    options = SamplingOptions(max_new_tokens=1, greedy=True, repetition_penalty=2.0)
    logits, numbers = torch.tensor([[3.0, 2.0, -1.0]]), torch.tensor([0.5], dtype=torch.float64)
    with pytest.raises(ValueError, match="does not support repetition_penalty"):
        choose(logits, options, numbers)
    tokens, log_probs = choose(logits, options, numbers, torch.tensor([[0, 2, 0]]))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, torch.tensor([1.5, 2.0, -2.0]).log_softmax(dim=0)[1:2])


@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
@pytest.mark.parametrize("drawing", [{"greedy": True}, {"temperature": LOWEST_TEMPERATURE}])
def test_log_probs_are_finite_with_the_largest_and_smallest_repetition_penalty(
    penalty: float, drawing: dict[str, Any]
):
    """Also where each token has been seen."""
    options = SamplingOptions(max_new_tokens=1, repetition_penalty=penalty, **drawing)
    for logits in ([1e4, 0.0, -1e4], [-1e4, -1.0, -1e-4]):
        numbers = torch.tensor([0.5], dtype=torch.float64)
        _, log_probs = choose(torch.tensor([logits]), options, numbers, torch.tensor([[0, 1, 2]]))
        assert log_probs.isfinite().all()


def sorted_whole(log_probs_BV: Tensor, top_p: float) -> Tensor:
    """The tokens that top-p keeps, by a sort of whole rows."""
    sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = sorted_BV.double().exp()
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    return torch.zeros_like(order_BV, dtype=torch.bool).scatter(1, order_BV, before_BV < top_p)


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("steps", [0, 2, 30], ids=["no ties", "many ties", "some ties"])
def test_top_p_finds_among_the_most_probable_tokens_what_a_sort_of_all_finds(
    top_p: float, steps: int, monkeypatch: pytest.MonkeyPatch
):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 700, generator=generator) * torch.logspace(-2, 1.5, 12)[:, None]
    logits = (logits * steps).round() / steps if steps else logits
    logits[3, 5] = torch.nan
    logits[4, 20:] = -torch.inf
    log_probs = logits.log_softmax(dim=-1)
    for num_candidates in (1, 16, 100, 700, 1024):
        monkeypatch.setattr(rollout_sampling, "_CANDIDATES", num_candidates)
        kept = rollout_sampling._nucleus(log_probs, top_p)
        assert torch.equal(kept, sorted_whole(log_probs, top_p)), num_candidates


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.45, [1.0, 0, 0]), (0.7, [5 / 8, 3 / 8, 0]), (0.81, [0.5, 0.3, 0.2])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[float]):
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = log_distribution(logits, SamplingOptions(max_new_tokens=1, top_p=top_p)).exp()
    torch.testing.assert_close(kept, torch.tensor([expected]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        *({"temperature": value} for value in (0.0, math.nan, math.inf)),
        {"top_k": -1},
        *({"top_p": value} for value in (0.0, 1.5, math.nan)),
        *({"min_p": value} for value in (-0.1, 1.5, math.nan)),
        *({"repetition_penalty": value, "greedy": True} for value in (0.0, 5e-324, math.inf, math.nan)),
    ],
)
def test_sampling_options_out_of_range_are_refused(wrong: dict[str, Any]):
    options: dict[str, Any] = {"max_new_tokens": 1, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingOptions(**options)


def test_greedy_needs_no_temperature():
    assert SamplingOptions(max_new_tokens=1, greedy=True, temperature=0.0).greedy
