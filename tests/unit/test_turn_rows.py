"""Each turn of the assistant in a transcript is a row to train on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from controller.algorithms import find_algorithm
from controller.checkpoints.facts import check_config
from controller.config.config import Config
from controller.data.prompt_source import Prompt
from controller.data.prompts import PromptData, load_data
from controller.evaluate import evaluation
from controller.training.algorithm import Algorithm, UnreadOptions
from deploy.quickstart.build import make_tokenizer
from rlhf.errors import ConfigError

END = "<|im_end|>"
CHATML = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ CONTENT }}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("CONTENT", "message.content or ''")
# As that of Qwen3, which shows the model no thinking before the last message of the user.
THINKING = CHATML.replace(
    "CONTENT", "message.content if loop.last else message.content.split('</think>')[-1].lstrip()"
)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any) -> dict[str, Any]:
    return said("user", content)


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return said("assistant", content, **more)


TALK = [said("system", "Be brief."), user("a"), assistant("b"), user("c"), said("tool", "d"), assistant("e")]
IN_A_ROW = [user("a"), assistant("b"), assistant("c"), said("tool", "d"), assistant("e"), user("f")]


def model_in(directory: Path, template: str = PLAIN) -> Path:
    """Writes a tokenizer with a token for each character, whose template ends messages with another token than its
    EOS token."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def config_of(
    tmp_path: Path, rows: Sequence[dict[str, Any]], template: str = PLAIN, **data: Any
) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_in(tmp_path / "model", template)
    held = {} if {"heldout_rows", "sources"} & data.keys() else {"heldout": path}
    train = {} if "sources" in data else {"train": path}
    return {
        "data": {**train, **held, "turns": "all", **data},
        "algorithm": {"mini_batch_size": 128},
        "services": {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": model}},
    }


def loaded(given: dict[str, Any]) -> tuple[PromptData, PromptData]:
    return load_data(Config.model_validate(given), ("response",))


def every(data: PromptData) -> list[Prompt]:
    return [data[row] for row in range(len(data))]


def texts(data: PromptData) -> list[tuple[str, str]]:
    return [(row.text, row.texts["response"]) for row in every(data)]


@pytest.mark.parametrize("talk", [TALK, IN_A_ROW, TALK[:3]], ids=["system and tool", "in a row", "one turn"])
def test_the_tokens_to_train_are_those_of_the_assistant_in_the_whole_transcript(
    talk: list[dict[str, Any]], tmp_path: Path
) -> None:
    """By the mask of transformers, from one rendering of all messages."""
    data, _ = loaded(config_of(tmp_path, [{"messages": talk}]))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    whole = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    trained = [0] * len(whole["input_ids"])
    for row in every(data):
        prompt = tokenizer(row.text)["input_ids"]
        response = tokenizer(
            row.texts["response"] + row.texts["response_end"], add_special_tokens=False
        ).input_ids
        end = len(prompt) + len(response)
        assert prompt + response == whole["input_ids"][:end]
        assert not any(trained[len(prompt) : end])
        trained[len(prompt) : end] = [1] * len(response)
    assert trained == whole["assistant_masks"]


def test_a_template_that_drops_earlier_thinking_drops_it_from_prompts_alone(tmp_path: Path) -> None:
    talk = [user("a"), assistant("<think>b</think>\n\nc"), user("d"), assistant("<think>e</think>\n\nf")]
    data, _ = loaded(config_of(tmp_path, [{"messages": talk}], THINKING))
    first, second = every(data)
    assert [row.texts for row in (first, second)] == [
        {"response": f"<think>{thought}</think>\n\n{answer}", "response_end": END}
        for thought, answer in ("bc", "ef")
    ]
    start = f"<|im_start|>user\na{END}\n<|im_start|>assistant\n"
    assert first.text == start
    assert second.text == f"{start}c{END}\n<|im_start|>user\nd{END}\n<|im_start|>assistant\n"


def test_other_fields_go_with_each_turn_and_the_transcript_does_not(tmp_path: Path) -> None:
    data, _ = loaded(config_of(tmp_path, [{"messages": TALK, "id": 3}], template=PLAIN))
    assert [json.loads(row.metadata) for row in every(data)] == [{"id": 3}] * 2


ROWS: list[dict[str, Any]] = [
    {"messages": TALK},
    {"prompt": "x", "response": "y"},
    {"prompt": [*TALK[:4]], "response": [assistant("z")]},
    {"messages": IN_A_ROW},
]


def test_rows_with_a_prompt_and_a_response_stay_one(tmp_path: Path) -> None:
    data, _ = loaded(config_of(tmp_path, ROWS))
    assert [answer for _, answer in texts(data)] == ["b", "e", "y", "z", "b", "c", "e"]
    assert [data.where(row).partition(".jsonl:")[2] for row in range(len(data))] == [
        "1, turn 1 of the assistant",
        "1, turn 2 of the assistant",
        "2",
        "3",
        *(f"4, turn {turn} of the assistant" for turn in (1, 2, 3)),
    ]


def test_the_last_turn_alone_is_the_default(tmp_path: Path) -> None:
    given = config_of(tmp_path, ROWS[:3])
    del given["data"]["turns"]
    data, _ = loaded(given)
    assert [answer for _, answer in texts(data)] == ["e", "y", "z"]
    last = loaded({**given, "data": {**given["data"], "turns": "last"}})[0]
    assert every(last) == every(data)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("field", "columns"),
    [
        ("talk", {"messages": "talk"}),
        ("talk", {"response": "talk"}),
        ("messages", {"response": "messages"}),
        ("response", {"prompt": ""}),
        ("response", {"messages": "response", "response": ""}),
    ],
    ids=str,
)
def test_a_transcript_may_be_in_any_field(
    field: str, columns: dict[str, str], kind: str, tmp_path: Path
) -> None:
    rows = [{field: talk, "prompt": "not this"} for talk in (TALK, IN_A_ROW)]
    hidden = {"prompt": ""} if "response" in columns else {}
    given = config_of(tmp_path, rows, columns={**hidden, **columns})
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        given["data"]["train"] = tmp_path / "rows.parquet"
    data, _ = loaded(given)
    assert [answer for _, answer in texts(data)] == ["b", "e", "b", "c", "e"]


