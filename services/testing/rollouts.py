"""Contract of every rollout engine: its interface, and the training engine's own probabilities. Authors of an engine
subclass `RolloutContract`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.actor.losses import policy_loss, surrogate_of
from services.actor.parity import rollout_parity
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import EngineOffloaded, EngineSetup, OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models.families import load_causal_lm
from services.roles.engine_factory import make_engine
from services.roles.loss_options import PolicyLossOptions
from services.rollout.base import (
    Generation,
    GenerationStopped,
    RolloutEngine,
    RolloutSetup,
    SamplingOptions,
)
from services.rollout.factory import make_rollout
from services.rollout.sampling import row_seeds
from services.rollout.stops import StopStrings
from services.testing.plain_rows import plain_log_probs
from services.testing.single_rank import single_rank
from settings.actor import ActorTable

CPU = torch.device("cpu")
VOCABULARY = 61
POSITIONS = 64
# Many of them, so that responses end at different times.
EOS = (2, 3, 4, 5, 6, 7, 8)
PROMPTS = [[1, 10, 11], [1, 20], [1, 30, 31, 32, 33, 34], [1, 10, 11], [1, 40], [50], [1, 30, 31, 32, 33, 35]]
SEEDS = row_seeds(17, step=0, call="generate", rows=np.arange(len(PROMPTS)))
TEMPERATURE = 1.3
PARITY = 1e-4


def same(a: Generation, b: Generation) -> bool:
    """Returns whether two generations have the same tokens, and the same log-probabilities bit for bit."""
    return torch.equal(a.responses.values, b.responses.values) and torch.equal(
        a.log_probs.values, b.log_probs.values
    )


def spell(rows: list[list[int]]) -> list[str]:
    """Returns a text per row, with one character per token id: "A" for 0. Decodes texts for stop strings."""
    return ["".join(chr(ord("A") + token) for token in row) for row in rows]


def stopping_at(options: SamplingOptions, *texts: str) -> SamplingOptions:
    """Returns a copy of the options with these stop strings, which `spell` decodes tokens for."""
    return replace(options, stop=StopStrings(texts, spell))


class Trainer:
    """A training engine on the CPU that takes PPO steps on generations of PROMPTS, with random advantages.

    Args:
        directory: Hugging Face directory of the model.
        learning_rate: Learning rate of AdamW.
        temperature: Divisor of the logits.
        adapters: Options of the LoRA adapters that are trained; None to train the weights.
    """

    def __init__(
        self,
        directory: Path,
        learning_rate: float,
        temperature: float,
        adapters: AdapterOptions | None = None,
    ) -> None:
        self.head = PolicyHead(temperature=temperature)
        options = OptimizerOptions(lr=learning_rate, weight_decay=0.0)
        model = load_causal_lm(directory)
        self.engine = (
            LoRAEngine(model, CPU, adapters=adapters, optimizer=options)
            if adapters
            else FSDPEngine(model, CPU, optimizer=options)
        )

    def log_probs(self, generation: Generation) -> Tensor:
        """Returns the training engine's log-probabilities of the responses' tokens, row after row, [tokens]."""
        micro_batches = self._micro_batches(generation)
        outputs = self.engine.infer(micro_batches, self.head)
        values = [m.collect(o.log_probs_BR) for m, o in zip(micro_batches, outputs, strict=True)]
        parts = [micro_batch.rows for micro_batch in micro_batches]
        return assemble(parts, values, generation.responses.lengths).values

    def update(self, generation: Generation) -> None:
        """Takes one PPO step on a generation; its log-probabilities are the old ones. Advantages are the same at each
        call."""
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
        """Returns PROMPTS with the generated responses as micro-batches of at most 200 tokens."""
        lengths = np.array([len(prompt) for prompt in PROMPTS])
        prompts = Jagged(torch.tensor([token for prompt in PROMPTS for token in prompt]), lengths)
        return split(prompts, generation.responses, token_budget=200, pad_id=0)


class RolloutResponses:
    """The tests of `RolloutContract` of what is generated: tokens, their log-probabilities, and where responses end.

    Attributes:
        keys: keys of the actor's table that choose the engine: `rollout_engine`, its options, and whatever else it
            needs.
        samples: whether the engine draws tokens. If not, it decodes greedily alone: tests of what is drawn are skipped,
            and the others are greedy.
    """

    keys: Mapping[str, Any]
    samples: bool = True

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
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

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, directory: Path) -> PreTrainedModel:
        """The model of `directory` in plain transformers, in float32."""
        return load_causal_lm(directory)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def process_group(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """Makes this process the only rank of the default process group while the class's tests run."""
        with single_rank(CPU, tmp_path_factory.mktemp("process_group")):
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, directory: Path, process_group: None) -> RolloutEngine:
        """The rollout engine that `keys` choose, built once per class as an actor builds it, and without weights.
        Skips the tests if its package is not installed."""
        keys = {"role": "actor", "address": "127.0.0.1:1", "model": directory}
        table = ActorTable.model_validate(keys | dict(cls.keys))
        package = table.rollout_spec.package
        if package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        trained = make_engine(table, EngineSetup(load_causal_lm, Mesh(), CPU, OptimizerOptions()))
        return make_rollout(table, RolloutSetup(trained.generation_shards, Mesh(), CPU))

    @pytest.fixture
    def engine(self, started: RolloutEngine, model: PreTrainedModel) -> RolloutEngine:
        """The engine of `started`, into which the weights of `model` are loaded before each test."""
        started.load_weights(model.state_dict().items())
        return started

    @property
    def temperature(self) -> float:
        """Divisor of the logits in the distribution that the engine's log-probabilities are of: TEMPERATURE, or 1 if
        the engine decodes greedily."""
        return TEMPERATURE if self.samples else 1.0

    @property
    def sampled(self) -> SamplingOptions:
        """Options with which responses end at different times, at a token of EOS or after 12 tokens."""
        return self.options(max_new_tokens=12, eos_ids=EOS)

    @property
    def long(self) -> SamplingOptions:
        """Options with which every response has 40 tokens."""
        return self.options(max_new_tokens=40)

    def options(self, **options: Any) -> SamplingOptions:
        """Returns sampling options with these fields: sampling at TEMPERATURE, or greedy decoding if not
        `samples`."""
        return SamplingOptions(**options, greedy=not self.samples, temperature=TEMPERATURE)

    def needs_sampling(self) -> None:
        """Skips the running test if the engine does not sample (`samples` is False)."""
        if not self.samples:
            pytest.skip("the engine decodes greedily alone")

    def test_a_generation_has_a_response_and_its_log_probs_for_every_prompt(
        self, engine: RolloutEngine
    ) -> None:
        generation = engine.generate(PROMPTS, self.sampled, SEEDS)
        assert generation.responses.rows == len(generation.finish_reasons) == len(PROMPTS)
        assert np.array_equal(generation.responses.lengths, generation.log_probs.lengths)
        assert generation.responses.values.dtype == torch.int64
        assert generation.log_probs.values.dtype == torch.float32
        assert (generation.log_probs.values <= 0).all()
        assert (
            0 <= int(generation.responses.values.min()) <= int(generation.responses.values.max()) < VOCABULARY
        )

    def test_a_row_says_the_same_alone_and_in_any_order(self, engine: RolloutEngine) -> None:
        together = engine.generate(PROMPTS, self.sampled, SEEDS).responses.tolist()
        alone = [
            engine.generate([PROMPTS[i]], self.sampled, SEEDS[[i]]).responses.tolist()[0]
            for i in range(len(PROMPTS))
        ]
        reversed_ = engine.generate(PROMPTS[::-1], self.sampled, SEEDS[::-1]).responses.tolist()
        assert alone == together
        assert reversed_ == together[::-1]
        assert not self.samples or len({len(response) for response in together}) > 2, (
            "rows must end at different times"
        )

    def test_equal_prompts_with_other_seeds_differ(self, engine: RolloutEngine) -> None:
        self.needs_sampling()
        responses = engine.generate(PROMPTS, self.long, SEEDS).responses.tolist()
        assert PROMPTS[0] == PROMPTS[3]
        assert responses[0] != responses[3]

    def test_the_same_call_gives_the_same_bits_whatever_was_generated_before(
        self, engine: RolloutEngine
    ) -> None:
        first = engine.generate(PROMPTS, self.long, SEEDS)
        engine.generate([[*PROMPTS[2], *range(10, 25)], PROMPTS[0]], self.long, SEEDS[:2])
        assert same(first, engine.generate(PROMPTS, self.long, SEEDS))

    @pytest.mark.parametrize("penalty", [1.0, 1.8, 0.6])
    def test_greedy_takes_the_most_probable_token_after_the_repetition_penalty(
        self, penalty: float, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        ignored = {"temperature": 3.0, "top_k": 1, "min_p": 1.0}
        options = SamplingOptions(12, EOS, greedy=True, repetition_penalty=penalty, **ignored)
        generation = engine.generate(PROMPTS, options, SEEDS)
        for i, prompt in enumerate(PROMPTS):
            response = generation.responses.row(i)
            log_probs = plain_log_probs(model, prompt, response.tolist(), options)
            assert response.tolist() == log_probs.argmax(dim=-1).tolist()
            expected = log_probs.gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(generation.log_probs.row(i).double(), expected, atol=PARITY, rtol=0)

    @pytest.mark.parametrize(
        "drawing",
        [
            {},
            {"temperature": 0.7},
            {"top_k": 5},
            {"top_p": 0.8},
            {"top_k": 20, "top_p": 0.9},
            {"min_p": 0.1},
            {"min_p": 0.1, "temperature": 2.0, "top_k": 30, "top_p": 0.8},
            {"repetition_penalty": 1.5},
            {"repetition_penalty": 0.7, "min_p": 0.05, "temperature": 0.9},
        ],
    )
    def test_log_probs_are_those_of_the_distribution_that_was_sampled(
        self, engine: RolloutEngine, model: PreTrainedModel, drawing: dict[str, Any]
    ) -> None:
        self.needs_sampling()
        options = SamplingOptions(max_new_tokens=20, eos_ids=EOS, **drawing)
        generation = engine.generate(PROMPTS * 4, options, row_seeds(1, 0, "g", np.arange(4 * len(PROMPTS))))
        for i, prompt in enumerate(PROMPTS * 4):
            response = generation.responses.row(i)
            distribution = plain_log_probs(model, prompt, response.tolist(), options)
            expected = distribution.gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(generation.log_probs.row(i).double(), expected, atol=PARITY, rtol=0)

    @pytest.mark.parametrize(
        "truncation", [{"top_k": 20, "top_p": 0.9}, {"min_p": 0.02}], ids=["top k and p", "min p"]
    )
    def test_what_is_drawn_follows_the_distribution(
        self, truncation: dict[str, Any], engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        self.needs_sampling()
        num_rows = 5_000
        options = SamplingOptions(max_new_tokens=1, temperature=0.8, **truncation)
        seeds = row_seeds(3, 0, "generate", np.arange(num_rows))
        drawn = engine.generate([[1, 10, 11]] * num_rows, options, seeds).responses.values
        expected = num_rows * plain_log_probs(model, [1, 10, 11], [0], options)[0].exp()
        counts = torch.bincount(drawn, minlength=VOCABULARY)
        assert counts[expected == 0].sum() == 0
        kept = expected > 5
        chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
        degrees = int(kept.sum()) - 1
        assert degrees > 3
        assert chi_square < degrees + 5 * (2 * degrees) ** 0.5

    def test_a_response_ends_with_its_first_end_token_or_at_the_limit(self, engine: RolloutEngine) -> None:
        generation = engine.generate(
            PROMPTS * 8, self.sampled, row_seeds(1, 0, "g", np.arange(8 * len(PROMPTS)))
        )
        for response, reason in zip(generation.responses.tolist(), generation.finish_reasons, strict=True):
            assert not {*EOS} & {*response[:-1]}
            assert reason == ("stop" if response[-1] in EOS else "length")
            assert len(response) == 12 or reason == "stop"
        assert not self.samples or set(generation.finish_reasons) == {"stop", "length"}

    def test_without_end_tokens_every_response_has_full_length(self, engine: RolloutEngine) -> None:
        generation = engine.generate(PROMPTS, self.options(max_new_tokens=9), SEEDS)
        assert generation.responses.lengths.tolist() == [9] * len(PROMPTS)
        assert generation.finish_reasons == ["length"] * len(PROMPTS)

    def test_a_response_ends_with_the_token_that_completes_a_stop_string(self, engine: RolloutEngine) -> None:
        whole = engine.generate(PROMPTS, self.long, SEEDS)
        texts = spell(whole.responses.tolist())
        options = stopping_at(self.long, texts[0][7:9], texts[1][3], texts[2][30:33])
        ended = engine.generate(PROMPTS, options, SEEDS)
        assert options.stop
        for i, text in enumerate(texts):
            ends = [text.find(stop) + len(stop) for stop in options.stop.texts if stop in text]
            length = min(ends, default=self.long.max_new_tokens)
            assert ended.responses.row(i).tolist() == whole.responses.row(i).tolist()[:length]
            torch.testing.assert_close(
                ended.log_probs.row(i), whole.log_probs.row(i)[:length], atol=PARITY, rtol=0
            )
            assert ended.finish_reasons[i] == ("stop" if ends else "length")
        assert not self.samples or len(set(ended.responses.lengths.tolist())) > 2, (
            "rows must end at different times"
        )

    def test_a_stop_string_at_the_last_token_is_a_stop(self, engine: RolloutEngine) -> None:
        self.needs_sampling()
        options = self.options(max_new_tokens=9)
        text = spell(engine.generate(PROMPTS[:1], options, SEEDS[:1]).responses.tolist())[0]
        generation = engine.generate(PROMPTS[:1], stopping_at(options, text[5:]), SEEDS[:1])
        assert generation.responses.lengths.tolist() == [9]
        assert generation.finish_reasons == ["stop"]

    def test_a_stop_string_leaves_nothing_for_the_next_generation(self, engine: RolloutEngine) -> None:
        expected = engine.generate(PROMPTS, self.long, SEEDS)
        first = chr(ord("A") + int(expected.responses.values[0]))
        reports: list[tuple[int, int]] = []
        ended = engine.generate(
            PROMPTS, stopping_at(self.long, first), SEEDS, progress=lambda *counts: reports.append(counts)
        )
        assert ended.responses.lengths[0] == 1
        assert reports[-1] == (len(PROMPTS), len(ended.responses.values))
        assert same(expected, engine.generate(PROMPTS, self.long, SEEDS))


class RolloutContract(RolloutResponses):
    """Tests that every rollout engine passes. The tests of an engine are a subclass that sets `keys`, for example to
    `{"rollout_engine": "my_package.engines:mine"}`."""

    def test_a_row_may_fill_the_model_to_its_last_position(self, engine: RolloutEngine) -> None:
        options = self.options(max_new_tokens=12)
        generation = engine.generate([[1] * (POSITIONS - 12)], options, SEEDS[:1])
        assert generation.responses.lengths.tolist() == [12]

    @pytest.mark.parametrize(
        ("prompt", "reason"),
        [([], "row 1 has an empty prompt"), ([1] * 60, "row 1 has 60 prompt tokens, with 12 new ones")],
    )
    def test_a_prompt_that_cannot_be_continued_is_named(
        self, engine: RolloutEngine, prompt: list[int], reason: str
    ) -> None:
        with pytest.raises(ValueError, match=reason):
            engine.generate([[1], prompt], self.sampled, SEEDS[:2])

    def test_no_prompts_at_all_are_refused(self, engine: RolloutEngine) -> None:
        with pytest.raises(ValueError, match="no prompts"):
            engine.generate([], self.sampled, SEEDS[:0])

    def test_a_generation_that_was_stopped_leaves_nothing_for_the_next(self, engine: RolloutEngine) -> None:
        expected = engine.generate(PROMPTS, self.long, SEEDS)
        asked = iter([False, False, True])
        with pytest.raises(GenerationStopped, match="0 rows were complete"):
            engine.generate(PROMPTS, self.long, SEEDS, should_stop=lambda: next(asked))
        assert next(asked, None) is None
        assert same(expected, engine.generate(PROMPTS, self.long, SEEDS))

    def test_progress_grows_to_all_rows_and_all_tokens(self, engine: RolloutEngine) -> None:
        reports: list[tuple[int, int]] = []
        generation = engine.generate(
            PROMPTS,
            self.sampled,
            SEEDS,
            progress=lambda num_rows, num_tokens: reports.append((num_rows, num_tokens)),
        )
        assert len(reports) >= 12
        assert reports == sorted(reports)
        assert reports[-1] == (len(PROMPTS), len(generation.responses.values))

    def test_new_weights_change_what_is_generated(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        before = engine.generate(PROMPTS, self.long, SEEDS)
        engine.load_weights((name, tensor * 0.5) for name, tensor in model.state_dict().items())
        halved = engine.generate(PROMPTS, self.long, SEEDS)
        engine.load_weights(model.state_dict().items())
        assert not same(before, halved)
        assert same(before, engine.generate(PROMPTS, self.long, SEEDS))

    def test_weights_of_another_model_are_refused_once_all_have_come(
        self, engine: RolloutEngine, model: PreTrainedModel
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
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        engine.load_weights((name, tensor * float("nan")) for name, tensor in model.state_dict().items())
        with pytest.raises(FloatingPointError, match="not finite"):
            engine.generate(PROMPTS, self.sampled, SEEDS)

    @pytest.mark.parametrize("keep_weights", [True, False], ids=["keeps weights", "drops weights"])
    def test_an_engine_that_sleeps_generates_nothing_until_it_wakes(
        self, keep_weights: bool, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        expected = engine.generate(PROMPTS, self.sampled, SEEDS)
        freed = engine.sleep(keep_weights=keep_weights)
        with pytest.raises(EngineOffloaded, match="asleep"):
            engine.generate(PROMPTS, self.sampled, SEEDS)
        assert engine.wake() == freed
        assert freed or any("Offload frees nothing" in limit for limit in engine.limits)
        if not (keep_weights and engine.keeps_weights):
            engine.load_weights(model.state_dict().items())
        assert same(expected, engine.generate(PROMPTS, self.sampled, SEEDS))

    @pytest.mark.parametrize("adapters", [None, AdapterOptions()], ids=["weights learn", "adapters learn"])
    def test_rollout_log_probs_are_the_training_engines_after_every_update(
        self, engine: RolloutEngine, directory: Path, adapters: AdapterOptions | None
    ) -> None:
        trainer = Trainer(directory, learning_rate=1e-2, temperature=self.temperature, adapters=adapters)
        previous = torch.empty(0)
        for _ in range(4):
            generation = engine.generate(PROMPTS, self.long, SEEDS)
            torch.testing.assert_close(
                generation.log_probs.values, trainer.log_probs(generation), atol=PARITY, rtol=0
            )
            assert not torch.equal(generation.log_probs.values, previous), "the update must have an effect"
            previous = generation.log_probs.values
            trainer.update(generation)
            engine.load_weights(trainer.engine.full_tensors())

    def test_without_a_learning_rate_nothing_drifts(self, engine: RolloutEngine, directory: Path) -> None:
        trainer = Trainer(directory, learning_rate=0.0, temperature=self.temperature)
        first = engine.generate(PROMPTS, self.long, SEEDS)
        parity = rollout_parity(first.log_probs.values, trainer.log_probs(first))
        assert parity.max_abs < PARITY
        for _ in range(10):
            trainer.update(first)
            engine.load_weights(trainer.engine.full_tensors())
            again = engine.generate(PROMPTS, self.long, SEEDS)
            assert same(first, again)
            assert rollout_parity(again.log_probs.values, trainer.log_probs(again)) == parity
