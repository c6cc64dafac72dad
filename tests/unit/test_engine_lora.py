"""Adapters on one rank: what they change, what they leave alone, and what others read of them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nccl_transfer.refs.columns import Jagged
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch
from services.compute.splitting import split
from services.engines.base import OptimizerOptions
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fsdp.lora import AdapterOptions, LoRAEngine
from services.models.export import tensors_sha256
from services.models.families import load_causal_lm

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
HEAD = PolicyHead(temperature=1.7)
OPTIONS = OptimizerOptions(lr=1e-2, max_grad_norm=0.5)
ADAPTERS = AdapterOptions(rank=4, alpha=6.0, seed=3)


pytestmark = pytest.mark.usefixtures("process_group")


def make_engine(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    adapters: AdapterOptions = ADAPTERS,
    compute_dtype: torch.dtype | None = None,
) -> LoRAEngine:
    model = load_causal_lm(directory, dtype)
    return LoRAEngine(model, CPU, adapters=adapters, optimizer=OPTIONS, compute_dtype=compute_dtype)


def micro_batches() -> list[MicroBatch]:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 7, (2, 6)).astype(np.int64)
    prompts, responses = (
        Jagged(torch.from_numpy(generator.integers(3, 61, counts.sum())), counts) for counts in lengths
    )
    return split(prompts, responses, token_budget=30, pad_id=0)


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -output.log_probs_BR[micro_batch.response_mask_BR].sum() / 20, {}


def log_probs(engine: FSDPEngine) -> Tensor:
    batches = micro_batches()
    outputs = engine.infer(batches, HEAD)
    return torch.cat([m.collect(o.log_probs_BR) for m, o in zip(batches, outputs, strict=True)])


def trained(engine: LoRAEngine, steps: int = 2) -> LoRAEngine:
    for _ in range(steps):
        engine.step(micro_batches(), HEAD, loss)
    return engine


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.full_tensors()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def test_new_adapters_change_no_bit(tiny_llama_dir: Path):
    plain = FSDPEngine(load_causal_lm(tiny_llama_dir), CPU)
    engine = make_engine(tiny_llama_dir)
    assert torch.equal(log_probs(engine), log_probs(plain))
    assert same_bits(weights(engine), weights(plain))


def test_without_adapters_a_trained_engine_computes_what_it_was_loaded_with(tiny_llama_dir: Path):
    plain = log_probs(FSDPEngine(load_causal_lm(tiny_llama_dir), CPU))
    engine = trained(make_engine(tiny_llama_dir))
    learned = log_probs(engine)
    with engine.without_adapters():
        assert torch.equal(log_probs(engine), plain)
    assert torch.equal(log_probs(engine), learned)
    assert not torch.equal(learned, plain)


def test_adapters_learn_after_they_were_disabled(tiny_llama_dir: Path):
    engine, other = make_engine(tiny_llama_dir), make_engine(tiny_llama_dir)
    with engine.without_adapters():
        log_probs(engine)
    assert same_bits(trained(engine).snapshot().tensors, trained(other).snapshot().tensors)


def test_only_the_targets_move(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir, adapters=AdapterOptions(target_modules=("q_proj", "1.mlp.up_proj")))
    before = weights(engine)
    after = weights(trained(engine))
    moved = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert moved == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    }


def test_all_linear_means_all_but_the_output_layer(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    before = weights(engine)
    after = weights(trained(engine))
    moved = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixture_of_experts(kind: str, directory: Path, **keys: Any) -> Path:
    """The directory of a tiny model."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(
        kind, **sizes, **heads, **EXPERTS, shared_expert_intermediate_size=24, **keys
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_of_a_mixture_of_experts_the_linear_layers_are_adapted(kind: str, tmp_path: Path):
    engine = make_engine(mixture_of_experts(kind, tmp_path / "model"))
    before = weights(engine)
    moved = {name for name, x in weights(trained(engine)).items() if not torch.equal(x, before[name])}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "shared_expert", "shared_expert_gate")
    assert moved == {
        name for name in before if any(f".{part}." in name for part in linear) and "bias" not in name
    }
    engine.export(tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    merged = adapted.merge_and_unload().state_dict()
    for name, x in engine.full_tensors():
        torch.testing.assert_close(merged[name], x)


@pytest.mark.parametrize("targets", ["all-linear", ("gate_proj", "up_proj"), ("gate_proj",), ("down_proj",)])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_adapters_of_dense_layers_among_experts_are_read_as_the_page_says(
    kind: str, targets: Any, tmp_path: Path
):
    directory = mixture_of_experts(kind, tmp_path / "model", mlp_only_layers=[0])
    engine = make_engine(directory, adapters=AdapterOptions(rank=4, alpha=6.0, target_modules=targets))
    trained(engine).export(tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        unadapted, expected = base(ids).logits, merged(ids).logits
        found = adapted_as_documented(kind, base, tmp_path / "export" / "adapter")(ids).logits
    torch.testing.assert_close(found, expected)
    assert (expected - unadapted).abs().max() > 1e-3


def adapted_as_documented(kind: str, base: Any, adapter: Path) -> Any:
    if kind != "qwen3_moe":
        return PeftModel.from_pretrained(base, str(adapter))
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "lora.md").read_text(), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    exec(block, names)
    names["load_adapter"](base, str(adapter))
    return base


def test_there_is_optimizer_state_for_adapters_alone(tiny_llama_dir: Path):
    tensors = trained(make_engine(tiny_llama_dir)).snapshot().tensors
    kinds = {name.partition(".")[0] for name in tensors}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(".lora_A." in name or ".lora_B." in name for name in tensors)


def test_adapters_follow_from_their_seed_alone(tiny_llama_dir: Path):
    def first(seed: int) -> dict[str, Tensor]:
        return make_engine(tiny_llama_dir, adapters=AdapterOptions(seed=seed)).snapshot().tensors

    torch.manual_seed(1)
    expected, state = first(0), torch.get_rng_state()
    torch.manual_seed(2)
    assert same_bits(first(0), expected)
    assert not same_bits(first(1), expected)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state()), "nobody else's randomness may depend on it"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("lm_head",), r"lm_head shares its weight"),
        (("embed_tokens",), r"embed_tokens is not a linear layer"),
        (("q_proj", "c_attn"), r"target_modules: the model has no linear layer c_attn"),
        (("norm",), r"not supported"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    tiny_tied_llama_dir: Path, targets: tuple[str, ...], expected: str
):
    with pytest.raises(ValueError, match=expected):
        make_engine(tiny_tied_llama_dir, adapters=AdapterOptions(target_modules=targets))


