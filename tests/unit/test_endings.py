"""Responses that are learned end as the chat template ends messages, and a run says at its start where that token does
not end responses."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner
from tokenizers import processors
from transformers import AutoTokenizer

from controller.algorithms import as_algorithm
from controller.checkpoints.facts import check_response_end
from controller.cli import main
from controller.config.config import Config
from controller.data.endings import messages_without_end
from controller.data.length_lines import responses_cut
from controller.data.prompts import load_data
from controller.identity import Identity
from controller.plan import Plan
from controller.restoring import Restorer
from controller.role_groups.dataflow import FutureBatch
from controller.training.columns import texts_of
from deploy.quickstart.build import BOS, EOS, UNK, make_tokenizer
from rlhf.errors import ConfigError
from rlhf.v1 import common_pb2
from services.models.tokenizers import adds_bos, adds_eos
from services.roles.language_worker import LanguageWorker
from services.roles.tokenization import tokenize_texts
from services.runtime.worker import CallContext

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}END\n{% endfor %}<assistant>"
)
LINE = (
    "services.actor.model: the chat template ends a message of the assistant with '\\x1a', which is no EOS token of "
    "the model, so responses go on after it; add its id, 26, to eos_token_id in "
)


def tables(tmp_path: Path, end: str, chat: bool = True, **configs: Any) -> dict[str, Any]:
    """A config with a model whose template ends messages with `end`; `configs` are the contents of its config.json
    (`config`) and generation_config.json (`generation_config`)."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("END", end)
    tokenizer.save_pretrained(model)
    for name, content in {"config": {}, **configs}.items():
        (model / f"{name}.json").write_text(json.dumps(content))
    rows.write_text('{"prompt": "a", "ground_truth": "b"}\n')
    return {
        "data": {"train": str(rows), "heldout": str(rows), "chat": chat},
        "rollout": {"samples_per_prompt": 2},
        "algorithm": {"mini_batch_size": 256, "kl_loss_coefficient": 0},
        "services": {
            "actor": {"role": "actor", "address": "127.0.0.1:7101", "model": str(model)},
            "reward": {"role": "reward", "address": "127.0.0.1:7102", "function": "length"},
        },
    }


def lines(given: dict[str, Any], columns: tuple[str, ...] = ()) -> list[str]:
    config = Config.model_validate(given)
    return list(messages_without_end(config, load_data(config, columns), columns))


