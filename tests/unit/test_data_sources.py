"""Rows from every kind of file, of verl's form, in chat templates, and bounded in length."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from google.protobuf import json_format, struct_pb2
from tokenizers import processors
from transformers import AutoTokenizer

from controller.algorithms import find_algorithm
from controller.algorithms.safe_rlhf import SafeRLHFOptions
from controller.config.config import Config, load
from controller.data.chat import Chat
from controller.data.prompts import load_data
from controller.data.readers import open_rows
from controller.plan import Plan
from controller.training.algorithm import Algorithm
from controller.training.columns import texts_of
from controller.training.feed import Feed
from deploy.quickstart.build import BOS, make_tokenizer
from rlhf.errors import ConfigError
from rlhf.v1 import reward_pb2
from services.reward.loaded import LoadedFunction

ROWS = [
    {"prompt": "1+1=", "ground_truth": "2", "level": {"hard": False}},
    {"prompt": "2+2=", "ground_truth": "4"},
]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 3},
}
TEMPLATE = """
{%- if not messages %}{{ raise_exception("nobody spoke") }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "odd" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}
<{{ message.role }}>{{ message.content }} {{ {"é": [1, "<"]} | tojson(indent=1) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<assistant>
{% endif %}"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi, what's 1 < 2?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": " b "},
        {"role": "odd", "content": "x"},
        {"role": "user", "content": "{{ c }}\n"},
    ],
]


def config(**data: Any) -> Config:
    services = {"reward": {"role": "reward", "address": "127.0.0.1:7104", "function": "length"}}
    return Config.model_validate({"data": data, "services": services, "algorithm": {"mini_batch_size": 1}})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def save(kind: str, tmp_path: Path) -> Path:
    dataset = datasets.Dataset.from_list(ROWS)
    match kind:
        case "jsonl":
            return write_jsonl(tmp_path / "rows.jsonl", ROWS)
        case "jsonl.gz":
            path = tmp_path / "rows.jsonl.gz"
            path.write_bytes(gzip.compress(write_jsonl(tmp_path / "rows.jsonl", ROWS).read_bytes()))
            return path
        case "parquet":
            dataset.to_parquet(tmp_path / "rows.parquet")
            return tmp_path / "rows.parquet"
        case _:
            datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "saved")
            return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "dataset"])
def test_rows_are_the_same_from_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    path = save(kind, tmp_path)
    data, _ = load_data(config(train=path, heldout=path))
    prompts = [data[row] for row in range(len(data))]
    assert [(prompt.text, prompt.ground_truth) for prompt in prompts] == [("1+1=", "2"), ("2+2=", "4")]
    assert json.loads(prompts[0].metadata) == {"level": {"hard": False}}


def test_a_split_that_is_not_there_is_an_error_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no split 'dev'; it has: train, test"):
        open_rows(save("dataset", tmp_path), "data.heldout", split="dev")


def test_a_directory_without_a_dataset_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: .*: Is a directory"):
        open_rows(tmp_path, "data.train")


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a", "prompt": "not this"}])
    source = {"path": path, "heldout": path, "columns": {"prompt": "question", "response": "answer"}}
    data, _ = load_data(config(sources=[source]), ("response",))
    assert (data[0].text, data[0].texts) == ("q", {"response": "a"})


def test_a_renamed_field_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "q", "answer": "a"},
        {"question": "q", "answer": "a", "level": 3},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    columns = {"prompt": "question", "ground_truth": "answer", "difficulty": "level"}
    load_data(config(train=path, heldout=path, columns=columns))
    with pytest.raises(
        ConfigError,
        match=r"data\.train: .*a\.jsonl:1, and all rows after it: no field 'anser', which is columns\.ground_truth; "
        r"the fields are question, answer; did you mean 'answer'\?",
    ):
        load_data(config(train=path, heldout=path, columns=columns | {"ground_truth": "anser"}))
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:1: no field prompt, only: .*columns\.prompt is 'quesion'$"
    ):
        load_data(config(train=path, heldout=path, columns={"prompt": "quesion"}))


