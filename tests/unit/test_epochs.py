"""The length of a run in passes over its rows."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller import cli
from controller.algorithms import find_algorithm
from controller.config.config import Config, as_config, load, with_settings
from controller.config.data import NOWHERE
from controller.data.loader import Loader
from controller.plan import Plan
from rlhf.errors import ConfigError
from settings.strict import override

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"


def tables(tmp_path: Path, rows: int, **run: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}=", "response": "x"}) + "\n" for i in range(rows)))
    return {
        "run": run,
        "data": {"train": path, "heldout_rows": 1, "prompts_per_step": 8},
        "algorithm": {"mini_batch_size": 8},
        "services": {"actor": {"role": "actor", "address": "127.0.0.1:7101", "model": tmp_path / "model"}},
    }


def planned(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr("controller.plan.check_models", lambda config: None)
    return Plan.of(find_algorithm("sft"), as_config(given))


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(17, 1, 2), (18, 1, 3), (17, 3, 6), (18, 3, 7), (3, 2, 1)]
)
def test_epochs_are_as_many_steps_as_draw_each_row_that_often(
    rows: int, epochs: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tables(tmp_path, rows, epochs=epochs), monkeypatch)
    assert plan.config.run.steps == steps
    drawn = Loader([rows - 1], [1.0], seed=0).take(steps * 8)
    assert np.bincount(drawn, minlength=rows - 1).min() >= epochs
    assert np.bincount(drawn[:-8], minlength=rows - 1).min() < epochs


def test_the_file_of_a_run_says_its_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tables(tmp_path, 17, epochs=3), monkeypatch)
    written = tomllib.loads(plan.resolved(plan.config))
    assert (written["run"]["epochs"], "steps" in written["run"]) == (3, False)
    assert planned(written, monkeypatch).config == plan.config
    in_steps = planned(tables(tmp_path, 17, steps=6), monkeypatch)
    assert tomllib.loads(in_steps.resolved(in_steps.config))["run"]["steps"] == 6


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run: give steps or epochs, not both"):
        as_config(tables(tmp_path, 9, steps=3, epochs=1))


def test_a_setting_of_one_replaces_the_other_of_the_file() -> None:
    assert load(QUICKSTART).run.epochs is None
    assert load(QUICKSTART, ("run.epochs=2",)).run.epochs == 2
    assert with_settings({"run": {"epochs": 2, "seed": 1}}, ("run.steps=7",)) == {
        "run": {"seed": 1, "steps": 7}
    }
    with pytest.raises(ConfigError, match="run: give steps or epochs, not both"):
        load(QUICKSTART, ("run.epochs=2", "run.steps=7"))


def test_a_setting_of_held_out_rows_replaces_their_path() -> None:
    data = load(QUICKSTART, ("data.heldout_rows=3",)).data
    assert (data.heldout, data.heldout_rows) == (NOWHERE, 3)
    with pytest.raises(ConfigError, match="data: give heldout, or heldout_rows, not both"):
        load(QUICKSTART, ("data.heldout_rows=3", "data.heldout=a.jsonl"))


def test_the_best_checkpoint_is_checked_where_the_steps_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = {"every": 5, "best": "evaluation/loss"}
    given = {**tables(tmp_path, 17, epochs=3, evaluate_every=5), "checkpoint": checkpoint}
    assert planned(given, monkeypatch).config.run.steps == 6
    with pytest.raises(ConfigError, match=r"checkpoint\.best: no step up to run\.steps, 4, has both"):
        planned({**given, "run": {"epochs": 2, "evaluate_every": 5}}, monkeypatch)


def test_a_dry_run_says_how_many_steps_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("controller.cli.check_models", lambda config: None)
    monkeypatch.setattr("controller.plan.check_models", lambda config: None)
    config: Config = as_config(tables(tmp_path, 18, epochs=3))
    cli._show(find_algorithm("sft"), config, launch=False, has_data=True)
    assert "run.epochs 3: 7 steps of 8 prompts, from 17 training rows" in capsys.readouterr().err


class TestOverride:
    def test_an_element_of_a_list_has_its_number_as_key(self) -> None:
        given = {"data": {"sources": [{"path": "a"}, {"path": "b"}]}, "devices": ["cpu:0", "cpu:1"]}
        settings = ("data.sources.1.path=c", "data.sources.0.columns.prompt=q", "devices.1=cpu:7")
        assert override(given, settings) == {
            "data": {"sources": [{"path": "a", "columns": {"prompt": "q"}}, {"path": "c"}]},
            "devices": ["cpu:0", "cpu:7"],
        }

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("data.sources.2.path=c", "'2' is no element of a list; there are: the numbers 0 to 1"),
            ("data.sources.-1.path=c", "'-1' is no element of a list"),
            ("data.sources.code.path=c", "'code' is no element of a list"),
            ("data.sources.²=c", "'²' is no element of a list"),
            ("devices.0=c", "'0' is no element of a list; there are: none, since it is empty"),
            ("data.sources.0.path.x=c", "'path' is a value, not a table"),
        ],
    )
    def test_what_is_not_there_is_told(self, setting: str, message: str) -> None:
        given = {"data": {"sources": [{"path": "a"}, {"path": "b"}]}, "devices": []}
        with pytest.raises(ConfigError, match=message):
            override(given, (setting,))
