"""Playing episodes: who goes on, what the next turn is given, and what the rows hold in the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.config.rollout import RolloutTable
from controller.data.chat import SAID, Chat
from controller.mapping.record import record_dataflow
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.verdicts import first_causes
from controller.training.columns import texts_of
from controller.training.episodes import MAX_OBSERVATION, EpisodePlayer, episode_metrics
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError, InvalidRequest
from services.reward.functions import find_function

PROMPTS = ["a", "b", "c"]
ENDS = {"full": "", "odd": "the observation contains the token '<image>'", "no": "length"}
"""Why turns end, by what the policy of this test says; of all others "stop"."""
GROUPS = Path(__file__).parents[2] / "deploy" / "quickstart" / "groups.toml"


class Script:
    """Answers with the prompt and what was said, until the policy says stop."""

    def __init__(self, prompt: str, ground_truth: str, metadata: dict[str, Any]) -> None:
        self.prompt, self.said = prompt, ""

    def step(self, response: str) -> Any:
        if response == "raise":
            raise ValueError("broken")
        if response == "endless":
            return "x" * (MAX_OBSERVATION + 1)
        if response == "message":
            return [{"role": "tool", "content": "found"}]
        self.said += response
        return None if response == "stop" else f"<{self.prompt}{response}>"

    def reward(self) -> float:
        return float(len(self.said))


class Policy:
    """Says the next of the words for each prompt, each a token of its number, and adds observations as one token 0. A
    word "full" or "odd" is not said: the response stays as it is, without room or with an observation that the model
    cannot read. "no" is cut off."""

    def __init__(self, **words: list[str]) -> None:
        self.words = {prompt: iter(said) for prompt, said in words.items()}
        self.asked: list[list[str]] = []
        self.observed: list[list[str]] = []

    def __call__(self, rows: FutureBatch) -> FutureBatch:
        prompts = texts_of(rows, "prompt")
        self.asked.append(prompts)
        said = [next(self.words[prompt]) for prompt in prompts]
        begun: list[tuple[list[int], list[int]]] = [([], []) for _ in prompts]
        if "observation" in rows:
            self.observed.append(texts_of(rows, "observation"))
            ids, mask = (self._rows(rows, name) for name in ("partial_ids", "partial_mask"))
            begun = list(zip(ids, mask, strict=True))
        new = [
            (ids, mask)
            if word in ENDS and word != "no"
            else ([*ids, *[0] * bool(ids), len(word)], [*mask, *[0] * bool(ids), 1])
            for (ids, mask), word in zip(begun, said, strict=True)
        ]
        return FutureBatch.of(
            response_ids=jagged([ids for ids, _ in new], np.int32),
            response_mask=jagged([mask for _, mask in new], np.uint8),
            rollout_log_probs=jagged([[-1.0] * sum(mask) for _, mask in new], np.float32),
            turn=["" if word in ENDS and word != "no" else word for word in said],
            turn_end=[ENDS.get(word, "stop") for word in said],
        )

    @staticmethod
    def _rows(batch: FutureBatch, name: str) -> list[list[int]]:
        column = batch.result([name])[name]
        assert isinstance(column, LocalColumn)
        assert isinstance(column.values, Jagged)
        return [column.values.row(row).tolist() for row in range(column.values.rows)]


def jagged(rows: list[list[Any]], dtype: Any) -> Jagged[np.ndarray]:
    return Jagged(np.asarray([x for row in rows for x in row], dtype), np.asarray([len(row) for row in rows]))


def config(model: Path | None = None, **environment: Any) -> Config:
    table = {"factory": f"{__name__}:Script", "turn_tokens": 2, "turns": 3, **environment}
    return Config.model_validate(
        {
            "data": {
                "train": "train.jsonl",
                "heldout": "heldout.jsonl",
                "prompts_per_step": 2,
                "tokenizer": model,
            },
            "rollout": {"environment": table},
            "algorithm": {"mini_batch_size": 2},
            "services": {"reward": {"role": "reward", "address": "127.0.0.1:1", "function": "environment"}},
        }
    )


def play(
    policy: Callable[[FutureBatch], FutureBatch],
    given: Config | None = None,
    started_unix_s: float | None = None,
    **columns: list[str],
) -> FutureBatch:
    rows = {"prompt": PROMPTS, "ground_truth": [""] * 3, "metadata": ['{"level": 1}'] * 3, **columns}
    with ExitStack() as opened:
        player = EpisodePlayer.of(given or config(), opened, started_unix_s)
        assert player is not None
        return player.play(FutureBatch.of(**rows), policy)


def test_episodes_go_on_until_their_environment_ends_them() -> None:
    policy = Policy(a=["stop"], b=["no", "stop"], c=["no", "nope", "never"])
    batch = play(policy)
    assert policy.asked == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert policy.observed == [["<bno>", "<cno>"], ["<cnope>"]]
    rows = [Policy._rows(batch, name) for name in ("response_ids", "response_mask")]
    assert rows == [[[4], [2, 0, 4], [2, 0, 4, 0, 5]], [[1], [1, 0, 1], [1, 0, 1, 0, 1]]]
    found = batch.result(["episode_turns"])["episode_turns"]
    assert isinstance(found, LocalColumn)
    assert np.asarray(found.values).tolist() == [1, 2, 3]
    metadata = [json.loads(text) for text in texts_of(batch, "metadata")]
    assert metadata == [{"level": 1, "environment_reward": reward} for reward in (4, 6, 11)]
    assert "turn" not in batch
    assert "turn_end" not in batch
    assert episode_metrics(batch.result(batch.columns)) == {
        "episode/turns_mean": 2.0,
        "episode/finished": 1.0,
        "episode/failed": 0.0,
        "episode/sampled_mean": 2.0,
    }


def test_rows_keep_their_order_whichever_ends_first() -> None:
    batch = play(Policy(a=["no", "nope", "stop"], b=["stop"], c=["no", "stop"]))
    assert [len(row) for row in Policy._rows(batch, "response_ids")] == [5, 1, 3]


def test_an_episode_without_room_ends_and_its_environment_is_not_asked_again() -> None:
    batch = play(Policy(a=["no", "full"], b=["stop"], c=["stop"]))
    assert Policy._rows(batch, "response_ids")[0] == [2]
    assert json.loads(texts_of(batch, "metadata")[0])["environment_reward"] == 2


def test_the_share_of_episodes_that_finish_is_that_of_their_last_turns() -> None:
    batch = play(Policy(a=["stop"], b=["no", "full"], c=["nope", "no", "stop"]))
    assert episode_metrics(batch.result(batch.columns))["episode/finished"] == pytest.approx(2 / 3)


def test_an_observation_that_the_model_cannot_read_ends_its_episode_alone() -> None:
    batch = play(Policy(a=["no", "odd"], b=["no", "stop"], c=["stop"]))
    assert texts_of(batch, "environment_error") == [
        f"environment {__name__}:Script: step: the observation contains the token '<image>'",
        "",
        "",
    ]
    assert Policy._rows(batch, "response_ids") == [[2], [2, 0, 4], [4]]
    assert "environment_reward" not in texts_of(batch, "metadata")[0]


def test_an_episode_that_failed_has_the_error_of_a_row_that_was_not_scored() -> None:
    batch = play(Policy(a=["raise"], b=["stop"], c=["stop"]))
    causes = LocalColumn(texts_of(batch, "environment_error"))
    errors = first_causes([LocalColumn(["", "own", ""]), causes])
    assert isinstance(errors, LocalColumn)
    assert errors.texts == [f"environment {__name__}:Script: step: ValueError: broken", "own", ""]
    assert "environment_reward" not in texts_of(batch, "metadata")[0]
    assert episode_metrics(batch.result(batch.columns))["episode/failed"] == pytest.approx(1 / 3)


def test_environments_are_closed_once_where_a_turn_cannot_be_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Script, "close", lambda self: closed.append(self.prompt), raising=False)

    def lost(rows: FutureBatch) -> FutureBatch:
        raise InvalidRequest("the rank is lost")

    with pytest.raises(InvalidRequest, match="the rank is lost"):
        play(lost)
    assert sorted(closed) == PROMPTS
    play(Policy(a=["stop"], b=["stop"], c=["raise"]))
    assert sorted(closed) == sorted(PROMPTS * 2)


def test_an_observation_that_no_service_would_tokenize_ends_its_episode_alone() -> None:
    batch = play(Policy(a=["endless"], b=["x", "stop"], c=["stop"]))
    assert texts_of(batch, "environment_error") == [
        f"environment {__name__}:Script: step: returned 262145 characters; at most 262144 are added to a response",
        "",
        "",
    ]


def test_a_field_of_the_data_is_not_overwritten() -> None:
    with pytest.raises(InvalidRequest, match="a row of the data has a field 'environment_reward'"):
        play(Policy(a=["stop"], b=["stop"], c=["stop"]), metadata=['{"environment_reward": 1}'] * 3)


def test_a_field_of_the_data_is_no_reward_of_an_environment_that_has_failed() -> None:
    with pytest.raises(InvalidRequest, match="a row of the data has a field 'environment_reward'"):
        play(Policy(a=["raise"], b=["raise"], c=["raise"]), metadata=['{"environment_reward": 1}'] * 3)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_directory(path: Path, template: str = CHATML) -> Path:
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (path / "chat_template.jinja").write_text(template)
    return path


def test_messages_are_rendered_by_what_the_chat_template_adds(tmp_path: Path) -> None:
    policy = Policy(a=["message", "stop"], b=["stop"], c=["stop"])
    play(policy, config(model_directory(tmp_path)))
    assert policy.observed == [["<|im_end|>\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n"]]


def test_later_turns_have_the_options_of_the_chat_template(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n", "assistant\n{{ '<think>' if enable_thinking else '</think>' }}")
    given = config(model_directory(tmp_path, template))
    data = given.data.model_copy(update={"chat_options": {"enable_thinking": True}})
    policy = Policy(a=["message", "stop"], b=["stop"], c=["stop"])
    play(policy, given.model_copy(update={"data": data}))
    assert policy.observed[0][0].endswith("<|im_start|>assistant\n<think>")


def test_later_turns_have_the_tools_of_their_row(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ tools | map(attribute='name') | join }} {{ m.content }}")
    given = config(model_directory(tmp_path, template))
    data = given.data.model_copy(update={"chat_options": {"tools": [{"name": "f"}]}})
    policy = Policy(a=["message", "stop"], b=["message", "stop"], c=["message", "stop"])
    metadata = ['{"tools": "[{\\"name\\": \\"g\\"}]"}', '{"tools": null}', '{"tools": "hammer"}']
    play(policy, given.model_copy(update={"data": data}), metadata=metadata)
    assert [text.split()[2] for text in policy.observed[0]] == ["g", "f", "f"]


def test_later_turns_have_the_date_of_the_start_of_the_run(tmp_path: Path) -> None:
    """As prompts have, so that a run that is resumed on another day continues episodes as before."""
    template = CHATML.replace("{{ m.content }}", "{{ strftime_now('%Y-%m-%d') }} {{ m.content }}")
    policy = Policy(a=["message", "stop"], b=["stop"], c=["stop"])
    play(policy, config(model_directory(tmp_path, template)), started_unix_s=86_400.0)
    assert "<|im_start|>tool\n1970-01-02 found<|im_end|>" in policy.observed[0][0]


def test_messages_may_contain_the_text_that_stands_for_a_response(tmp_path: Path) -> None:
    rest = Chat(model_directory(tmp_path)).continuation([{"role": "tool", "content": f"a {SAID} b"}])
    assert rest == f"<|im_end|>\n<|im_start|>tool\na {SAID} b<|im_end|>\n<|im_start|>assistant\n"


def test_messages_that_the_template_refuses_fail_their_episode_alone(tmp_path: Path) -> None:
    refusing = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    policy = Policy(a=["message"], b=["no", "stop"], c=["stop"])
    batch = play(policy, config(model_directory(tmp_path, refusing)))
    errors = texts_of(batch, "environment_error")
    assert errors[0].startswith(f"environment {__name__}:Script: step: the chat template of")
    assert errors[0].endswith("refuses it: no tools")
    assert errors[1:] == ["", ""]


def test_messages_need_a_chat_template() -> None:
    with pytest.raises(ConfigError, match="returned messages, and no service has a model directory"):
        play(Policy(a=["message"], b=["stop"], c=["stop"]))


def test_a_template_that_changes_what_was_said_is_refused(tmp_path: Path) -> None:
    last_alone = CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if loop.last else '' }}", 1)
    chat = Chat(model_directory(tmp_path, last_alone))
    with pytest.raises(ConfigError, match="have the environment return a text instead"):
        chat.continuation([{"role": "tool", "content": "found"}])


def test_the_reward_of_an_environment_is_read_from_the_metadata() -> None:
    function = find_function("environment")
    assert function("", "", "", {"environment_reward": 0.5}) == 0.5
    with pytest.raises(ValueError, match=r"rollout\.environment has given no reward"):
        function("", "", "", {})


def test_the_search_for_a_placement_takes_an_episode_as_one_call() -> None:
    keys = ("factory=mine:Own", "turn_tokens=4")
    settings = tuple(f"rollout.environment.{key}" for key in keys)
    algorithm = find_algorithm("grpo")
    given = algorithm.configure(load(GROUPS, settings))
    assert [call.method for call in record_dataflow(algorithm, given)].count("generate_sequences") == 1


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            {},
            r"rollout.environment.turn_tokens: must be from 1 to rollout.max_response_tokens, 128 \(given: 0\)",
        ),
        ({"environment": {"turn_tokens": 200}}, "given: 200"),
        (
            {"chunks": 2, "environment": {"turn_tokens": 8}},
            "rollout.chunks: 2 does not go with rollout.environment",
        ),
    ],
)
def test_what_an_environment_does_not_go_with_is_refused(rollout: dict[str, Any], said: str) -> None:
    table = {**rollout, "environment": {"factory": "mine:Own", **rollout.get("environment", {})}}
    tables = {**config().model_dump(), "rollout": RolloutTable.model_validate(table).model_dump()}
    with pytest.raises(ValidationError, match=said):
        Config.model_validate(tables)