def test_one_source_has_the_keys_of_several(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    splits: Any = {
        name: datasets.Dataset.from_list([{"question": name, "answer": "a"}]) for name in ("a", "b")
    }
    datasets.DatasetDict(splits).save_to_disk(path)
    columns = {"prompt": "question", "ground_truth": "answer"}
    table = config(train=path, split="a", heldout_split="b", columns=columns)
    train, heldout = load_data(table)
    assert [(rows[0].text, rows[0].ground_truth, rows[0].source) for rows in (train, heldout)] == [
        ("a", "a", ""),
        ("b", "a", ""),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_rows_of_a_source_may_be_held_out(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(20)]
    if kind == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", rows)
    else:
        path = tmp_path / "saved"
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)
    train, heldout = load_data(config(train=path, heldout_rows=7))
    texts = [[part[i].text for i in range(len(part))] for part in (train, heldout)]
    assert [len(each) for each in texts] == [13, 7]
    assert sorted(texts[0] + texts[1]) == sorted(row["prompt"] for row in rows)
    assert texts[1] not in ([row["prompt"] for row in rows[:7]], [row["prompt"] for row in rows[-7:]])
    again = load_data(config(sources=[{"path": path, "heldout_rows": 7}]))
    assert texts == [[part[i].text for i in range(len(part))] for part in again]
    whole, _ = load_data(config(train=path, heldout=path, heldout_split="train"))
    assert train.fingerprints() == whole.fingerprints()


def test_a_dataset_without_splits_is_not_its_own_test(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        ConfigError, match=r"data\.heldout: .*saved has no splits; give the held-out rows, or held"
    ):
        load_data(config(train=tmp_path / "saved"))
    assert [len(part) for part in load_data(config(train=tmp_path / "saved", heldout_rows=1))] == [1, 1]
    with pytest.raises(ConfigError, match=r"data\.heldout: .*rows has no splits"):
        load_data(config(train=write_jsonl(tmp_path / "rows", ROWS)))


@pytest.mark.parametrize("wrong", [0, 9, 19])
def test_a_mistake_in_divided_rows_is_told_with_its_line(wrong: int, tmp_path: Path) -> None:
    rows = [{"prompt": "" if i == wrong else "p"} for i in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:{wrong + 1}: prompt is not a text"):
        load_data(config(train=path, heldout_rows=7))


def test_a_row_at_least_has_to_be_left_for_training(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}] * 3)
    with pytest.raises(ConfigError, match=r"data\.heldout_rows: 3 of the 3 rows cannot be held out"):
        load_data(config(train=path, heldout_rows=3))
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.heldout_rows: 3 of the 3 rows"):
        load_data(config(sources=[{"path": path, "heldout_rows": 3}]))


def test_an_algorithms_column_has_to_be_there(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "c"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: no field rejected, only: prompt, chosen"):
        load_data(config(train=path, heldout=path), ("chosen", "rejected"))


@pytest.mark.parametrize("truth", [{}, {"ground_truth": " "}, {"reward_model": {"style": "rule"}}], ids=str)
@pytest.mark.parametrize("function", ["exact_match", "gsm8k", "math"])
def test_a_reward_that_compares_answers_needs_a_ground_truth_in_every_row(
    function: str, truth: dict[str, Any], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "ground_truth": 0}, {"prompt": "p", **truth}])
    table = {"role": "reward", "address": "127.0.0.1:7104", "function": function}
    tables = {"data": {"train": path, "heldout": path}, "services": {"reward": table}}
    cause = r"a\.jsonl:2: no ground_truth, with which the service reward compares responses"
    with pytest.raises(ConfigError, match=cause):
        load_data(Config.model_validate(tables))
    table["external"] = True  # type: ignore[assignment]
    assert len(load_data(Config.model_validate(tables))[0]) == 2


@pytest.mark.parametrize(
    "tests",
    [
        {},
        {"tests": []},
        {"tests": "[]"},
        {"tests": None},
        {"ground_truth": "42"},
        {"ground_truth": '{"inputs": ["1"]}'},
        {"ground_truth": '{"inputs": [], "outputs": []}'},
    ],
    ids=str,
)
def test_a_reward_that_runs_programs_needs_tests_in_every_row(tests: dict[str, Any], tmp_path: Path) -> None:
    call = {"kind": "call", "function": "f", "expected": 1}
    good: list[dict[str, Any]] = [
        {"tests": [call]},
        {"tests": json.dumps([call])},
        {"ground_truth": {"inputs": ["1"], "outputs": ["1"]}},
        {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["1"]}'}},
    ]
    rows = [{"prompt": "p", **each} for each in (*good, tests)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    table = {"role": "reward", "address": "127.0.0.1:7104", "kind": "sandbox"}
    tables = {"data": {"train": path, "heldout": path}, "services": {"reward": table}}
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:5: no tests for the service reward: neither a field tests, nor"
    ):
        load_data(Config.model_validate(tables))
    table["external"] = True  # type: ignore[assignment]
    assert len(load_data(Config.model_validate(tables))[0]) == 5


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({"function": "math"}, "no ground_truth, with which the service harm compares responses"),
        ({"kind": "sandbox"}, "no tests for the service harm: neither a field tests, nor"),
    ],
)
@pytest.mark.parametrize("is_composed", [False, True])
def test_a_cost_needs_the_same_in_the_rows_of_all_sources(
    table: dict[str, Any], cause: str, *, is_composed: bool, tmp_path: Path
) -> None:
    good = {"prompt": "p", "ground_truth": {"inputs": ["1"], "outputs": ["1"]}}
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        for name, rows in {"a": [good], "b": [good, {"prompt": "p"}]}.items()
    ]
    services: dict[str, dict[str, Any]] = {
        "math": {"function": "exact_match"},
        "style": {"function": "length"},
        "harm": table,
    }
    for number, each in enumerate(services.values(), start=7104):
        each |= {"role": "reward", "address": f"127.0.0.1:{number}"}
    tables = {
        "data": {
            "sources": [
                {"path": path, "heldout": path, "reward": reward, "name": reward}
                for path, reward in zip(paths, ("math", "style"), strict=True)
            ]
        },
        "services": services,
        "rewards": {"cost": {"harm": 1.0, "style": 0.5}} if is_composed else {},
    }
    with pytest.raises(ConfigError, match=rf"b\.jsonl:2: {cause}"):
        load_data(Config.model_validate(tables))