def test_in_bfloat16_adapters_are_float32_and_the_model_is_not(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir, torch.bfloat16, compute_dtype=torch.bfloat16)
    assert {x.dtype for x in trained(engine).snapshot().tensors.values()} == {torch.float32}
    assert {x.dtype for _, x in engine.full_tensors()} == {torch.bfloat16}
    frozen = [x for name, x in engine._kept.items() if ".lora_" not in name]
    assert {x.dtype for x in frozen} == {torch.bfloat16}


def test_bfloat16_computes_near_float32(tiny_llama_dir: Path):
    exact = log_probs(make_engine(tiny_llama_dir))
    rounded = log_probs(make_engine(tiny_llama_dir, torch.bfloat16, compute_dtype=torch.bfloat16))
    assert 0 < float((exact - rounded).abs().max()) < 0.3


def test_a_checkpoint_continues_bit_for_bit_in_a_fresh_engine(tiny_llama_dir: Path, tmp_path: Path):
    engine = trained(make_engine(tiny_llama_dir))
    engine.save(tmp_path / "checkpoint", {"policy_version": 2})
    fresh = make_engine(tiny_llama_dir)
    assert fresh.load(tmp_path / "checkpoint") == {"policy_version": 2}
    assert same_bits(trained(fresh).snapshot().tensors, trained(engine).snapshot().tensors)
    assert same_bits(weights(fresh), weights(engine))


def test_a_checkpoint_in_the_background_is_that_of_the_adapters(tiny_llama_dir: Path, tmp_path: Path):
    engine = trained(make_engine(tiny_llama_dir))
    engine.begin_save(tmp_path / "checkpoint", {"policy_version": 2})()
    fresh = make_engine(tiny_llama_dir)
    assert fresh.load(tmp_path / "checkpoint") == {"policy_version": 2}
    assert same_bits(fresh.snapshot().tensors, engine.snapshot().tensors)