def test_a_field_that_is_renamed_away_is_no_response(tmp_path: Path) -> None:
    row = {"messages": TALK, "response": "x"}
    data, _ = loaded(config_of(tmp_path, [row], columns={"ground_truth": "response"}))
    assert [
        (answer, row.ground_truth) for (_, answer), row in zip(texts(data), every(data), strict=True)
    ] == [
        ("b", "x"),
        ("e", "x"),
    ]


def test_no_turn_of_a_held_out_transcript_is_trained(tmp_path: Path) -> None:
    rows = [
        {"messages": [each for turn in range(1 + i % 4) for each in (user(f"{i}"), assistant(f"{i},{turn}"))]}
        for i in range(40)
    ]
    given = config_of(tmp_path, rows, heldout_rows=15)
    parts = [[answer for _, answer in texts(part)] for part in loaded(given)]
    talks = [{answer.partition(",")[0] for answer in part} for part in parts]
    assert [len(each) for each in talks] == [25, 15]
    assert not talks[0] & talks[1]
    assert sorted(parts[0] + parts[1]) == sorted(
        f"{i},{turn}" for i in range(40) for turn in range(1 + i % 4)
    )
    last = {**given, "data": {**given["data"], "turns": "last"}}
    assert [{answer.partition(",")[0] for _, answer in texts(part)} for part in loaded(last)] == talks


