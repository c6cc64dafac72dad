"""Models of many types: trained, generated with, exported and loaded, they have the numbers of plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_types import CONFIGS, VOCABULARY, in_eager_mode, plain_model, write_directory
from packed_rows import HEAD, jagged, loss
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedTokenizerFast
from unit.one_rank import OneRank

from nccl_transfer.refs.columns import Jagged
from services.compute.heads import value_head
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine, output_layer
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models.families import load_causal_lm, load_value_model
from services.models.loading import load_on_meta
from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from settings.families import PACKED

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OPTIONS = OptimizerOptions(lr=3e-3, max_grad_norm=float("inf"))
EXACT = 2e-5
"""Largest error of a number whose norms, softmax or recurrence transformers computes in float32."""
IN_FLOAT32 = 1e-4
PARITY = {"nemotron_h": 1e-2}
"""Errors of generated log-probabilities above IN_FLOAT32: transformers bounds the time step of these layers from below,
but not where it computes one token at a time."""
QUICK = (
    *(
        "bamba",
        "bloom",
        "cohere2",
        "deepseek_v3",
        "falcon_mamba",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_neox",
    ),
    *("gpt_oss", "granite", "olmo2", "phi3", "qwen3_next", "recurrent_gemma", "smollm3"),
)
"""Types that every change is tested with; the others are slow together."""
NO_ROLLOUTS = ("recurrent_gemma",)
WHOLE_LOGITS = ("phi",)
"""Types that are packed and have output layers with a bias."""

pytestmark = pytest.mark.usefixtures("process_group")


@dataclass(frozen=True)
class Case:
    """A model in a directory, and the numbers of its rows in plain transformers, row by row.

    Attributes:
        log_probs: of the response tokens, row after row.
        gradients: of `packed_rows.loss`.
    """

    model_type: str
    directory: Path
    prompts: Jagged[Tensor]
    responses: Jagged[Tensor]
    log_probs: Tensor
    gradients: dict[str, Tensor]

    def split(self, packed: bool, responses: Jagged[Tensor] | None = None) -> list[MicroBatch]:
        responses = responses or self.responses
        return split(self.prompts, responses, token_budget=70, pad_id=0, packed=packed)

    def on_meta(self, dtype: torch.dtype = torch.float64) -> Any:
        return in_eager_mode(load_on_meta(load_causal_lm, self.directory, dtype))

    def engine(self, **options: Any) -> FSDPEngine:
        model = self.on_meta()
        if options:  # FSDP shards trained weights of one type only
            model = model.double()
        return FSDPEngine(
            model, CPU, directory=self.directory, load=load_causal_lm, optimizer=OPTIONS, **options
        )


def rows() -> tuple[Jagged[Tensor], Jagged[Tensor]]:
    """Ten rows of up to 13 + 13 tokens, some with the same prompt and one without a response."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, VOCABULARY, length) for length in generator.integers(1, 14, 10)]
    for row, same in {5: 0, 7: 0, 2: 1}.items():
        prompts[row] = prompts[same]
    lengths = [*generator.integers(1, 14, 9), 0]
    return jagged(prompts), jagged([generator.integers(3, VOCABULARY, length) for length in lengths])


def alone(model: Any, prompts: Jagged[Tensor], responses: Jagged[Tensor]) -> Tensor:
    """Log-probabilities of response tokens, each row in a forward pass of its own."""
    found = []
    for row in range(prompts.rows):
        prompt, response = prompts.row(row), responses.row(row)
        logits = model(torch.cat((prompt, response))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append((logits / HEAD.temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def log_probs(engine: FSDPEngine, micro_batches: list[MicroBatch], responses: Jagged[Tensor]) -> Tensor:
    outputs = engine.infer(micro_batches, HEAD)
    collected = [m.collect(out.log_probs_BR) for m, out in zip(micro_batches, outputs, strict=True)]
    return assemble([m.rows for m in micro_batches], collected, responses.lengths).values.double()


def assert_gradients(engine: FSDPEngine, expected: dict[str, Tensor], relative: float) -> None:
    """Asserts that the engine's gradients are within a share of the norm of each tensor's expected one, or of a
    thousandth of that of all."""
    total = torch.stack([torch.linalg.vector_norm(x) for x in expected.values()]).norm()
    for name, gradient in expected.items():
        found = engine._kept[name].grad
        assert found is not None
        difference = torch.linalg.vector_norm(found.view(gradient.shape) - gradient)
        assert difference <= relative * max(torch.linalg.vector_norm(gradient), 1e-3 * total), name


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CONFIGS],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    write_directory(request.param, directory)
    model, (prompts, responses) = plain_model(directory), rows()
    found = alone(model, prompts, responses)
    found.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Some models return logits in float32.
    return Case(request.param, directory, prompts, responses, found.detach().double(), gradients)


heavy = pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.full) for name in CONFIGS],
    indirect=True,
)


