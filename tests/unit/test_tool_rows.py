"""Rows with tools: their schemas reach the chat template, and calls of tools are rendered and trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.prompt_source import Prompt
from controller.data.prompts import PromptData, load_data
from controller.evaluate import evaluation
from controller.plan import Plan
from controller.training.algorithm import Algorithm, UnreadOptions
from deploy.quickstart.build import make_tokenizer
from rlhf.errors import ConfigError

# As those of Qwen 2.5 and Qwen 3, with the tags by which transformers marks what the assistant says.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') + '<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>\\n' }}{% endif %}
            {%- if message.content %}{{ message.content }}{% endif %}
            {%- if message.tool_calls is defined %}
                {%- for call in message.tool_calls %}
                    {%- set call = call.function if call.function is defined else call %}
                    {{- '\\n' if message.content or not loop.first else '' }}
                    {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                    {{- call.arguments | tojson }}
                    {{- '}\\n</tool_call>' }}
                {%- endfor %}
            {%- endif %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Ends calls with a token of their own, and other messages with the EOS token of the tokenizer.
CALLING = TEMPLATE.replace(
    "{{- '<|im_end|>' }}", "{{- '<|call|>' if message.tool_calls is defined else eos_token }}"
)
# Takes arguments as a JSON text alone, as that of DeepSeek-V3.
TEXTS = TEMPLATE.replace("call.arguments | tojson", "'' + call.arguments")

Messages = list[dict[str, Any]]


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string", "description": f"the {each}"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


TOOLS = [tool("weather", "city"), tool("search", "query", "language")]
TALK = [
    {"role": "system", "content": "Be brief."},
    user("Weather in Paris?"),
    assistant(None, call("weather", city="Paris")),
    result("18 C"),
    assistant("18 C."),
    user("And who rules it?"),
    assistant("I look.", call("search", query="mayor", language="fr"), call("weather", city="Lyon")),
    result("Somebody."),
    result("20 C"),
    assistant("Somebody."),
]
ENDING_WITH_CALL = TALK[:7]


def model_in(directory: Path, template: str = TEMPLATE, eos_ids: Sequence[int] = ()) -> Path:
    """Writes a tokenizer with a token for each character."""
    tokenizer = make_tokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<|call|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [3, *eos_ids]}))
    return directory


def config_of(
    tmp_path: Path, rows: Sequence[dict[str, Any]], kind: str = "jsonl", template: str = TEMPLATE, **data: Any
) -> Config:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_in(tmp_path / "model", template, (130,))
    services = {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": model}}
    return Config.model_validate({"data": {"train": path, "heldout": path, **data}, "services": services})


def loaded(
    tmp_path: Path, rows: Sequence[dict[str, Any]], *columns: str, **more: Any
) -> tuple[Any, list[Prompt]]:
    """Tokenizer of transformers, and the rows that a run has which reads `columns`."""
    data, _ = load_data(config_of(tmp_path, rows, **more), columns)
    return AutoTokenizer.from_pretrained(tmp_path / "model"), every(data)


def every(data: PromptData) -> list[Prompt]:
    return [data[row] for row in range(len(data))]


def ids_of(tokenizer: Any, row: Prompt, column: str = "response") -> tuple[list[int], list[int]]:
    """Token ids of prompt and response, as the actor makes them."""
    end = row.texts.get("response_end", "") or tokenizer.eos_token
    response = tokenizer(row.texts[column] + end, add_special_tokens=False).input_ids
    return tokenizer(row.text).input_ids, response


def masked(tokenizer: Any, talk: Messages, tools: Any) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and which of them are trained, of one rendering by transformers."""
    whole = tokenizer.apply_chat_template(
        talk, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return whole["input_ids"], whole["assistant_masks"]


def as_json_text(talk: Messages, space: bool = True) -> Messages:
    """Messages whose tool calls have arguments as in the API of OpenAI."""
    separators = (", ", ": ") if space else (",", ":")

    def text(each: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(each["function"]["arguments"], separators=separators)
        return {"id": "1", **each, "function": {**each["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [text(each) for each in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in talk
    ]


FORMS = {
    "objects": (TALK, TOOLS, "jsonl"),
    "JSON texts": (as_json_text(TALK, space=False), json.dumps(TOOLS), "jsonl"),
    "parquet, which fills keys with null": (TALK, TOOLS, "parquet"),
    "parquet of JSON texts": (as_json_text(TALK), json.dumps(TOOLS), "parquet"),
}


@pytest.mark.parametrize(("talk", "tools", "kind"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("template", [TEMPLATE, CALLING], ids=["one end", "calls with an end of their own"])
def test_what_is_trained_of_all_turns_is_what_transformers_masks(
    talk: Messages, tools: Any, kind: str, template: str, tmp_path: Path
) -> None:
    tokenizer, rows = loaded(
        tmp_path,
        [{"messages": talk, "tools": tools}],
        "response",
        kind=kind,
        template=template,
        turns="all",
    )
    whole, mask = masked(tokenizer, TALK, TOOLS)
    trained = [0] * len(whole)
    for row in rows:
        prompt, response = ids_of(tokenizer, row)
        end = len(prompt) + len(response)
        assert prompt + response == whole[:end]
        trained[len(prompt) : end] = [1] * len(response)
    assert len(rows) == 4
    assert trained == mask


def test_arguments_of_a_call_as_a_json_text_are_those_of_the_object(tmp_path: Path) -> None:
    """As vLLM's server renders them; transformers would quote the text once more."""
    rows = [{"messages": talk, "tools": TOOLS} for talk in (TALK, as_json_text(TALK, space=False))]
    _, (first, second) = loaded(tmp_path, rows, "response")
    assert (second.text, second.texts) == (first.text, first.texts)
    assert '"arguments": {"city": "Paris"}' in first.text


def test_a_template_that_takes_arguments_as_a_text_alone_is_given_it(tmp_path: Path) -> None:
    talk = as_json_text(ENDING_WITH_CALL, space=False)
    tokenizer, (row,) = loaded(tmp_path, [{"messages": talk, "tools": TOOLS}], "response", template=TEXTS)
    prompt, response = ids_of(tokenizer, row)
    whole, _ = masked(tokenizer, talk, TOOLS)
    assert prompt + response == whole[: len(prompt) + len(response)]
    assert '"arguments": {"query":"mayor","language":"fr"}' in row.texts["response"]


@pytest.mark.parametrize("empty", ["", None, {}], ids=repr)
def test_a_call_without_arguments_has_an_empty_object(empty: Any, tmp_path: Path) -> None:
    talk = [user("a"), assistant(None, {"function": {"name": "now", "arguments": empty}})]
    _, (row,) = loaded(tmp_path, [{"messages": talk}], "response")
    assert row.texts["response"] == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_last_turn_is_trained_with_its_calls(kind: str, tmp_path: Path) -> None:
    talks = [ENDING_WITH_CALL, TALK]
    rows_of_file = [{"messages": talk, "tools": TOOLS} for talk in talks]
    tokenizer, rows = loaded(tmp_path, rows_of_file, "response", kind=kind)
    for row, talk in zip(rows, talks, strict=True):
        prompt, response = ids_of(tokenizer, row)
        whole, mask = masked(tokenizer, talk, TOOLS)
        assert prompt + response == whole[: len(prompt) + len(response)]
        assert mask[len(prompt) :] == [1] * len(response) + [0]  # a newline
    assert rows[1].texts["response"] == "Somebody."


def test_thinking_beside_the_content_is_trained(tmp_path: Path) -> None:
    talk = [user("a"), assistant("b", call("f", x="1"), reasoning_content="c")]
    tokenizer, (row,) = loaded(tmp_path, [{"messages": talk}], "response")
    whole, _ = masked(tokenizer, talk, None)
    prompt, response = ids_of(tokenizer, row)
    assert row.texts["response"].startswith("<think>c</think>\nb\n<tool_call>")
    assert [*prompt, *response, ord("\n")] == whole


def test_messages_of_weight_0_are_not_trained(tmp_path: Path) -> None:
    talk = [{**message, "weight": 0} if number in (2, 9) else message for number, message in enumerate(TALK)]
    talk[4] = {**talk[4], "weight": 1}
    rows_of_file = [{"messages": talk, "tools": TOOLS}]
    tokenizer, rows = loaded(tmp_path, rows_of_file, "response", turns="all")
    whole, _ = masked(tokenizer, TALK, TOOLS)
    assert [row.texts["response"].partition("\n")[0] for row in rows] == ["18 C.", "I look."]
    for row in rows:
        prompt, response = ids_of(tokenizer, row)
        assert prompt + response == whole[: len(prompt) + len(response)]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: messages: message 10, the last one, has weight 0"):
        loaded(tmp_path, rows_of_file, "response")


def test_the_number_of_a_turn_in_messages_of_errors_counts_those_of_weight_0(tmp_path: Path) -> None:
    talk = [user("a"), assistant("b", weight=0), user("c"), assistant("d", function_call={"name": "f"})]
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1, turn 2 of the assistant: the last message has functi"
    ):
        loaded(tmp_path, [{"messages": talk}], "response", turns="all")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pairs_are_rendered_with_tools_and_calls(kind: str, tmp_path: Path) -> None:
    prompt = TALK[:6]
    rejected = assistant("Nobody.")
    pair = {"chosen": [*prompt, TALK[6]], "rejected": [*prompt, rejected], "tools": TOOLS}
    tokenizer, (row,) = loaded(tmp_path, [pair], "chosen", "rejected", kind=kind)
    for column, message in (("chosen", TALK[6]), ("rejected", rejected)):
        begun, response = ids_of(tokenizer, row, column)
        whole, _ = masked(tokenizer, [*prompt, message], TOOLS)
        assert [*begun, *response, ord("\n")] == whole


def test_the_responses_of_a_pair_need_the_same_end(tmp_path: Path) -> None:
    prompt = TALK[:6]
    pair = {"prompt": prompt, "chosen": [TALK[6]], "rejected": [assistant("Nobody.")], "tools": TOOLS}
    with pytest.raises(
        ConfigError,
        match=r"rows\.jsonl:1: the chat template ends chosen with '<\|call\|>' and rejected with 'the EOS token'; ",
    ):
        loaded(tmp_path, [pair], "chosen", "rejected", template=CALLING)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("is_text", [True, False], ids=["texts", "lists"])
def test_prompts_are_rendered_with_the_tools_of_their_row(is_text: bool, kind: str, tmp_path: Path) -> None:
    each = [TOOLS, TOOLS[:1], None, []]
    given = [json.dumps(tools) if is_text and tools is not None else tools for tools in each]
    rows_of_file = [{"prompt": TALK[:-1], "tools": tools} for tools in given]
    options = {"tools": [tool("other", "x")]}
    tokenizer, rows = loaded(tmp_path, rows_of_file, kind=kind, chat_options=options)
    for row, tools in zip(rows, each, strict=True):
        expected = tokenizer.apply_chat_template(
            TALK[:-1],
            tools=options["tools"] if tools is None else tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert row.text == expected
    assert [("other" in row.text) for row in rows] == [False, False, True, False]


def test_a_text_that_becomes_a_conversation_has_the_tools_of_its_row(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "a", "functions": TOOLS}
    _, (prompt,) = loaded(tmp_path, [row], chat=True, columns={"tools": "functions"})
    assert '"name": "weather"' in prompt.text
    _, (prompt,) = loaded(tmp_path, [{"prompt": "a", "tools": "hammer"}])
    assert (prompt.text, json.loads(prompt.metadata)) == ("a", {"tools": "hammer"})
    _, (prompt,) = loaded(tmp_path, [{"prompt": [user("a")], "tools": ["hammer"]}], columns={"tools": ""})
    assert prompt.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_with_a_template_for_tools_renders_rows_with_tools_by_it(tmp_path: Path) -> None:
    rows = [{"prompt": [user("a")], "tools": TOOLS}, {"prompt": [user("a")], "tools": None}]
    config = config_of(tmp_path, rows)
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    data, _ = load_data(config)
    assert [row.text for row in every(data)] == [
        "with tools",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_what_environments_say_is_rendered_with_the_tools_of_the_row(tmp_path: Path) -> None:
    counting = TEMPLATE.replace(
        "_response>\\n' + message", "_response>\\n' ~ tools | length ~ ': ' + message"
    )
    chat = Chat(model_in(tmp_path / "model", counting), options={"tools": TOOLS[:1]})
    for tools, said in ((TOOLS, "2: 18 C"), (None, "1: 18 C")):
        assert chat.continuation([result("18 C")], tools) == (
            f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_calls_and_tools_that_are_null_are_none(kind: str, tmp_path: Path) -> None:
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    filled = [{**message, "tool_calls": None, "name": None, "weight": None} for message in talk]
    rows = [{"messages": filled, "tools": None}, {"messages": TALK, "tools": TOOLS}]
    refusing = (
        "{% for m in messages %}{% if 'name' in m %}{{ raise_exception('a name') }}{% endif %}{% endfor %}"
    )
    more = {"kind": kind, "turns": "all"}
    _, (first, *_) = loaded(tmp_path, rows, "response", template=refusing + TEMPLATE, **more)
    assert first.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert first.texts == {"response": "b", "response_end": "<|im_end|>"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_of_a_content_have_the_keys_that_the_file_gives_them(kind: str, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "i.png"}]
    template = (
        "{% for part in messages[0].content %}{{ '[image]' if 'image' in part else part.text }}{% endfor %}"
    )
    rows = [{"prompt": [{"role": "user", "content": parts}]}]
    _, (row,) = loaded(tmp_path, rows, kind=kind, template=template)
    assert row.text == "a[image]"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_null_in_arguments_is_that_of_the_file_and_not_that_of_a_dataset(kind: str, tmp_path: Path) -> None:
    talk = [user("a"), assistant(None, call("f", x=None, y="1"))]
    _, (row,) = loaded(tmp_path, [{"messages": talk}], "response", kind=kind)
    arguments = {"jsonl": '{"x": null, "y": "1"}', "parquet": '{"y": "1"}'}[kind]
    assert f'"arguments": {arguments}' in row.texts["response"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tools": ["weather"]},
            r"tools is not a list of JSON schemas, .*: \['weather'\]; .*columns\.tools = \"\"",
        ),
        ({"tools": r'[{"name": "\ud800"}]'}, "tools is not a list of JSON schemas"),
        (
            {"tools": "{"},
            r"tools is not a list of JSON schemas, which are objects, nor a JSON text of one: '\{'",
        ),
        (
            {"messages": [user("a"), assistant("b", tool_calls="f(1)")]},
            r"messages: tool_calls of message 2 is not a list of calls, which are objects: 'f\(1\)'",
        ),
        (
            {"messages": [user("a"), assistant(None, {"function": {"name": "f", "arguments": "1,"}})]},
            "messages: arguments of a call of message 2 are not an object, or a JSON text of one: '1,'",
        ),
        (
            {"messages": [user("a"), assistant(None, {"name": "f", "arguments": r'{"x": "\ud800"}'})]},
            "messages: arguments of a call of message 2 are not an object, or a JSON text of one: ",
        ),
        (
            {"messages": [user("a"), assistant("b", weight=0.5)]},
            r"messages: message 2: weight is 0\.5; allowed: 0, which leaves it out of the loss, and 1",
        ),
        (
            {"messages": [user("a"), assistant("b", function_call={"name": "f"})]},
            "the last message has function_call, which the chat template leaves out, so that it would not",
        ),
        (
            {"messages": None, "prompt": "a", "response": [assistant("b", call("f", x="1"))]},
            "the last message has tool_calls, which the chat template renders, and the prompt is a text; ",
        ),
    ],
    ids=[
        "names of tools",
        "half a character in tools",
        "no JSON",
        "calls",
        "arguments",
        "half a character in arguments",
        "weight",
        "left out",
        "prompt is a text",
    ],
)
def test_a_malformed_row_is_told_in_one_line(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = [{"messages": TALK, "tools": TOOLS}, {"messages": TALK, **row}]
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: {message}") as told:
        loaded(tmp_path, rows, "response")
    assert "\n" not in str(told.value)


def test_a_transcript_of_weight_0_has_nothing_to_train(tmp_path: Path) -> None:
    talk = [user("a"), assistant("b", weight=0)]
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: messages has no message of the assistant to train: each"
    ):
        loaded(tmp_path, [{"messages": talk}], "response", turns="all")
    begins = [assistant("a", weight=0), user("b"), assistant("c")]
    _, (row,) = loaded(tmp_path, [{"messages": begins}], "response", turns="all")
    assert row.texts["response"] == "c"


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_dataset_may_mix_transcripts_with_prompts_and_responses(turns: str, tmp_path: Path) -> None:
    rows_of_file = [
        {"messages": [user("a"), assistant("b")], "prompt": None, "response": None},
        {"messages": None, "prompt": "c", "response": "d"},
    ]
    _, rows = loaded(tmp_path, rows_of_file, "response", kind="parquet", turns=turns)
    assert [row.texts["response"] for row in rows] == ["b", "d"]
    assert [row.text[-2:] for row in rows] == ["t\n", "c"]


@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_last_message_without_role_is_of_the_assistant(turns: str, tmp_path: Path) -> None:
    talk = [user("a"), assistant("b"), user("c"), {"content": "d"}]
    calls = [*talk[:3], {"tool_calls": [call("f")]}]
    _, rows = loaded(tmp_path, [{"messages": talk}, {"messages": calls}], "response", turns=turns)
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    said = [row.texts["response"] for row in rows]
    assert said == (["d", called] if turns == "last" else ["b", "d", "b", called])


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": TALK}, TALK[:-1]),
        ({"messages": TALK[:-1]}, TALK[:-1]),
        ({"response": TALK}, TALK[:-1]),
        ({"chosen": TALK, "rejected": [*TALK[:-1], assistant("c")]}, TALK[:-1]),
    ],
    ids=["messages", "messages that end with a result", "response", "pair"],
)
def test_rows_that_sft_and_dpo_learn_have_prompts_to_generate_from(
    row: dict[str, Any], prompt: Messages, tmp_path: Path
) -> None:
    """As `rlhf-controller evaluate` does, with the config of such a run."""
    config = config_of(tmp_path, [{**row, "tools": TOOLS, "id": 3}])
    data, _ = Plan.of(Algorithm(evaluation, options=UnreadOptions), config).data
    expected = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(
        prompt, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert data[0].text == expected
    assert json.loads(data[0].metadata)["id"] == 3
    assert "messages" not in json.loads(data[0].metadata)


def test_a_message_of_the_assistant_alone_is_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: no field prompt, and messages has no message before "
    ):
        loaded(tmp_path, [{"messages": [assistant("b")]}])