def test_sources_count_turns(tmp_path: Path) -> None:
    for name, rows in (("pairs", ROWS[1:2] * 3), ("talks", [ROWS[0], ROWS[3]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": path, "heldout": path} for path in sorted(tmp_path.glob("*.jsonl"))]
    train, _ = loaded(config_of(tmp_path, [], sources=sources))
    assert train.sizes == (3, 5)


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ([user("a")], r"rows\.jsonl:2: messages has no message whose role is 'assistant'$"),
        ([{"from": "gpt", "value": "a"}], "has no message whose role is 'assistant'"),
        ([assistant("a"), *TALK], r"rows\.jsonl:2: messages begins with a message of the assistant"),
        (
            [user("a"), assistant("b", reasoning_content="c"), user("d"), assistant("e")],
            r"rows\.jsonl:2, turn 1 of the assistant: the last message has reasoning_content, which the chat template "
            "leaves out, so that it would not be trained; write it into the content",
        ),
        (
            [user("a"), assistant("b"), user("c"), assistant("")],
            r"rows\.jsonl:2, turn 2 of the assistant: messages: content of the last message is not a text, or empty",
        ),
    ],
    ids=["none", "ShareGPT", "first", "reasoning", "empty"],
)
def test_a_transcript_of_which_a_turn_cannot_be_trained_is_refused(
    talk: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(config_of(tmp_path, [{"messages": TALK}, {"messages": talk}]))


def test_calls_of_tools_that_are_null_or_empty_are_none(tmp_path: Path) -> None:
    talk = [user("a"), assistant("b", tool_calls=None), user("c"), assistant("d", tool_calls=[])]
    assert len(loaded(config_of(tmp_path, [{"messages": talk}]))[0]) == 2


def test_a_template_that_refuses_the_prompt_of_a_turn_is_named_with_the_turn(tmp_path: Path) -> None:
    strict = (
        "{%- for message in messages %}"
        "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{%- endfor %}" + PLAIN
    )
    with pytest.raises(
        ConfigError, match=r":1, turn 3 of the assistant: prompt: .*refuses it: roles must alt"
    ):
        loaded(config_of(tmp_path, [{"messages": IN_A_ROW}], strict))


def test_rows_without_a_transcript_have_no_further_turns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.turns: no row of the data is a transcript"):
        loaded(config_of(tmp_path, ROWS[1:3]))


@pytest.mark.parametrize("name", ["grpo", "distill"])
def test_an_algorithm_that_learns_no_responses_of_the_data_refuses_it(name: str, tmp_path: Path) -> None:
    given = config_of(tmp_path, ROWS)
    given["services"] |= {
        "reference": {"role": "reference", "address": "127.0.0.1:7103", "model": tmp_path / "teacher"},
        "reward": {"role": "reward", "address": "127.0.0.1:7102", "function": "length"},
    }
    given["rollout"] = {"samples_per_prompt": 2}
    with pytest.raises(ConfigError, match=rf"data\.turns: {name} learns no responses of the data"):
        find_algorithm(name).configure(Config.model_validate(given))
    given["data"]["turns"] = "last"
    find_algorithm(name).configure(Config.model_validate(given))


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_pairs_have_one_turn_to_compare(name: str, tmp_path: Path) -> None:
    given = config_of(tmp_path, ROWS)
    given["services"] |= {
        "reference": {"role": "reference", "address": "127.0.0.1:7103", "model": tmp_path / "model"},
        "reward": {
            "role": "reward",
            "address": "127.0.0.1:7102",
            "kind": "model",
            "model": tmp_path / "model",
            "optimizer": {"learning_rate": 1e-3},
        },
    }
    with pytest.raises(ConfigError, match=rf"data\.turns: {name} learns no responses of the data"):
        find_algorithm(name).configure(Config.model_validate(given))


def test_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    given = config_of(tmp_path, ROWS)
    sft = find_algorithm("sft")
    before = sft.resolved(sft.configure(Config.model_validate(given)))
    given["data"]["turns"] = "last"
    with pytest.raises(ConfigError, match=r'data\.turns was "all" when the checkpoint was written'):
        check_config(before, sft.resolved(sft.configure(Config.model_validate(given))), elsewhere=False)


def test_an_evaluation_accepts_the_config_of_a_run_that_trained_all_turns(tmp_path: Path) -> None:
    config = Config.model_validate(config_of(tmp_path, ROWS))
    assert Algorithm(evaluation, options=UnreadOptions).configure(config).data.turns == "all"
