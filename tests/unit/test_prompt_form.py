"""Prompts get a template, a system message and options of the chat template; conversations have prompts and
responses."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import datasets
import pytest
from packaging.requirements import Requirement
from transformers import AutoTokenizer

from controller.config.config import Config
from controller.data.chat import SAFE_JINJA2, Chat
from controller.data.conversations import with_turns
from controller.data.malformed import MalformedRow
from controller.data.prompts import load_data
from deploy.quickstart.build import make_tokenizer
from rlhf.errors import ConfigError

TEMPLATE = """
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}<assistant>{% if enable_thinking is defined and not enable_thinking %}[no thoughts]{% endif %}"""
SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def first_prompt(tmp_path: Path, row: dict[str, Any], **data: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    if "sources" in data:
        data["sources"] = [{"path": path, "heldout": path, **source} for source in data["sources"]]
    else:
        data |= {"train": path, "heldout": path}
    services = {"reward": {"role": "reward", "address": "127.0.0.1:7104", "function": "length"}}
    return load_data(Config.model_validate({"data": data, "services": services}))[0][0].text


def test_a_template_stands_around_a_text(tmp_path: Path) -> None:
    template = "{{Question}} {prompt} {0}\nPut the final answer after ####."
    text = first_prompt(tmp_path, {"prompt": "1+1 {prompt}?"}, template=template)
    assert text == "{{Question}} 1+1 {prompt}? {0}\nPut the final answer after ####."


def test_a_template_stands_around_the_last_message_of_the_user(tmp_path: Path, model: Path) -> None:
    row = {"prompt": [user("a"), assistant("b"), user("c"), {"role": "tool", "content": "d"}]}
    text = first_prompt(tmp_path, row, template="[{prompt}]", tokenizer=model)
    assert text == "<user>a\n<assistant>b\n<user>[c]\n<tool>d\n<assistant>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ('{0.__class__}'|attr('format'))(messages) }}",
        "{{ 'a'.__init__.__globals__ }}",
        "{{ raise_exception|attr('__globals__') }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{% for name in ['format'] %}{{ ('{0.__class__}'|attr(name))(messages) }}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_of_a_model_reaches_nothing_but_its_messages(tmp_path: Path, template: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    try:
        text = Chat(tmp_path).render([user("1+1?")])
    except ConfigError:
        return
    assert text == "", "what a sandbox refuses is undefined, and renders as nothing"


def test_a_jinja2_with_a_known_way_out_of_its_sandbox_renders_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment may have it from torch, which takes any version."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 1 + 1 }}"}))
    assert Chat(tmp_path).render([]) == "2"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"jinja2": "3.1.5"}[name])
    with pytest.raises(ConfigError, match=r"jinja2 3\.1\.5 has known ways out of its sandbox"):
        Chat(tmp_path).render([])


def test_the_extra_for_data_takes_nothing_that_runs_code_of_a_model_or_a_dataset() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {each.name: each for each in map(Requirement, project["optional-dependencies"]["data"])}
    assert not needed["jinja2"].specifier.contains("3.1.5")
    assert needed["jinja2"].specifier.contains(".".join(map(str, SAFE_JINJA2)))
    assert not needed["datasets"].specifier.contains("3.6.0"), "which runs the script of a dataset"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, "<system>Be brief.\n<user>[a]\n<assistant>"),
        ({"prompt": [user("a")]}, "<system>Be brief.\n<user>[a]\n<assistant>"),
        ({"prompt": [{"role": "system", "content": "x"}, user("a")]}, "<system>x\n<user>[a]\n<assistant>"),
    ],
    ids=["text", "conversation", "one of its own"],
)
def test_a_system_message_begins_conversations(
    row: dict[str, Any], expected: str, tmp_path: Path, model: Path
) -> None:
    form = {"system": "Be brief.", "template": "[{prompt}]", "chat": True, "tokenizer": model}
    assert first_prompt(tmp_path, row, **form) == expected


def test_a_source_may_have_a_form_of_its_own(tmp_path: Path, model: Path) -> None:
    shared = {"system": "Be brief.", "template": "[{prompt}]", "tokenizer": model}
    own = {"system": "", "template": ""}
    assert first_prompt(tmp_path, {"prompt": [user("a")]}, sources=[own], **shared) == "<user>a\n<assistant>"
    assert first_prompt(tmp_path, {"prompt": "a"}, sources=[own], **shared) == "a"
    with_both = first_prompt(tmp_path, {"prompt": [user("a")]}, sources=[{}], **shared)
    assert with_both == "<system>Be brief.\n<user>[a]\n<assistant>"


def test_options_reach_the_chat_template_as_in_transformers(tmp_path: Path, model: Path) -> None:
    options = {"enable_thinking": False}
    row = {"prompt": [user("a")]}
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        row["prompt"], tokenize=False, add_generation_prompt=True, **options
    )
    assert first_prompt(tmp_path, row, tokenizer=model, chat_options=options) == expected
    assert expected == first_prompt(tmp_path, row, tokenizer=model) + "[no thoughts]"


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"prompt": "a"},
            {"system": "x"},
            r"rows\.jsonl:1: prompt is a text, which has no place for a system",
        ),
        ({"prompt": [SYSTEM]}, {"template": "{prompt}"}, r"rows\.jsonl:1: prompt has no message of the user"),
        (
            {"prompt": [user(["a"])]},
            {"template": "{prompt}"},
            "content of the last message of the user is not a",
        ),
        ({"prompt": "a"}, {"chat_options": {"x": 1}}, r"data\.chat_options: no prompt of the data is a conv"),
        (
            {"prompt": "a"},
            {"chat": True},
            r"rows\.jsonl:1: prompt: there is no chat template.*data\.chat is true",
        ),
        (
            {"prompt": [user("a")]},
            {},
            r"no chat template.*; the prompt is a list of messages, which needs one",
        ),
    ],
    ids=str,
)
def test_a_form_that_does_not_fit_is_refused(
    row: dict[str, Any], data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        first_prompt(tmp_path, row, **data)


@pytest.mark.parametrize(
    ("row", "cause"),
    [({"prompt": "a"}, "data.chat is true"), ({"prompt": [user("a")]}, "the prompt is a list of messages")],
    ids=["text", "conversation"],
)
def test_a_model_without_a_chat_template_is_told_with_the_cause(
    row: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=rf"bare has no chat template .*\); {cause}, which needs one"):
        first_prompt(tmp_path, row, chat=True, tokenizer=tmp_path / "bare")


def test_a_model_directory_that_does_not_exist_is_told_by_its_key_and_not_as_a_fault_of_a_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    services = {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": tmp_path / "modle"}}
    data = {"train": path, "heldout": path, "chat": True}
    with pytest.raises(
        ConfigError, match=r"^services\.actor\.model: there is no directory .*modle, and prompts"
    ):
        load_data(Config.model_validate({"data": data, "services": services}))
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: there is no directory"):
        first_prompt(tmp_path, {"prompt": "a"}, chat=True, tokenizer=tmp_path / "none")
    (tmp_path / "none").mkdir()
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer: directory .*none has no tokenizer_config\.json"
    ):
        first_prompt(tmp_path, {"prompt": "a"}, chat=True, tokenizer=tmp_path / "none")


PAIR = ("chosen", "rejected")
TALK = [SYSTEM, user("a"), assistant("b"), user("c")]


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "texts"),
    [
        ({"messages": [*TALK, assistant("d")]}, ("response",), TALK, ["d"]),
        ({"prompt": "a", "messages": [user("a"), assistant("d")]}, ("response",), [user("a")], ["d"]),
        ({"response": [*TALK, assistant("d")]}, ("response",), TALK, ["d"]),
        ({"prompt": TALK, "response": [assistant("d")]}, ("response",), TALK, ["d"]),
        ({"prompt": TALK, "response": [*TALK, {"content": "d"}]}, ("response",), TALK, ["d"]),
        ({"chosen": [*TALK, assistant("d")], "rejected": [*TALK, assistant("e")]}, PAIR, TALK, ["d", "e"]),
        (
            {"prompt": "a", "chosen": [user("a"), assistant("d")], "rejected": [assistant("e")]},
            PAIR,
            "a",
            ["d", "e"],
        ),
        ({"prompt": "a", "chosen": "d", "rejected": "e"}, PAIR, "a", ["d", "e"]),
        ({"prompt": "a", "messages": [SYSTEM]}, (), "a", []),
    ],
    ids=str,
)
def test_the_last_turn_is_the_response(
    row: dict[str, Any], columns: tuple[str, ...], prompt: Any, texts: list[str]
) -> None:
    given = json.dumps(row)
    found = with_turns(row, columns)
    assert found["prompt"] == prompt
    assert [found[name] for name in columns] == texts
    assert json.dumps(row) == given


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"messages": TALK}, ("response",), "messages ends with a message of 'user'"),
        (
            {"messages": [assistant("d")]},
            ("response",),
            "and no conversations in response that begin with it",
        ),
        (
            {"response": [user("a"), assistant(None)]},
            ("response",),
            "content of the last message is not a text",
        ),
        (
            {"response": ["a"]},
            ("response",),
            "response is a list, but not one of messages with role and content: 'a'",
        ),
        (
            {"response": "d"},
            ("response",),
            "no field prompt, and no conversations in response",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            PAIR,
            "and no conversations in chosen and rejected",
        ),
        ({"prompt": "a"}, PAIR, "no field chosen, only: prompt"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, PAIR, "chosen is not a text, or empty"),
        (
            {"chosen": [user("a"), assistant("d")], "rejected": [user("b"), assistant("d")]},
            PAIR,
            "chosen and rejected differ before their last messages",
        ),
        (
            {"prompt": "a", "response": [SYSTEM, user("a"), assistant("d")]},
            ("response",),
            r"response has 2 messages before its last one that are not those of the prompt.*columns\.prompt = ",
        ),
        (
            {"prompt": TALK, "chosen": "x", "rejected": [assistant("a"), assistant("b")]},
            PAIR,
            "rejected has a message before its last one that are not those of the prompt",
        ),
    ],
    ids=str,
)
def test_turns_that_would_be_lost_are_refused(
    row: dict[str, Any], columns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(MalformedRow, match=message):
        with_turns(row, columns)


def test_the_prompt_of_a_row_can_be_left_aside(tmp_path: Path, model: Path) -> None:
    """Pairs as in UltraFeedback, from parquet, which fills the keys that a message lacks with null."""
    turns = [SYSTEM | {"name": "x"}, user("a")]
    row = {
        "prompt": "a",
        "chosen": [*turns, assistant("c")],
        "rejected": [*turns, assistant("r")],
        "score": 1,
    }
    path = tmp_path / "pairs.parquet"
    datasets.Dataset.from_list([row]).to_parquet(path)
    services = {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": model}}
    table: dict[str, object] = {"train": path, "heldout": path}
    with pytest.raises(ConfigError, match=r"pairs\.parquet, row 1: chosen has 2 messages before its last"):
        load_data(Config.model_validate({"data": table, "services": services}), PAIR)
    table["columns"] = {"prompt": ""}
    data, _ = load_data(Config.model_validate({"data": table, "services": services}), PAIR)
    assert data[0].text == "<system>Be brief.\n<user>a\n<assistant>"
    assert data[0].texts == {"chosen": "c", "rejected": "r"}
    assert json.loads(data[0].metadata) == {"score": 1}


def test_a_transcript_is_no_metadata(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"messages": [user("a"), assistant("b")], "id": 3}]))
    services = {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": model}}
    data = {"train": path, "heldout": path}
    row = load_data(Config.model_validate({"data": data, "services": services}), ("response",))[0][0]
    assert (row.text, row.texts) == ("<user>a\n<assistant>", {"response": "b"})
    assert json.loads(row.metadata) == {"id": 3}