@pytest.mark.parametrize("is_composed", [False, True])
def test_a_reward_that_only_scores_held_out_rows_needs_nothing_of_the_others(
    *, is_composed: bool, tmp_path: Path
) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    heldout = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "ground_truth": "1"}])
    names = ("cost", "style", "harm")
    services: dict[str, dict[str, Any]] = {
        name: {"role": "reward", "address": f"127.0.0.1:{port}", "function": "length"}
        for port, name in enumerate(("reward", *names), start=7104)
    }
    services["harm" if is_composed else "cost"]["function"] = "math"
    if is_composed:
        del services["cost"]
    tables = {
        "data": {"train": train, "heldout": heldout},
        "services": services,
        "rewards": {"cost": {"harm": 1.0, "style": 0.5}} if is_composed else {},
    }
    made = Config.model_validate(tables)
    assert [len(part) for part in load_data(made)] == [1, 1]
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: no ground_truth"):
        load_data(made, rewards=("actor", "reward", "cost"))
    tables["data"]["heldout"] = train
    with pytest.raises(ConfigError, match=r"data\.heldout: .*a\.jsonl:1: no ground_truth"):
        load_data(Config.model_validate(tables))


def test_rewards_that_an_algorithm_declares_score_the_rows_to_train_on(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    heldout = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "ground_truth": "1"}])
    quickstart = Path(__file__).parents[2] / "deploy/quickstart/safe_rlhf.toml"
    rewards = ("services.reward.function='length'", "services.cost.function='math'")
    made = load(quickstart, (f"data.train='{train}'", f"data.heldout='{heldout}'", *rewards))
    with pytest.raises(ConfigError, match="no ground_truth, with which the service cost compares"):
        Plan.of(find_algorithm("safe_rlhf"), made)
    undeclared = Algorithm(lambda run, options: None, options=SafeRLHFOptions)
    assert [len(part) for part in Plan.of(undeclared, made).data] == [1, 1]


def test_only_the_sources_of_a_reward_that_compares_answers_need_ground_truths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    services = {
        "reward": {"role": "reward", "address": "127.0.0.1:7104"},
        "style": {"role": "reward", "address": "127.0.0.1:7105", "function": "length"},
    }
    sources = [{"path": path, "heldout": path, "reward": "style"}]
    tables = {"data": {"sources": sources}, "services": services}
    assert len(load_data(Config.model_validate(tables))[0]) == 1


def test_rows_carry_their_source(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}]) for name in "ab"]
    sources = [{"path": path, "heldout": path, "name": path.stem} for path in paths]
    data, _ = load_data(config(sources=sources))
    columns: Any = data.batch(np.array([1, 0])).result(["prompt", "source"]).columns
    assert columns["prompt"].texts == columns["source"].texts == ["b", "a"]


def test_rows_of_verl_load_as_they_are(tmp_path: Path, tokenizer_directory: Path) -> None:
    datasets.Dataset.from_list([VERL]).to_parquet(tmp_path / "verl.parquet")
    data, _ = load_data(
        config(
            train=tmp_path / "verl.parquet", heldout=tmp_path / "verl.parquet", tokenizer=tokenizer_directory
        )
    )
    assert data[0].ground_truth == "72"
    assert data[0].text.endswith("<assistant>\n")
    metadata = json.loads(data[0].metadata)
    assert metadata == {name: value for name, value in VERL.items() if name != "prompt"}


