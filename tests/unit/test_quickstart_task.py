"""The quickstart task: reproducible, honest about its held-out sums, and loadable like any other model."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from controller import quickstart as controller_quickstart
from deploy.quickstart import Recipe, is_complete
from deploy.quickstart import build as quickstart
from rlhf.errors import ConfigError

FAST = Recipe(max_steps=3)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart") / "task"
    quickstart.build(directory, FAST)
    return directory


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(built / "model")


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def operands(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in row["prompt"].removesuffix("=").split("+"))


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_recipe_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    quickstart.build(tmp_path / "again", FAST)
    assert digests(tmp_path / "again") == digests(built)


def test_another_seed_gives_another_model_and_other_held_out_sums(built: Path, tmp_path: Path) -> None:
    quickstart.build(tmp_path / "other", Recipe(seed=1, max_steps=3))
    other, same = digests(tmp_path / "other"), digests(built)
    assert other["model/model.safetensors"] != same["model/model.safetensors"]
    assert other["heldout.jsonl"] != same["heldout.jsonl"]


def test_a_build_leaves_the_global_generator_and_thread_count_alone(tmp_path: Path) -> None:
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    quickstart.build(tmp_path / "task", Recipe(max_steps=1, threads=num_threads + 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


def test_held_out_sums_are_never_trained_on_in_either_order(built: Path) -> None:
    train = {frozenset(operands(row)) for row in read_rows(built / "train.jsonl")}
    heldout = {frozenset(operands(row)) for row in read_rows(built / "heldout.jsonl")}
    assert not train & heldout


def test_the_rows_are_all_sums_once_each_with_their_right_answers(built: Path) -> None:
    train, heldout = read_rows(built / "train.jsonl"), read_rows(built / "heldout.jsonl")
    assert len(heldout) == 512
    assert {operands(row) for row in train + heldout} == set(itertools.product(range(1, 100), repeat=2))
    assert len(train + heldout) == 99 * 99
    assert all(int(row["ground_truth"]) == sum(operands(row)) for row in train + heldout)
    assert {row["data_source"] for row in train + heldout} == {"arithmetic"}


@given(text=st.text(st.characters(max_codepoint=127)))
def test_ascii_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.encode(text) == [ord(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_can_be_skipped(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.encode("1 + 2"), tokenizer.eos_token_id]
    assert len(tokenizer.all_special_ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1 + 2"


def test_other_characters_become_the_unknown_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("1é2") == [ord("1"), tokenizer.unk_token_id, ord("2")]


def test_the_model_is_a_float32_llama_that_ends_at_the_tokenizers_eos(
    built: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(built / "model")
    config = model.config
    assert (config.num_hidden_layers, config.head_dim) == (4, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    assert config.vocab_size == len(tokenizer) == 128
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_manifest_reports_what_greedy_generation_of_the_saved_model_scores(tmp_path: Path) -> None:
    task = tmp_path / "task"
    quickstart.build(task, Recipe(max_steps=150))
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(task / "model")
    rows = read_rows(task / "heldout.jsonl")
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    generated = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    answers = tokenizer.batch_decode(generated[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    num_right = sum(answer == row["ground_truth"] for answer, row in zip(answers, rows, strict=True))
    manifest = json.loads((task / "quickstart.json").read_text())
    assert num_right > 0
    assert manifest["accuracy"] == pytest.approx(num_right / len(rows), abs=1.5 / len(rows))
    assert manifest["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_an_answer_is_exact_only_if_every_digit_and_the_eos_are() -> None:
    ignored = quickstart.IGNORED_LABEL
    labels = torch.tensor([[ignored, ignored, 5, 3]]).repeat(4, 1)
    predicted = torch.tensor([[9, 5, 3, 0], [9, 6, 3, 0], [9, 5, 4, 0], [1, 5, 3, 7]])
    logits = torch.nn.functional.one_hot(predicted, 10).float()
    assert quickstart.exact_answers(logits, labels).tolist() == [True, False, False, True]


def test_supervised_training_stops_at_the_target_accuracy(tmp_path: Path) -> None:
    task = tmp_path / "task"
    quickstart.build(task, Recipe(target_accuracy=0.0, max_steps=1000))
    manifest = json.loads((task / "quickstart.json").read_text())
    assert manifest["supervised_steps"] == quickstart.RECENT_STEPS


def test_an_interrupted_build_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quickstart, "accuracy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quickstart.build(tmp_path / "task", FAST)
    assert list(tmp_path.iterdir()) == []
    quickstart.build(tmp_path / "task", FAST)
    assert is_complete(tmp_path / "task", FAST)


def test_a_finished_build_is_left_alone(built: Path) -> None:
    before = (built / "model" / "model.safetensors").stat()
    quickstart.build(built, FAST)
    after = (built / "model" / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_build_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    quickstart.build(tmp_path / "task", FAST)
    other = Recipe(seed=1, max_steps=3)
    assert not is_complete(tmp_path / "task", other)
    quickstart.build(tmp_path / "task", other)
    assert is_complete(tmp_path / "task", other)


def test_a_directory_that_is_not_a_build_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(click.ClickException, match="not a quickstart build"):
        quickstart.build(tmp_path, FAST)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_command_line_builds_the_recipe_it_was_given(tmp_path: Path) -> None:
    options = f"--out {tmp_path}/task --seed 7 --max-steps 2 --target-accuracy 0.5"
    result = CliRunner().invoke(quickstart.main, options.split())
    assert result.exit_code == 0, result.output
    assert is_complete(tmp_path / "task", Recipe(seed=7, max_steps=2, target_accuracy=0.5))


def test_a_build_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = controller_quickstart.load_quickstart(
        settings=(f"data.train='{tmp_path / 'task' / 'train.jsonl'}'",)
    )
    monkeypatch.setattr(controller_quickstart, "BUILD_S", 0.01)
    with pytest.raises(ConfigError, match=r"was not built within 0\.01 s"):
        controller_quickstart.build_quickstart(config)
    assert not (tmp_path / "task" / "train.jsonl").exists()


def test_a_teacher_is_built_with_the_same_sums_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "TEACHER", Recipe(max_steps=2, batch_size=3))
    result = CliRunner().invoke(
        quickstart.main, f"--out {tmp_path}/task --seed 7 --max-steps 2 --teacher".split()
    )
    assert result.exit_code == 0, result.output
    task, teacher = tmp_path / "task", tmp_path / "task" / "teacher"
    assert is_complete(teacher, Recipe(seed=7, max_steps=2, batch_size=3))
    student_files, teacher_files = digests(task), digests(teacher)
    assert teacher_files["heldout.jsonl"] == student_files["heldout.jsonl"]
    assert teacher_files["model/model.safetensors"] != student_files["model/model.safetensors"]


@pytest.mark.parametrize(("name", "is_built"), [("distill", True), ("quickstart", False)])
def test_a_teacher_is_built_where_a_service_has_its_model(
    name: str, is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> None:
        commands.append(command)
        raise OSError("not here")

    monkeypatch.setattr(controller_quickstart.subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="not here"):
        controller_quickstart.build_quickstart(controller_quickstart.load_quickstart(name))
    assert ("--teacher" in commands[0]) == is_built
