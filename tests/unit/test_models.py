"""Any Hugging Face directory loads, ours come back as they were, and what cannot work says so."""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_types import configuration
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from rlhf.errors import InvalidRequest
from rlhf.v1 import common_pb2
from services.models.export import tensors_sha256, write_config, write_model
from services.models.families import load_causal_lm, load_classifier, load_value_model
from services.models.meta import compute_buffers
from services.models.positions import max_positions
from services.models.sequence_scorer import SequenceScorer
from services.models.tokenizers import check_tokenizer, load_tokenizer, vocabulary_hash
from services.models.value_model import ValueModel
from services.roles.tokenization import tokenize_texts
from services.runtime.worker import CallContext

IDS = torch.tensor([[1, 5, 9, 33, 60]])


def test_a_causal_lm_loads_with_the_weights_of_its_directory_and_without_dropout(tiny_llama_dir: Path):
    model = load_causal_lm(tiny_llama_dir)
    expected = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, atol=1e-5, rtol=0)
    assert not model.training


def test_other_architectures_load(tmp_path: Path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path)(IDS).logits.shape == (1, 5, 61)


def test_a_model_loads_in_the_dtype_asked_for(tiny_llama_dir: Path):
    assert load_causal_lm(tiny_llama_dir, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model, load_tokenizer])
def test_a_missing_directory_is_named(load: Callable[[Path], object], tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model, load_tokenizer])
def test_a_directory_without_config_is_named(load: Callable[[Path], object], tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=f"{tmp_path} is not a model directory: it has no config.json"
    ):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(tiny_llama_dir: Path, tmp_path: Path):
    shutil.copy(tiny_llama_dir / "config.json", tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be loaded"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    "change", [{"model_type": "new"}, {"model_type": "vit"}], ids=["unknown", "no_language_model"]
)
@pytest.mark.parametrize("on_meta", [False, True], ids=["weights", "meta"])
def test_code_in_a_directory_is_not_run_and_nobody_is_asked_whether_to(
    change: dict, on_meta: bool, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": classes} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", _never_asked)
    with pytest.raises(ValueError, match=r"cannot be loaded with AutoModelForCausalLM: .*code") as refused:
        load_causal_lm(tmp_path, on_meta=on_meta)
    assert "trust_remote_code" not in str(refused.value)


@pytest.mark.parametrize("on_meta", [False, True], ids=["weights", "meta"])
def test_adapters_beside_a_model_are_refused(on_meta: bool, tiny_llama_dir: Path, tmp_path: Path):
    """transformers would add them to a model with weights, but not to one on the meta device."""
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    adapters = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path), adapters).save_pretrained(str(tmp_path))
    for load in (partial(load_causal_lm, on_meta=on_meta), load_tokenizer):
        with pytest.raises(ValueError, match=r"has adapters beside its model \(adapter_config.json\)"):
            load(tmp_path)