def test_every_type_that_is_packed_is_tested():
    assert set(PACKED) <= set(CONFIGS)


def test_the_page_on_models_lists_every_type_as_packed_or_padded():
    cells = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = {name.split()[0]: how.strip() for names, how in cells for name in names.split(",")}
    assert listed.keys() - {"`model_type`"} == CONFIGS.keys()
    assert {name for name, how in listed.items() if how.startswith("packed")} == set(PACKED)


def test_rows_have_the_numbers_of_rows_alone(case: Case):
    engine = case.engine()
    assert engine.packs == (case.model_type in PACKED)
    has_chunks = output_layer(engine._model) is not None
    assert has_chunks == (engine.packs and case.model_type not in WHOLE_LOGITS)
    for packed in {False, engine.packs}:
        micro_batches = case.split(packed)
        assert len(micro_batches) > 1
        found = log_probs(engine, micro_batches, case.responses)
        torch.testing.assert_close(found, case.log_probs, rtol=0, atol=EXACT)
        engine._accumulate_gradients(micro_batches, HEAD, loss)
        assert_gradients(engine, case.gradients, EXACT)
        engine._drop_gradients()


def test_what_is_generated_and_exported_after_a_step_is_what_was_trained(case: Case, tmp_path: Path):
    engine = case.engine()
    engine.step(case.split(engine.packs), HEAD, loss)
    engine.export(tmp_path / "export")
    exported = load_causal_lm(tmp_path / "export", torch.float64).state_dict()
    trained = dict(engine.full_tensors())
    assert exported.keys() == trained.keys()
    assert all(torch.equal(x, trained[name]) for name, x in exported.items())
    with torch.no_grad():
        by_transformers = alone(plain_model(tmp_path / "export"), case.prompts, case.responses).double()
    found = log_probs(engine, case.split(engine.packs), case.responses)
    torch.testing.assert_close(found, by_transformers, rtol=0, atol=EXACT)
    assert (found - case.log_probs).abs().max() > 1e-3
    if case.model_type in NO_ROLLOUTS:
        return

    rollout = HFRollout(in_eager_mode(load_causal_lm(case.directory)), token_budget=4096)
    rollout.load_weights(engine.rollout_weights())
    prompts = [case.prompts.row(row).tolist() for row in range(case.prompts.rows)]
    options = SamplingOptions(12, temperature=HEAD.temperature, eos_ids=tuple(range(3, 16)))
    generation = rollout.generate(prompts, options, row_seeds(0, 1, "generate", np.arange(len(prompts))))
    responses = generation.responses
    assert len(set(responses.lengths)) > 1, "rows that end are dropped from the batch"
    recomputed = log_probs(engine, case.split(engine.packs, responses), responses)
    tolerance = PARITY.get(case.model_type, IN_FLOAT32)
    torch.testing.assert_close(generation.log_probs.values.double(), recomputed, rtol=0, atol=tolerance)


def test_types_of_weights_on_meta_are_those_of_a_whole_model_in_half_precision(case: Case):
    whole = load_causal_lm(case.directory, torch.bfloat16)
    outline = load_causal_lm(case.directory, torch.bfloat16, on_meta=True)
    assert {n: x.dtype for n, x in outline.state_dict().items()} == {
        n: x.dtype for n, x in whole.state_dict().items()
    }
    computed = dict(whole.named_buffers())
    for name, buffer in outline.named_buffers():
        assert buffer.is_meta or torch.equal(buffer, computed[name])


@heavy
def test_shards_that_are_recomputed_have_the_numbers_of_rows_alone(case: Case):
    engine = case.engine(compute_dtype=torch.float32, activation_checkpointing=True)
    for packed in {False, engine.packs}:
        micro_batches = case.split(packed)
        found = log_probs(engine, micro_batches, case.responses)
        torch.testing.assert_close(found, case.log_probs, rtol=0, atol=IN_FLOAT32)
        engine._accumulate_gradients(micro_batches, HEAD, loss)
        assert_gradients(engine, case.gradients, 1e-3)
        engine._drop_gradients()


