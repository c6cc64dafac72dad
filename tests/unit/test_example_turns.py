"""The example of several turns: each turn is a row, whose prompt is all of the text before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.role_groups.dataflow import FutureBatch
from controller.training.columns import texts_of
from examples.plugins.rlhf_example.turns import episode_advantage, last_rows, play, try_again

GIVEN = {"prompt": ["1+1=", "2+3=", "4+4="], "ground_truth": ["2", "5", "8"], "metadata": ["{}"] * 3}


class Says:
    """An actor that answers each prompt with the next of the texts for it."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers

    def generate_sequences(self, rows: FutureBatch, *, return_text: bool) -> FutureBatch:
        assert return_text
        prompts = texts_of(rows, "prompt")
        return FutureBatch.of(response=[self.answers[prompt[0]].pop(0) for prompt in prompts])


def test_a_wrong_answer_is_asked_again_after_all_of_the_text() -> None:
    actor: Any = Says(**{"1": ["2"], "2": ["4", "6", "5"], "4": ["7", "8"]})
    rows = FutureBatch.of(**GIVEN, group=np.arange(3))
    batch, episode = play(actor, rows, try_again, 3)
    assert texts_of(batch, "prompt") == [
        *GIVEN["prompt"],
        "2+3=4;2+3=",
        "4+4=7;4+4=",
        "2+3=4;2+3=6;2+3=",
    ]
    assert texts_of(batch, "response") == ["2", "4", "7", "6", "8", "5"]
    assert episode.tolist() == [0, 1, 2, 1, 2, 1]
    assert last_rows(episode).tolist() == [0, 5, 4]


@pytest.mark.parametrize("most", [1, 2])
def test_an_episode_has_at_most_as_many_turns(most: int) -> None:
    actor: Any = Says(**{name: ["0"] * most for name in "124"})
    _, episode = play(actor, FutureBatch.of(**GIVEN), try_again, most)
    assert episode.tolist() == [0, 1, 2] * most


def test_all_turns_of_an_episode_have_its_advantage() -> None:
    found = episode_advantage(np.array([1.0, 0.0]), np.array([7, 7]), np.array([0, 1, 1]))
    assert found.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), -(0.5**0.5)], rel=1e-5)
    assert found.metrics["episode/turns"] == 1.5