def verl_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    assert data_source == "openai/gsm8k"
    assert extra_info == {"split": "train", "index": 3}
    return float(solution_str == ground_truth)


def test_rewards_of_verl_get_what_its_rows_have(tmp_path: Path, tokenizer_directory: Path) -> None:
    path = write_jsonl(tmp_path / "verl.jsonl", [VERL])
    data, _ = load_data(config(train=path, heldout=path, tokenizer=tokenizer_directory))
    row = reward_pb2.TextRow(
        prompt=data[0].text,
        response="72",
        ground_truth=data[0].ground_truth,
        metadata=json_format.Parse(data[0].metadata, struct_pb2.Struct()),
    )
    name = f"{__name__}:verl_reward"
    (score,) = LoadedFunction.load(name, {}).score([row]).scores
    assert score.score == 1


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "several"])
@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_templates_are_rendered_as_transformers_does(
    conversation: Any, where: str, tokenizer_directory: Path
) -> None:
    expected = AutoTokenizer.from_pretrained(tokenizer_directory).apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    if where == "tokenizer_config.json":
        (tokenizer_directory / "chat_template.jinja").unlink()
        path = tokenizer_directory / where
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    assert Chat(tokenizer_directory).render(conversation) == expected


@pytest.mark.parametrize("where", ["one template", "files", "tokenizer_config.json"])
def test_templates_are_given_tools_as_transformers_does(where: str, tokenizer_directory: Path) -> None:
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    own = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    files = {"chat_template.jinja": own}
    if where == "files":
        files = {"chat_template.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": own}
    (tokenizer_directory / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tokenizer_directory / name).write_text(text)
    if where == "tokenizer_config.json":
        (tokenizer_directory / "chat_template.jinja").unlink()
        path = tokenizer_directory / where
        named = [
            {"name": name, "template": text} for name, text in (("default", TEMPLATE), ("tool_use", own))
        ]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    for options in ({"tools": tools}, {}):
        expected = tokenizer.apply_chat_template(
            CONVERSATIONS[0], tokenize=False, add_generation_prompt=True, **options
        )
        assert ("search" in expected) == bool(options)
        assert Chat(tokenizer_directory, options=options).render(CONVERSATIONS[0]) == expected


