"""Contract of every rollout engine: its interface, and the training engine's own probabilities."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from services.actor.losses import policy_loss, surrogate_of
from services.actor.parity import rollout_parity
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import EngineOffloaded, OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models.families import load_causal_lm
from services.roles.loss_options import PolicyLossOptions
from services.rollout.base import Generation, GenerationStopped, RolloutEngine, SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import log_distribution, row_seeds
from services.rollout.stops import StopStrings
from settings.actor import VllmTable

pytestmark = pytest.mark.timeout(300)

VOCABULARY = 61
POSITIONS = 64
# Many of them, so that responses end at different times.
EOS = (2, 3, 4, 5, 6, 7, 8)
PROMPTS = [[1, 10, 11], [1, 20], [1, 30, 31, 32, 33, 34], [1, 10, 11], [1, 40], [50], [1, 30, 31, 32, 33, 35]]
SEEDS = row_seeds(17, step=0, call="generate", rows=np.arange(len(PROMPTS)))
SAMPLED = SamplingOptions(max_new_tokens=12, eos_ids=EOS, temperature=1.3)
LONG = SamplingOptions(max_new_tokens=40, temperature=1.3)
PARITY = 1e-4

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)


def start_hf(directory: Path, request: pytest.FixtureRequest) -> RolloutEngine:
    return HFRollout(load_causal_lm(directory), token_budget=1000)


def start_vllm(directory: Path, request: pytest.FixtureRequest) -> RolloutEngine:
    from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found]

    from services.rollout.vllm import VLLMRollout

    request.addfinalizer(cleanup_dist_env_and_memory)
    table = VllmTable(kv_cache_gb=0.25)
    return VLLMRollout(directory, dtype=torch.float32, table=table, identity="rlhf-test")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose weights make some tokens much more probable than others."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return load_causal_lm(directory)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("process_group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(start_hf, id="hf"),
        pytest.param(start_vllm, id="vllm", marks=[needs_vllm, pytest.mark.slow]),
    ],
)
def started(request: pytest.FixtureRequest, directory: Path, process_group: None) -> RolloutEngine:
    return request.param(directory, request)


@needs_vllm
@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_vllm_refuses_temperatures_that_it_would_change(temperature: float) -> None:
    from services.rollout.vllm_requests import check_temperature

    with pytest.raises(ValueError, match=r"temperatures from 0\.01 to 2\.0"):
        check_temperature(SamplingOptions(max_new_tokens=1, temperature=temperature))


@pytest.fixture
def engine(started: RolloutEngine, model: PreTrainedModel) -> RolloutEngine:
    """The engine with the weights of the directory, whatever tests before have put into it."""
    started.load_weights(model.state_dict().items())
    return started


def rows(column: Jagged[Tensor]) -> list[list[Any]]:
    return [column.row(i).tolist() for i in range(column.rows)]


def same(a: Generation, b: Generation) -> bool:
    return torch.equal(a.responses.values, b.responses.values) and torch.equal(
        a.log_probs.values, b.log_probs.values
    )


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Of the positions that predict the response of one row, with nothing beside it and no cache."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def test_a_generation_has_a_response_and_its_log_probs_for_every_prompt(engine: RolloutEngine) -> None:
    generation = engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert generation.responses.rows == len(generation.finish_reasons) == len(PROMPTS)
    assert np.array_equal(generation.responses.lengths, generation.log_probs.lengths)
    assert generation.responses.values.dtype == torch.int64
    assert generation.log_probs.values.dtype == torch.float32
    assert (generation.log_probs.values <= 0).all()
    assert 0 <= int(generation.responses.values.min()) <= int(generation.responses.values.max()) < VOCABULARY


def test_a_row_says_the_same_alone_and_in_any_order(engine: RolloutEngine) -> None:
    together = rows(engine.generate(PROMPTS, SAMPLED, SEEDS).responses)
    alone = [
        rows(engine.generate([PROMPTS[i]], SAMPLED, SEEDS[[i]]).responses)[0] for i in range(len(PROMPTS))
    ]
    reversed_ = rows(engine.generate(PROMPTS[::-1], SAMPLED, SEEDS[::-1]).responses)
    assert alone == together
    assert reversed_ == together[::-1]
    assert len({len(response) for response in together}) > 2, "rows must end at different times"


def test_equal_prompts_with_other_seeds_differ(engine: RolloutEngine) -> None:
    responses = rows(engine.generate(PROMPTS, LONG, SEEDS).responses)
    assert PROMPTS[0] == PROMPTS[3]
    assert responses[0] != responses[3]


def test_the_same_call_gives_the_same_bits_whatever_was_generated_before(engine: RolloutEngine) -> None:
    first = engine.generate(PROMPTS, LONG, SEEDS)
    engine.generate([[*PROMPTS[2], *range(10, 25)], PROMPTS[0]], LONG, SEEDS[:2])
    assert same(first, engine.generate(PROMPTS, LONG, SEEDS))


def test_greedy_takes_the_most_probable_token_under_the_models_own_distribution(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    options = SamplingOptions(max_new_tokens=12, eos_ids=EOS, greedy=True, temperature=3.0, top_k=1)
    generation = engine.generate(PROMPTS, options, SEEDS)
    for i, prompt in enumerate(PROMPTS):
        response = generation.responses.row(i)
        log_probs = plain_logits(model, prompt, response.tolist()).double().log_softmax(dim=-1)
        assert response.tolist() == log_probs.argmax(dim=-1).tolist()
        expected = log_probs.gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(generation.log_probs.row(i).double(), expected, atol=PARITY, rtol=0)


@pytest.mark.parametrize(
    "drawing", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}]
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled(
    engine: RolloutEngine, model: PreTrainedModel, drawing: dict[str, Any]
) -> None:
    options = SamplingOptions(max_new_tokens=20, eos_ids=EOS, **drawing)
    generation = engine.generate(PROMPTS * 4, options, row_seeds(1, 0, "g", np.arange(4 * len(PROMPTS))))
    for i, prompt in enumerate(PROMPTS * 4):
        response = generation.responses.row(i)
        distribution = log_distribution(plain_logits(model, prompt, response.tolist()), options)
        expected = distribution.gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(generation.log_probs.row(i), expected, atol=PARITY, rtol=0)


def test_what_is_drawn_follows_the_distribution(engine: RolloutEngine, model: PreTrainedModel) -> None:
    num_rows = 5_000
    options = SamplingOptions(max_new_tokens=1, temperature=0.8, top_k=20, top_p=0.9)
    seeds = row_seeds(3, 0, "generate", np.arange(num_rows))
    drawn = engine.generate([[1, 10, 11]] * num_rows, options, seeds).responses.values
    distribution = log_distribution(plain_logits(model, [1, 10, 11], [0]), options)[0]
    expected = num_rows * distribution.double().exp()
    counts = torch.bincount(drawn, minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    kept = expected > 5
    chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert degrees > 3
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_response_ends_with_its_first_end_token_or_at_the_limit(engine: RolloutEngine) -> None:
    generation = engine.generate(PROMPTS * 8, SAMPLED, row_seeds(1, 0, "g", np.arange(8 * len(PROMPTS))))
    for response, reason in zip(rows(generation.responses), generation.finish_reasons, strict=True):
        assert not {*EOS} & {*response[:-1]}
        assert reason == ("stop" if response[-1] in EOS else "length")
        assert len(response) == 12 or reason == "stop"
    assert set(generation.finish_reasons) == {"stop", "length"}


def test_without_end_tokens_every_response_has_full_length(engine: RolloutEngine) -> None:
    generation = engine.generate(PROMPTS, SamplingOptions(max_new_tokens=9), SEEDS)
    assert generation.responses.lengths.tolist() == [9] * len(PROMPTS)
    assert generation.finish_reasons == ["length"] * len(PROMPTS)


def spell(rows: list[list[int]]) -> list[str]:
    """A character for each token."""
    return ["".join(chr(ord("A") + token) for token in row) for row in rows]


def stopping_at(options: SamplingOptions, *texts: str) -> SamplingOptions:
    return replace(options, stop=StopStrings(texts, spell))


def test_a_response_ends_with_the_token_that_completes_a_stop_string(engine: RolloutEngine) -> None:
    whole = engine.generate(PROMPTS, LONG, SEEDS)
    texts = spell(rows(whole.responses))
    options = stopping_at(LONG, texts[0][7:9], texts[1][3], texts[2][30:33])
    ended = engine.generate(PROMPTS, options, SEEDS)
    assert options.stop
    for i, text in enumerate(texts):
        ends = [text.find(stop) + len(stop) for stop in options.stop.texts if stop in text]
        length = min(ends, default=LONG.max_new_tokens)
        assert ended.responses.row(i).tolist() == whole.responses.row(i).tolist()[:length]
        torch.testing.assert_close(
            ended.log_probs.row(i), whole.log_probs.row(i)[:length], atol=PARITY, rtol=0
        )
        assert ended.finish_reasons[i] == ("stop" if ends else "length")
    assert len(set(ended.responses.lengths.tolist())) > 2, "rows must end at different times"


def test_a_stop_string_at_the_last_token_is_a_stop(engine: RolloutEngine) -> None:
    options = SamplingOptions(max_new_tokens=9, temperature=1.3)
    text = spell(rows(engine.generate(PROMPTS[:1], options, SEEDS[:1]).responses))[0]
    generation = engine.generate(PROMPTS[:1], stopping_at(options, text[5:]), SEEDS[:1])
    assert generation.responses.lengths.tolist() == [9]
    assert generation.finish_reasons == ["stop"]


def test_a_stop_string_leaves_nothing_for_the_next_generation(engine: RolloutEngine) -> None:
    expected = engine.generate(PROMPTS, LONG, SEEDS)
    first = chr(ord("A") + int(expected.responses.values[0]))
    reports: list[tuple[int, int]] = []
    ended = engine.generate(
        PROMPTS, stopping_at(LONG, first), SEEDS, progress=lambda *counts: reports.append(counts)
    )
    assert ended.responses.lengths[0] == 1
    assert reports[-1] == (len(PROMPTS), len(ended.responses.values))
    assert same(expected, engine.generate(PROMPTS, LONG, SEEDS))


def test_a_row_may_fill_the_model_to_its_last_position(engine: RolloutEngine) -> None:
    options = SamplingOptions(max_new_tokens=12)
    generation = engine.generate([[1] * (POSITIONS - 12)], options, SEEDS[:1])
    assert generation.responses.lengths.tolist() == [12]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "row 1 has an empty prompt"), ([1] * 60, "row 1 has 60 prompt tokens, with 12 new ones")],
)
def test_a_prompt_that_cannot_be_continued_is_named(
    engine: RolloutEngine, prompt: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engine.generate([[1], prompt], SAMPLED, SEEDS[:2])


def test_no_prompts_at_all_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        engine.generate([], SAMPLED, SEEDS[:0])


def test_a_generation_that_was_stopped_leaves_nothing_for_the_next(engine: RolloutEngine) -> None:
    expected = engine.generate(PROMPTS, LONG, SEEDS)
    asked = iter([False, False, True])
    with pytest.raises(GenerationStopped, match="0 rows were complete"):
        engine.generate(PROMPTS, LONG, SEEDS, should_stop=lambda: next(asked))
    assert next(asked, None) is None
    assert same(expected, engine.generate(PROMPTS, LONG, SEEDS))


def test_progress_grows_to_all_rows_and_all_tokens(engine: RolloutEngine) -> None:
    reports: list[tuple[int, int]] = []
    generation = engine.generate(
        PROMPTS, SAMPLED, SEEDS, progress=lambda num_rows, num_tokens: reports.append((num_rows, num_tokens))
    )
    assert len(reports) >= 12
    assert reports == sorted(reports)
    assert reports[-1] == (len(PROMPTS), len(generation.responses.values))


def test_new_weights_change_what_is_generated(engine: RolloutEngine, model: PreTrainedModel) -> None:
    before = engine.generate(PROMPTS, LONG, SEEDS)
    engine.load_weights((name, tensor * 0.5) for name, tensor in model.state_dict().items())
    halved = engine.generate(PROMPTS, LONG, SEEDS)
    engine.load_weights(model.state_dict().items())
    assert not same(before, halved)
    assert same(before, engine.generate(PROMPTS, LONG, SEEDS))


def test_weights_of_another_model_are_refused_once_all_have_come(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    weights = {"head.weight": torch.zeros(2), **model.state_dict()}
    del weights["lm_head.weight"]
    left = iter(weights.items())
    with pytest.raises(
        ValueError, match=r"'lm_head\.weight'.* did not come, .*'head\.weight'.* have no place"
    ):
        engine.load_weights(left)
    assert next(left, None) is None


def test_a_model_that_is_not_finite_is_an_error_and_no_text(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    engine.load_weights((name, tensor * float("nan")) for name, tensor in model.state_dict().items())
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(PROMPTS, SAMPLED, SEEDS)


def test_an_engine_that_sleeps_generates_nothing_until_it_wakes(engine: RolloutEngine) -> None:
    expected = engine.generate(PROMPTS, SAMPLED, SEEDS)
    freed = engine.sleep()
    with pytest.raises(EngineOffloaded, match="asleep"):
        engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert engine.wake() == freed
    assert freed or any("Offload frees nothing" in limit for limit in engine.limits)
    assert same(expected, engine.generate(PROMPTS, SAMPLED, SEEDS))


class Trainer:
    """A training engine, and PPO steps on what a rollout engine said, with random advantages."""

    head = PolicyHead(temperature=SAMPLED.temperature)

    def __init__(self, directory: Path, learning_rate: float, adapters: AdapterOptions | None = None) -> None:
        options = OptimizerOptions(lr=learning_rate, weight_decay=0.0)
        model, device = load_causal_lm(directory), torch.device("cpu")
        self.engine = (
            LoRAEngine(model, device, adapters=adapters, optimizer=options)
            if adapters
            else FSDPEngine(model, device, optimizer=options)
        )

    def log_probs(self, generation: Generation) -> Tensor:
        """Training log-probs of responses, concatenated."""
        micro_batches = self._micro_batches(generation)
        outputs = self.engine.infer(micro_batches, self.head)
        values = [m.collect(o.log_probs_BR) for m, o in zip(micro_batches, outputs, strict=True)]
        parts = [micro_batch.rows for micro_batch in micro_batches]
        return assemble(parts, values, generation.responses.lengths).values

    def update(self, generation: Generation) -> None:
        generator = torch.Generator().manual_seed(3)
        old = generation.log_probs
        advantages = Jagged(torch.randn(len(old.values), generator=generator), old.lengths)
        options = PolicyLossOptions()

        def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return policy_loss(
                output.log_probs_BR,
                micro_batch.spread(old),
                micro_batch.spread(advantages),
                micro_batch.response_mask_BR,
                surrogate_of(options),
                options,
                num_tokens=len(old.values),
                num_sequences=old.rows,
            )

        self.engine.step(self._micro_batches(generation), self.head, loss)

    @staticmethod
    def _micro_batches(generation: Generation) -> list[MicroBatch]:
        lengths = np.array([len(prompt) for prompt in PROMPTS])
        prompts = Jagged(torch.tensor([token for prompt in PROMPTS for token in prompt]), lengths)
        return split(prompts, generation.responses, token_budget=200, pad_id=0)


@pytest.mark.parametrize("adapters", [None, AdapterOptions()], ids=["weights learn", "adapters learn"])
def test_rollout_log_probs_are_the_training_engines_after_every_update(
    engine: RolloutEngine, directory: Path, adapters: AdapterOptions | None
) -> None:
    trainer = Trainer(directory, learning_rate=1e-2, adapters=adapters)
    previous = torch.empty(0)
    for _ in range(4):
        generation = engine.generate(PROMPTS, LONG, SEEDS)
        torch.testing.assert_close(
            generation.log_probs.values, trainer.log_probs(generation), atol=PARITY, rtol=0
        )
        assert not torch.equal(generation.log_probs.values, previous), "the update must have an effect"
        previous = generation.log_probs.values
        trainer.update(generation)
        engine.load_weights(trainer.engine.full_tensors())


def test_without_a_learning_rate_nothing_drifts(engine: RolloutEngine, directory: Path) -> None:
    trainer = Trainer(directory, learning_rate=0.0)
    first = engine.generate(PROMPTS, LONG, SEEDS)
    parity = rollout_parity(first.log_probs.values, trainer.log_probs(first))
    assert parity.max_abs < PARITY
    for _ in range(10):
        trainer.update(first)
        engine.load_weights(trainer.engine.full_tensors())
        again = engine.generate(PROMPTS, LONG, SEEDS)
        assert same(first, again)
        assert rollout_parity(again.log_probs.values, trainer.log_probs(again)) == parity