def batch_of(given: dict[str, Any], rows: list[dict[str, Any]], *columns: str) -> FutureBatch:
    """The rows of a run with this config that reads `columns`."""
    Path(given["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, _ = load_data(Config.model_validate(given), columns)
    return data.batch(range(len(rows)))


@pytest.mark.parametrize(
    ("end", "configs"),
    [
        (EOS, {}),
        (UNK, {"generation_config": {"eos_token_id": [3, 26]}}),
        (UNK, {"config": {"eos_token_id": 26}}),
        (UNK + EOS, {}),
        ("[end]", {}),
    ],
    ids=["the tokenizer's", "one of several", "the model's", "the second of two", "no special token"],
)
def test_a_message_that_ends_with_an_eos_token_is_not_told(
    end: str, configs: dict[str, Any], tmp_path: Path
) -> None:
    assert lines(tables(tmp_path, end, **configs)) == []


@pytest.mark.parametrize(
    "configs", [{}, {"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 26}}]
)
def test_a_message_that_ends_with_another_token_is_told_with_what_to_do(
    configs: dict[str, Any], tmp_path: Path
) -> None:
    given = tables(tmp_path, UNK, **configs)
    line = f"{LINE}{tmp_path / 'model' / 'generation_config.json'}, or to rollout.stop_token_ids"
    assert lines(given) == [line]
    given["rollout"]["stop_token_ids"] = [26]
    assert lines(given) == []


def test_prompts_that_are_texts_have_no_messages_to_end(tmp_path: Path) -> None:
    assert lines(tables(tmp_path, UNK, chat=False)) == []


def test_a_dry_run_warns_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables(tmp_path, UNK)))
    ran = CliRunner().invoke(main, ["--algo", "grpo", "--config", str(tmp_path / "run.toml"), "--dry-run"])
    assert f"warning: {LINE}" in ran.stderr, ran.output


TURNS = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("end", "eos_ids", "expected"),
    [
        (UNK, [3], UNK),
        (UNK, [26, 3], UNK),
        (f" {EOS}", [3], f" {EOS}"),
        (UNK + EOS, [3], UNK + EOS),
        (UNK + EOS, [26, 3], UNK),
    ],
    ids=["another token", "another EOS token", "a space before it", "EOS after it", "the first EOS token"],
)
def test_what_is_learned_of_a_conversation_ends_as_the_template_ends_it(
    end: str, eos_ids: list[int], expected: str, tmp_path: Path
) -> None:
    given = tables(tmp_path, end, generation_config={"eos_token_id": eos_ids})
    batch = batch_of(given, [{"messages": TURNS}, {"messages": TURNS}], "response")
    prompts, responses, ends = (texts_of(batch, name) for name in ("prompt", "response", "response_end"))
    assert (responses, ends) == (["4"] * 2, [expected] * 2)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    worker: Any = SimpleNamespace(
        tokenized=lambda texts, call, **options: tokenizer(texts, **options)["input_ids"],
        eos_id=tokenizer.eos_token_id,
    )
    ids = LanguageWorker.response_ids(worker, responses, ends, worker)
    whole = tokenizer(tokenizer.apply_chat_template(TURNS, tokenize=False))["input_ids"]
    learned = tokenizer(prompts[0])["input_ids"] + ids[0]
    assert learned == whole[: len(learned)]
    assert ids[0][-1] in (3, 26)


@pytest.mark.parametrize(
    ("single", "begins"),
    [(f"{BOS} $A", True), (f"{BOS} $A {EOS}", True), (f"$A {EOS}", False), ("$A", False)],
)
def test_prompts_have_one_token_that_begins_them_and_none_that_ends_them(single: str, begins: bool) -> None:
    tokenizer = make_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=special
    )
    assert (adds_bos(tokenizer), adds_eos(tokenizer)) == (begins, EOS in single)
    call = CallContext(common_pb2.Call(call_id="c"), time.monotonic() + 60)
    tokenized = partial(tokenize_texts, tokenizer, max_tokens=8)
    worker: Any = SimpleNamespace(tokenized=tokenized, _adds_eos=adds_eos(tokenizer))
    ids = LanguageWorker.prompt_ids(worker, ["ab", f"{BOS}ab", f"a{EOS}"], call)
    own, texts = [tokenizer.bos_token_id] * begins, list(map(ord, "ab"))
    assert ids == [
        [*own, *texts],
        [tokenizer.bos_token_id, *texts],
        [*own, ord("a"), tokenizer.eos_token_id],
    ]
    # Also texts of data.pretrain, and what a reward model reads.
    assert tokenized([f"{BOS}ab"], call) == [ids[1] + [tokenizer.eos_token_id] * (EOS in single)]
    assert tokenized([f"{BOS}ab"], call, add_special_tokens=False) == [ids[1]]


def test_a_stop_token_is_an_end_that_is_learned(tmp_path: Path) -> None:
    given = tables(tmp_path, UNK + EOS, generation_config={"eos_token_id": [3]})
    given["rollout"]["stop_token_ids"] = [26]
    assert texts_of(batch_of(given, [{"messages": TURNS}], "response"), "response_end") == [UNK]


@pytest.mark.parametrize("end", [EOS, f"{EOS}{UNK}", "[end]"], ids=["EOS", "EOS before another", "no token"])
def test_what_ends_with_the_eos_token_has_no_end_of_its_own(end: str, tmp_path: Path) -> None:
    assert "response_end" not in batch_of(tables(tmp_path, end), [{"messages": TURNS}], "response")


def test_a_response_to_a_text_ends_with_the_eos_token(tmp_path: Path) -> None:
    given = tables(tmp_path, UNK, chat=False)
    pair = {"chosen": "4", "rejected": "5"}
    prompts = [{"prompt": "2+2=", **pair}, {"prompt": TURNS[:1], **pair}]
    assert texts_of(batch_of(given, prompts, "chosen", "rejected"), "response_end") == ["", UNK]
    batches = [batch_of(given, [prompt], "chosen", "rejected") for prompt in prompts]
    assert texts_of(FutureBatch.concat(batches), "response_end") == ["", UNK]
    assert "response_end" not in batch_of(given, prompts)


def test_a_tokenizer_without_a_model_ends_responses_by_its_template(tmp_path: Path) -> None:
    given = tables(tmp_path, UNK)
    (tmp_path / "model" / "config.json").unlink()
    assert texts_of(batch_of(given, [{"messages": TURNS}], "response"), "response_end") == [UNK]