@pytest.mark.parametrize("is_older", [True, False])
def test_templates_have_the_special_tokens_that_transformers_has(
    is_older: bool, tokenizer_directory: Path
) -> None:
    template = "{{ bos_token }}{{ unk_token }}{{ eos_token }}{{ image_token }}{{ video_token }}"
    (tokenizer_directory / "chat_template.jinja").write_text(template)
    table = json.loads((path := tokenizer_directory / "tokenizer_config.json").read_text())
    eos = table.pop("eos_token")
    table |= {"image_token": "<i>", "extra_special_tokens": {"video_token": "<v>"}, "add_bos_token": True}
    # transformers reads the other file where the format is that of its releases before 4.34.
    table |= {} if is_older else {"added_tokens_decoder": {}}
    path.write_text(json.dumps(table))
    named = {"bos_token": {"content": eos, "lstrip": False}, "eos_token": eos, "cls_token": None}
    (tokenizer_directory / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    conversation = CONVERSATIONS[0]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert expected.endswith("<i><v>")
    assert Chat(tokenizer_directory).render(conversation) == expected


def test_the_token_that_begins_every_text_is_not_there_twice(tokenizer_directory: Path) -> None:
    conversation = CONVERSATIONS[0]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tokenizer_directory)
    ids = tokenizer(Chat(tokenizer_directory).render(conversation))["input_ids"]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_templates_are_told_when_the_run_started_and_not_the_time_of_the_day(
    tmp_path: Path, tokenizer_directory: Path
) -> None:
    (tokenizer_directory / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y %H:%M') }}")
    path = write_jsonl(tmp_path / "a.jsonl", [VERL])
    table = config(train=path, heldout=path, tokenizer=tokenizer_directory)
    noon_in_2026 = 1_767_268_800.0
    (train, heldout) = load_data(table, (), noon_in_2026)
    assert train[0].text == heldout[0].text == "01 Jan 2026 12:00"


@pytest.mark.parametrize("template", ["{{ messages.clear() }}", "{{ ''.__class__.__mro__ }}"])
def test_templates_can_touch_nothing(template: str, tokenizer_directory: Path) -> None:
    (tokenizer_directory / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="refuses it"):
        Chat(tokenizer_directory).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ raise_exception('no system') }}", "no system"), ("{{ 'a'.split('') }}", "empty separator")],
)
def test_a_template_that_refuses_is_named_with_the_row(
    template: str, why: str, tmp_path: Path, tokenizer_directory: Path
) -> None:
    (tokenizer_directory / "chat_template.jinja").write_text(template)
    path = write_jsonl(tmp_path / "a.jsonl", [VERL])
    with pytest.raises(ConfigError, match=rf"a\.jsonl:1: prompt: .*refuses it: {why}"):
        load_data(config(train=path, heldout=path, tokenizer=tokenizer_directory))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "train: required, and not given"),
        ({"train": "a.jsonl"}, "heldout: required, and not given"),
        ({"train": "a.jsonl", "heldout": "b.jsonl", "sources": [{"path": "c", "heldout": "d"}]}, "not both"),
        ({"sources": [{"path": "c.jsonl"}]}, "is a file, which has no splits"),
        (
            {"train": "a.jsonl", "heldout": "b.jsonl", "heldout_rows": 1},
            "give heldout, or heldout_rows, not both",
        ),
        (
            {"sources": [{"path": "c", "heldout": "d", "heldout_rows": 1}]},
            "give heldout, or heldout_rows, not both",
        ),
        ({"sources": [{"path": "c"}], "subset": "main"}, "subset: is a key of each table"),
        ({"sources": [{"path": "c"}], "columns": {"prompt": "q"}}, "columns: is a key of each table"),
        ({"train": "o/c", "template": "no place"}, "prompt} must occur in it exactly once"),
        ({"train": "o/c", "template": "{prompt}{prompt}"}, "prompt} must occur in it exactly once"),
        ({"sources": [{"path": "c", "template": "{}"}]}, "prompt} must occur in it exactly once"),
        ({"train": "o/c", "chat_options": {"messages": []}}, "messages is no variable of a template"),
        ({"train": "o/c", "chat_options": {"tokenize": True}}, "tokenize is no variable of a template"),
        ({"sources": [{"path": "o/c"}, {"path": "o/c"}]}, "'o/c' is there twice"),
        ({"sources": [{"path": "o/c"}, {"heldout": "o/d"}, {"heldout": "o/d"}]}, "'o/d' is there twice"),
        ({"sources": [{"path": "o/c"}, {"name": "d"}]}, "a source without path needs heldout"),
        (
            {"sources": [{"path": "o/c"}, {"heldout": "d.jsonl", "heldout_rows": 1}]},
            "a source without path needs heldout, and can have no heldout_rows",
        ),
        (
            {"sources": [{"heldout": "d.jsonl"}]},
            "sources: none has a path, so that there are no rows to train on",
        ),
    ],
)
def test_what_says_nothing_clear_about_the_rows_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**data)


def rows_of(tmp_path: Path, name: str, count: int) -> Path:
    return write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(count)])


def test_a_source_without_a_path_is_only_evaluated_on(tmp_path: Path) -> None:
    sources = [
        {"name": "contest", "heldout": rows_of(tmp_path, "c", 2), "weight": 9.0},
        {"name": "easy", "path": rows_of(tmp_path, "e", 3), "heldout": rows_of(tmp_path, "h", 1)},
        {"heldout": rows_of(tmp_path, "d", 1), "reward": "mixed"},
        {"name": "hard", "path": rows_of(tmp_path, "f", 5), "heldout_rows": 2, "weight": 2.0},
    ]
    made = config(sources=sources, prompts_per_step=6)
    again = Config.model_validate(made.model_dump(mode="json"))
    assert again.data == made.data
    train, heldout = load_data(again)
    assert train.sizes == (3, 3)
    assert heldout.sizes == (2, 1, 1, 2)
    texts = [heldout[row].text for row in range(4)]
    assert texts == ["c0", "c1", "h0", "d0"]
    assert [heldout[row].source for row in range(4)] == [
        "contest",
        "contest",
        "easy",
        str(tmp_path / "d.jsonl"),
    ]
    drawn, _ = Feed(again, train, None, (None, None)).next_prompts()
    assert sorted(texts_of(drawn, "source")) == ["easy"] * 2 + ["hard"] * 4


def test_an_unshuffled_run_draws_the_rows_in_their_order(tmp_path: Path) -> None:
    path = rows_of(tmp_path, "r", 5)
    made = config(train=path, heldout=path, prompts_per_step=4, shuffle=False)
    feed = Feed(made, load_data(made)[0], None, (None, None))
    drawn = [texts_of(feed.next_prompts()[0], "prompt") for _ in range(2)]
    assert drawn == [["r0", "r1", "r2", "r3"], ["r4", "r0", "r1", "r2"]]