def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked_whether_to(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    for name, change in {
        "config.json": {"model_type": "new"},
        "tokenizer_config.json": {
            "tokenizer_class": "Own",
            "auto_map": {"AutoTokenizer": ["code.Own", None]},
        },
    }.items():
        path = tmp_path / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    monkeypatch.setattr("builtins.input", _never_asked)
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded: .*contains custom code"):
        load_tokenizer(tmp_path)


def _never_asked(question: str) -> str:
    pytest.fail(question)


def test_weights_that_are_not_there_are_never_made_up(tiny_llama_dir: Path, tmp_path: Path):
    value_model = load_value_model(tiny_llama_dir)
    write_model(value_model, value_model.state_dict(), tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 weights of its model, the first is lm_head\.weight"):
        load_causal_lm(tmp_path)


def test_a_damaged_file_is_an_error_of_its_directory(tiny_llama_dir: Path, tmp_path: Path):
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be loaded"):
        load_causal_lm(tmp_path)


def test_a_new_value_model_says_zero_everywhere(tiny_llama_dir: Path):
    assert load_value_model(tiny_llama_dir)(IDS).tolist() == [[0.0] * 5]


def test_a_value_is_the_head_on_the_hidden_state_of_its_position(tiny_llama_dir: Path):
    model = load_value_model(tiny_llama_dir)
    torch.nn.init.normal_(model.value_head.weight)
    hidden = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).model(IDS).last_hidden_state
    expected = hidden @ model.value_head.weight[0]
    torch.testing.assert_close(model(IDS), expected)
    torch.testing.assert_close(model(IDS, logits_to_keep=2), expected[:, -2:])


def test_a_value_model_comes_back_from_its_directory_bit_for_bit(tiny_llama_dir: Path, tmp_path: Path):
    model = load_value_model(tiny_llama_dir)
    torch.nn.init.normal_(model.value_head.weight)
    write_model(model, model.state_dict(), tmp_path)
    loaded = load_value_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
def test_a_directory_without_files_of_a_tokenizer_has_none(tmp_path: Path, family: Any) -> None:
    family(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match=f"{tmp_path} has no files of a tokenizer, such as tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_weight_of_another_shape_than_the_config_says_is_named(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))
    with pytest.raises(
        ValueError, match=r"has a weight model\.layers\.0\.mlp\.\w+\.weight of shape .*, where its config"
    ):
        load_causal_lm(tmp_path)


def test_a_description_of_special_tokens_alone_is_no_tokenizer(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_dir / name, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no files of a tokenizer, such as tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_embeddings_does_not_match(
    tiny_llama_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
):
    model = load_causal_lm(tiny_llama_dir)
    check_tokenizer(tiny_tokenizer, model)
    model.resize_token_embeddings(60)
    with pytest.raises(ValueError, match=r"do not match.* 61 token ids.* 60 embeddings"):
        check_tokenizer(tiny_tokenizer, model)


def test_vocabularies_hash_alike_when_every_token_has_the_same_id(tiny_llama_dir: Path, tmp_path: Path):
    loaded = load_tokenizer(tiny_llama_dir)
    shutil.copytree(tiny_llama_dir, tmp_path, dirs_exist_ok=True)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    words = description["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert vocabulary_hash(loaded) == vocabulary_hash(load_tokenizer(tiny_llama_dir))
    assert vocabulary_hash(loaded) != vocabulary_hash(load_tokenizer(tmp_path))


def test_the_hash_of_weights_sees_name_dtype_shape_and_bits():
    ones = torch.ones(4)
    variants = [
        [("a", ones)],
        [("b", ones)],
        [("a", ones.double())],
        [("a", ones.reshape(2, 2))],
        [("a", torch.tensor([1.0, 1.0, 1.0, -1.0]))],
    ]
    assert len({tensors_sha256(variant) for variant in variants}) == len(variants)
    assert tensors_sha256([("a", ones)]) == tensors_sha256([("a", torch.ones(8)[::2])])


@pytest.fixture
def reward_dir(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("load", "new"),
    [
        (load_causal_lm, set()),
        (load_value_model, {"value_head.weight", "value_head.bias"}),
        (load_classifier, {"score.weight"}),
    ],
)
def test_a_model_on_meta_lacks_nothing_but_the_values_of_stored_weights(
    tiny_llama_dir: Path, load: Any, new: set[str]
):
    whole, outline = load(tiny_llama_dir, torch.bfloat16), load(tiny_llama_dir, torch.bfloat16, on_meta=True)
    described = [{n: (x.shape, x.dtype) for n, x in m.state_dict().items()} for m in (whole, outline)]
    assert described[0] == described[1]
    with_values = {name: x for name, x in outline.named_parameters() if not x.is_meta}
    assert with_values.keys() == new
    assert not any(x.any() for x in with_values.values())
    computed = dict(whole.named_buffers())
    assert computed
    assert all(torch.equal(x, computed[name]) for name, x in outline.named_buffers())
    ours, theirs = (m.backbone if isinstance(m, ValueModel) else m for m in (outline, whole))
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == theirs.name_or_path == str(tiny_llama_dir)
    assert [type(each) for each in outline.modules()] == [type(each) for each in whole.modules()]
    assert not outline.training


class Composite(PreTrainedModel):
    """A model around one of another kind, or around a module that nothing gives values to."""

    config_class = LlamaConfig

    def __init__(self, part: nn.Module):
        super().__init__(LlamaConfig())
        self.part = part


def test_buffers_are_computed_by_the_nearest_model():
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = SiglipVisionConfig(image_size=8, patch_size=4, **sizes)
    with torch.device("meta"):
        model = Composite(SiglipVisionModel(config))
    compute_buffers(model, model)
    (position_ids,) = (x for name, x in model.named_buffers() if name.endswith("position_ids"))
    assert position_ids.tolist() == [[0, 1, 2, 3]]


def test_a_buffer_that_nobody_computes_is_an_error():
    with torch.device("meta"):
        part = nn.Module()
        part.register_buffer("scale", torch.ones(3), persistent=False)
        model = Composite(part)
    with pytest.raises(ValueError, match="Composite does not compute scale of Module"):
        compute_buffers(model, model)


def test_a_model_on_meta_keeps_its_tied_weights_tied(tiny_tied_llama_dir: Path):
    model: Any = load_causal_lm(tiny_tied_llama_dir, on_meta=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_rows_score_the_same_together_as_alone(reward_dir: Path):
    rows = [[3, 4, 5], [7], [9, 10, 11, 12, 13], [8, 3]]
    model = AutoModelForSequenceClassification.from_pretrained(reward_dir)
    alone = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
    torch.testing.assert_close(SequenceScorer(reward_dir, token_budget=8).score_tokens(rows), alone)


def test_a_model_without_a_score_is_no_reward_model(tiny_llama_dir: Path):
    with pytest.raises(ValueError, match=r"lacks 1 weights of its model, the first is score\.weight"):
        SequenceScorer(tiny_llama_dir, token_budget=64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"weight score\.weight of shape \[1, \d+\]|gives 2 labels"),
        ({"pad_token_id": None}, "pad_token_id"),
    ],
)
def test_a_reward_model_that_cannot_work_is_refused(reward_dir: Path, change: dict, reason: str):
    path = reward_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason):
        SequenceScorer(reward_dir, token_budget=64)


def test_a_special_token_beyond_the_embeddings_is_refused_where_a_text_contains_it(tiny_llama_dir: Path):
    """As with Gemma 3, whose tokenizer has an image token that its text models have no embedding for."""
    model, tokenizer = load_causal_lm(tiny_llama_dir), load_tokenizer(tiny_llama_dir)
    size: int = model.config.vocab_size
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.get_vocab()["<image>"] >= size
    check_tokenizer(tokenizer, model)
    call = CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 60)
    tokenize = partial(tokenize_texts, tokenizer, call=call, max_tokens=8, vocab_size=size)
    assert tokenize(["w3"]) == [[3]]
    with pytest.raises(InvalidRequest, match=f"contains the token '<image>', whose id {size} is beyond"):
        tokenize(["w3", "w3<image>"])
    tokenizer.eos_token = "<image>"
    with pytest.raises(ValueError, match="do not match"):
        check_tokenizer(tokenizer, model)


@pytest.mark.parametrize(("cap", "attention"), [(50.0, "eager"), (None, "sdpa")])
def test_a_model_that_caps_attention_scores_has_the_attention_that_does(
    tmp_path: Path, cap: float | None, attention: str
):
    config = Gemma2Config(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, attn_logit_softcapping=cap,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    for on_meta in (False, True):
        assert load_causal_lm(tmp_path, on_meta=on_meta).config._attn_implementation == attention


def test_rows_of_a_model_with_longrope_stay_within_its_first_factors():
    factors: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    config = Phi3Config(
        **sizes,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )
    assert max_positions(config) == 16
    assert max_positions(Phi3Config(**sizes, max_position_embeddings=128)) == 128
    assert max_positions(BloomConfig()) is None


def test_a_buffer_that_a_model_computes_for_its_layers_has_its_value():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration("falcon_h1"))
    compute_buffers(model, model)
    computed = [x for name, x in model.named_buffers() if name.endswith("mup_vector")]
    expected = [
        x
        for name, x in AutoModelForCausalLM.from_config(configuration("falcon_h1")).named_buffers()
        if name.endswith("mup_vector")
    ]
    assert computed
    assert all(torch.equal(x, y) for x, y in zip(computed, expected, strict=True))


def test_a_generation_config_is_exported_as_it_is(tiny_llama_dir: Path, tmp_path: Path):
    """transformers refuses to save a temperature without do_sample, which published models have."""
    shutil.copytree(tiny_llama_dir, tmp_path / "model")
    given = {"eos_token_id": [1, 2], "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(given))
    model = load_causal_lm(tmp_path / "model")
    (out := tmp_path / "out").mkdir()
    write_model(model, model.state_dict(), out)
    write_config(model, out)
    written = json.loads((out / "generation_config.json").read_text())
    assert {key: written[key] for key in given} == given
    assert model.generation_config.temperature == 0.9