@heavy
def test_shards_of_a_frozen_model_in_half_precision_have_its_numbers(case: Case):
    model = case.on_meta(torch.bfloat16)
    engine = FSDPEngine(
        model, CPU, directory=case.directory, load=load_causal_lm, compute_dtype=torch.float32
    )
    plain = load_causal_lm(case.directory, torch.bfloat16).float()
    with torch.no_grad():
        expected = alone(in_eager_mode(plain), case.prompts, case.responses).double()
    found = log_probs(engine, case.split(engine.packs), case.responses)
    torch.testing.assert_close(found, expected, rtol=0, atol=IN_FLOAT32)


@heavy
def test_values_are_the_head_on_the_hidden_states_of_rows_alone(case: Case):
    if case.model_type == "llama4_text":
        pytest.skip("transformers registers its language model under two classes")
    backbone = AutoModel.from_pretrained(case.directory, dtype=torch.float64, attn_implementation="eager")
    plain, expected = in_eager_mode(backbone.eval()), []
    torch.manual_seed(3)
    weight_H = torch.randn(load_value_model(case.directory).value_head.in_features, dtype=torch.float64)
    with torch.no_grad():
        for row in range(case.prompts.rows):
            prompt, response = case.prompts.row(row), case.responses.row(row)
            hidden = plain(torch.cat((prompt, response))[None], use_cache=False).last_hidden_state[0]
            expected.append(hidden[len(prompt) - 1 : -1] @ weight_H)
    model = load_value_model(case.directory, torch.float64)
    in_eager_mode(model.backbone)
    nn.init.zeros_(model.value_head.bias)
    model.value_head.weight = nn.Parameter(weight_H[None])
    engine = FSDPEngine(model, CPU)
    for packed in {False, engine.packs}:
        micro_batches = case.split(packed)
        outputs = engine.infer(micro_batches, value_head)
        collected = [m.collect(out) for m, out in zip(micro_batches, outputs, strict=True)]
        found = assemble([m.rows for m in micro_batches], collected, case.responses.lengths).values
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=EXACT)


@heavy
def test_adapters_train_and_are_exported(case: Case, tmp_path: Path):
    adapters: dict[str, Any] = {"adapters": AdapterOptions(rank=2), "optimizer": OPTIONS}
    model = case.on_meta(torch.float32)
    if case.model_type == "gpt2":
        with pytest.raises(ValueError, match="models of type gpt2 have no linear layers"):
            LoRAEngine(model, CPU, directory=case.directory, **adapters)
        return
    engine = LoRAEngine(model, CPU, directory=case.directory, **adapters)
    micro_batches = case.split(engine.packs)
    before = log_probs(engine, micro_batches, case.responses)
    torch.testing.assert_close(before, case.log_probs, rtol=0, atol=IN_FLOAT32)
    for _ in range(2):
        engine.step(micro_batches, HEAD, loss)
    after = log_probs(engine, micro_batches, case.responses)
    assert (after - before).abs().max() > 1e-3
    engine.export(tmp_path / "export")
    with torch.no_grad():
        merged = alone(plain_model(tmp_path / "export"), case.prompts, case.responses).double()
    torch.testing.assert_close(after, merged, rtol=0, atol=IN_FLOAT32)


@heavy
def test_an_actor_and_a_critic_make_an_iteration_of_ppo(case: Case, tiny_tokenizer: PreTrainedTokenizerFast):
    if case.model_type.startswith("qwen2"):
        pytest.skip("transformers gives every directory of this type the tokenizer of Qwen2")
    tiny_tokenizer.save_pretrained(case.directory)
    if case.model_type in NO_ROLLOUTS:
        with pytest.raises(Exception, match=f"cannot generate with models of type {case.model_type}"):
            OneRank(case.directory)
        return
    ranks = OneRank(case.directory)
    try:
        assert ranks.actor.describe().max_tokens > 0
        ranks.iteration()
        difference = ranks.read("log_probs").values - ranks.read("rollout_log_probs").values
        assert np.abs(difference).max() < PARITY.get(case.model_type, IN_FLOAT32)
    finally:
        ranks.close()