def test_a_model_that_learns_an_end_that_is_no_eos_token_is_told(tmp_path: Path) -> None:
    given = tables(tmp_path, UNK)
    Path(given["data"]["train"]).write_text(json.dumps({"messages": TURNS}))
    model = given["services"]["actor"]["model"]
    given["services"]["actor"]["rollout_engine"] = "none"
    given["services"]["rollout"] = {"role": "rollout", "address": "127.0.0.1:7103", "model": model}
    told = lines(given, ("response",))
    assert [line.startswith(LINE) for line in told] == [True, False]
    given["rollout"]["stop_token_ids"] = [26]  # which ends no response of the model elsewhere
    assert lines(given, ("response",)) == told
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [3, 26]}')
    assert lines(given, ("response",)) == []


@pytest.mark.parametrize("columns", [("response",), ()])
def test_an_end_that_cannot_be_found_is_told_where_it_is_learned(
    columns: tuple[str, ...], tmp_path: Path
) -> None:
    given = tables(tmp_path, UNK)
    Path(given["data"]["train"]).write_text(
        json.dumps({"messages": TURNS, "prompt": TURNS[:1], "response": "4"})
    )
    given["data"]["heldout"] = given["data"]["train"]
    model = tmp_path / "model"
    (model / "tokenizer.json").unlink()
    table = json.loads((model / "tokenizer_config.json").read_text())
    table.pop("bos_token")  # with one, prompts cannot be rendered without tokenizer.json
    (model / "tokenizer_config.json").write_text(json.dumps(table))
    line = (
        "responses to conversations end with the EOS token of the tokenizer, also where the chat template ends a "
        f"message of the assistant otherwise, which cannot be found out: {model} has no tokenizer.json, by which "
        "tokens are counted"
    )
    assert lines(given, columns) == ([line] if columns else [])


class TestResume:
    """A run with a tokenizer of its own, whose template ends messages with two tokens: generation_config.json alone
    says which of them end responses."""

    def plan(self, directory: Path, eos_ids: list[int], chat: bool = True) -> Plan:
        directory.mkdir()
        tables(directory, UNK + EOS, generation_config={"eos_token_id": eos_ids})
        (directory / "model").rename(directory / "tokenizer")
        given = tables(directory, UNK + EOS, chat)
        Path(given["data"]["train"]).write_text('{"prompt": "2+2=", "response": "4"}')
        given["data"]["tokenizer"] = str(directory / "tokenizer")
        config = Config.model_validate(given)
        data = load_data(config, ("response",))
        return Plan(as_algorithm("sft"), config, data, None, Identity("sft", "", "", "", 0, 1))

    def test_a_run_that_would_learn_another_end_is_refused(self, tmp_path: Path) -> None:
        before, now = self.plan(tmp_path / "before", [3]), self.plan(tmp_path / "now", [26, 3])
        assert before.contents == now.contents
        facts = {"response_end": before.response_end}
        check_response_end(facts, before.response_end)
        said = f"ended with {UNK + EOS!r} when the checkpoint was written and end with {UNK!r} now"
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_response_end(facts, now.response_end)

    def test_a_run_that_learns_no_responses_to_conversations_has_no_end(self, tmp_path: Path) -> None:
        assert self.plan(tmp_path / "texts", [3], chat=False).response_end is None
        plan = self.plan(tmp_path / "prompts", [3])
        assert replace(plan, algorithm=as_algorithm("grpo")).response_end is None

    def test_a_checkpoint_that_does_not_say_how_responses_ended_is_told(self, tmp_path: Path) -> None:
        end = self.plan(tmp_path / "run", [3]).response_end
        check_response_end({}, end)
        told = []
        for facts in ({}, {"response_end": end}):
            plan: Any = SimpleNamespace(
                resumes=SimpleNamespace(facts=facts),
                identity=SimpleNamespace(resumed=[{}]),
                response_end=end,
            )
            told.append(Restorer(plan, ["actor"], dict).changes())
        ((line,), nothing) = told
        assert line.startswith(
            f"responses to conversations end with {end!r} from here on; the checkpoint does"
        )
        assert nothing == []


def test_the_end_of_a_response_counts_among_its_tokens_with_all_of_its_own(tmp_path: Path) -> None:
    given = tables(tmp_path, f" {EOS}")
    Path(given["data"]["train"]).write_text(json.dumps({"messages": TURNS, "ground_truth": "4"}))
    given["rollout"]["max_response_tokens"] = 2
    config = Config.model_validate(given)
    line = responses_cut(config, load_data(config, ("response",)), ("response",))
    assert "1 of 1 training rows looked at, 1 of 1 held-out ones; the longest has 3 tokens" in line