def test_an_update_is_undone_bit_for_bit(tiny_llama_dir: Path):
    engine = trained(make_engine(tiny_llama_dir))
    before, expected = engine.snapshot(), weights(engine)
    trained(engine)
    engine.restore(before)
    assert same_bits(weights(engine), expected)


def test_a_checkpoint_of_other_adapters_changes_nothing(tiny_llama_dir: Path, tmp_path: Path):
    FSDPEngine(load_causal_lm(tiny_llama_dir), CPU, optimizer=OPTIONS).save(tmp_path / "none")
    trained(make_engine(tiny_llama_dir, adapters=AdapterOptions(rank=4, alpha=8.0))).save(tmp_path / "alpha")
    trained(make_engine(tiny_llama_dir, adapters=AdapterOptions(rank=2, alpha=6.0))).save(tmp_path / "rank")
    engine = make_engine(tiny_llama_dir)
    before = engine.snapshot().tensors
    for name, expected in (
        ("none", "has no adapters, expected alpha 6"),
        ("alpha", "has adapters with alpha 8, expected alpha 6"),
        ("rank", r"holds .*\.lora_[AB]\..* as \[.*\b2\b.*\], expected \[.*\b4\b.*\]"),
    ):
        with pytest.raises(ValueError, match=expected):
            engine.load(tmp_path / name)
    assert same_bits(engine.snapshot().tensors, before)


@pytest.mark.parametrize("fixture", ["tiny_llama_dir", "tiny_tied_llama_dir"])
def test_an_export_is_the_merged_model(fixture: str, request: pytest.FixtureRequest, tmp_path: Path):
    engine = trained(make_engine(request.getfixturevalue(fixture)))
    digest = engine.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same_bits(loaded.state_dict(), weights(engine))
    assert tensors_sha256(sorted(load_file(tmp_path / "export" / "model.safetensors").items())) == digest
    merged = FSDPEngine(load_causal_lm(tmp_path / "export"), CPU)
    torch.testing.assert_close(log_probs(merged), log_probs(engine), atol=1e-5, rtol=0)


def test_what_is_merged_is_rounded_to_the_type_of_the_export_alone(tiny_llama_dir: Path, tmp_path: Path):
    engine = trained(make_engine(tiny_llama_dir, torch.bfloat16, compute_dtype=torch.bfloat16))
    engine.export(tmp_path / "export", dtype=torch.float32)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {x.dtype for x in exported.values()} == {torch.float32}
    rounded = {name: x.bfloat16() for name, x in exported.items()}
    assert same_bits(rounded, weights(engine))
    assert not any(
        torch.equal(exported[f"{name}.weight"], rounded[f"{name}.weight"]) for name in engine._layers
    )


def test_peft_loads_the_adapter_of_an_export(tiny_llama_dir: Path, tmp_path: Path):
    engine = trained(make_engine(tiny_llama_dir, torch.float64))
    engine.export(tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    ids = torch.tensor([[1, 5, 9, 11]])
    assert torch.equal(adapted(ids).logits, engine._model(ids).logits)
    merged = adapted.merge_and_unload().state_dict()
    for name, x in engine.full_tensors():
        torch.testing.assert_close(merged[name], x, rtol=1e-12, atol=1e-12)


def test_the_files_of_an_export_follow_from_the_weights(tiny_llama_dir: Path, tmp_path: Path):
    engine = trained(make_engine(tiny_llama_dir))
    engine.export(tmp_path / "export")
    directory = tmp_path / "export" / "adapter"
    assert {path.name for path in directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6.0, 0.0)
    assert config["base_model_name_or_path"] == str(tiny_llama_dir)


def test_what_is_held_says_that_adapters_alone_learn(tiny_llama_dir: Path):
    engine = make_engine(tiny_llama_dir)
    before = {each.name: (each.learns, each.tensor.clone()) for each in engine.held()}
    trained(engine)
    changed = {each.name for each in engine.held() if not torch.equal(each.tensor, before[each.name][1])}
    assert {name for name, (learns, _) in before.items() if learns} == changed
    assert {".lora_" in name for name in changed} == {True}
    names = {f"weight.{name}" for name in engine._kept}
    assert names < before.keys(), "frozen weights are held too"
