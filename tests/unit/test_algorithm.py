"""Declarations of an algorithm become a run's configuration, or are refused, before anything starts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tomli_w

from client.session import StepContext
from controller import algorithms
from controller.advantage import Advantage
from controller.algorithms import find_algorithm
from controller.config.algorithm import AlgorithmTable
from controller.config.config import Config, load
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import Algorithm, NoOptions, algorithm
from controller.training.run import Run
from controller.training.step import Step
from examples.plugins.rlhf_example.algorithms import compute_advantage
from rlhf.errors import ConfigError, InvalidRequest, RlhfError
from settings.commands import errors_shown
from settings.engines import EngineSpec, check_options
from settings.strict import Strict, validate

QUICKSTARTS = Path(__file__).parent.parent.parent / "deploy" / "quickstart"
ALL = ("cispo", "dapo", "distill", "dpo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "remax", "reward_model",
       "rloo", "safe_rlhf", "sft")  # fmt: skip


class StrengthOptions(Strict):
    """Options of the algorithm below."""

    strength: float = 1.0
    """How strong."""


@algorithm(
    services={"actor": "actor", "cost": "reward"},
    options=StrengthOptions,
    defaults={"clip_high": 0.3},
    compares_groups=True,
    quickstart="groups",
)
def declared(run: Run, options: StrengthOptions) -> None:
    """Does nothing."""


def quickstart(name: str = "quickstart", *settings: str) -> Config:
    return load(QUICKSTARTS / f"{name}.toml", settings)


def config_with_cost(config: Config) -> Config:
    """With service cost, a second reward."""
    cost = config.services["reward"].model_copy(update={"address": "127.0.0.1:1"})
    return config.model_copy(update={"services": config.services | {"cost": cost}})


def refusal(found: Algorithm, config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        found.configure(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


class LimitOptions(Strict):
    """Options of which one is not set by default."""

    limit: float | None = None
    """Limit."""


def test_an_option_that_is_not_set_is_left_out_of_the_file_of_the_run() -> None:
    def limited(run: Run, options: LimitOptions) -> None: ...

    found = algorithm(services=("actor", "reward"), options=LimitOptions)(limited)
    for settings, expected in (((), {}), (("algorithm.options.limit=2.5",), {"limit": 2.5})):
        config = found.configure(quickstart("groups", *settings))
        written = tomllib.loads(tomli_w.dumps(found.resolved(config)))
        assert found.configure(validate(Config, written, "file")).algorithm.options == expected


def test_an_option_of_an_engine_that_is_not_set_is_left_out_of_the_file_of_the_run() -> None:
    spec = EngineSpec(implementation="mine:Engine", options=LimitOptions)
    assert check_options(spec, "engine_options", {}) == {}
    assert check_options(spec, "engine_options", {"limit": 2}) == {"limit": 2.0}
    with pytest.raises(TypeError, match=r"options of an engine must be a subclass of .*\.Strict"):
        EngineSpec(implementation="mine:Engine", options=dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_has_a_chapter_in_the_docs(name: str) -> None:
    page = (QUICKSTARTS.parent.parent / "docs" / "algorithms.md").read_text()
    assert f"\n## {name}\n" in page


def test_every_algorithm_is_found_by_name() -> None:
    assert tuple(algorithms.names()) == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_runs_on_its_quickstart_with_the_services_it_declares(name: str) -> None:
    found = find_algorithm(name)
    assert found.services is not None
    config = found.configure(quickstart(found.quickstart))
    assert {service: table.role for service, table in config.services.items()} == found.services
    assert set(config.algorithm.options) == set(found.options.model_fields)


@pytest.mark.parametrize("name", ALL)
def test_the_resolved_configuration_is_resolved_to_itself(name: str) -> None:
    found = find_algorithm(name)
    config = found.configure(quickstart(found.quickstart))
    text = tomli_w.dumps(found.resolved(config))
    again = found.configure(Config.model_validate(tomllib.loads(text)))
    assert again.model_dump() == config.model_dump()


@pytest.mark.parametrize("name", [n for n in ALL if find_algorithm(n).options is not NoOptions])
def test_every_option_has_a_sentence(name: str) -> None:
    options = find_algorithm(name).options
    assert options.__doc__
    assert all(field.description for field in options.model_fields.values())


def test_an_algorithm_has_defaults_of_its_own_which_the_configuration_overrules() -> None:
    found = find_algorithm("dapo")
    assert found.configure(quickstart("groups")).algorithm.clip_high == 0.28
    given = quickstart("groups", "algorithm.clip_high=0.2")
    assert found.configure(given).algorithm.clip_high == 0.2
    assert find_algorithm("ppo").configure(quickstart()).algorithm.clip_high == 0.2


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    found = find_algorithm("dapo")
    message = refusal(found, quickstart("groups", "algorithm.options.max_round=3"))
    assert re.search(
        r"algorithm\.options of dapo: max_round: unknown key; did you mean 'max_rounds'\?", message
    )
    assert "Known keys: max_rounds, filter_by, overlong_buffer_tokens, overlong_penalty" in message


@pytest.mark.parametrize(
    "table",
    ['kind = "function"', 'kind = "function"\noptimizer.learning_rate = 1e-5', 'kind = "model"\nmodel = "m"'],
    ids=["a function", "a function with an optimizer", "a model without one"],
)
def test_a_reward_that_does_not_learn_is_not_trained(table: str) -> None:
    reward = tomllib.loads(f'role = "reward"\naddress = "127.0.0.1:7104"\n{table}')
    tables = {"data": {"train": "rows", "heldout": "rows"}, "services": {"reward": reward}}
    message = refusal(find_algorithm("reward_model"), Config.model_validate(tables))
    assert 'services.reward: reward_model trains this service, which needs kind = "model" and an' in message


def test_an_option_where_there_are_none_is_refused() -> None:
    message = refusal(find_algorithm("remax"), quickstart("groups", "algorithm.options.x=3"))
    assert "algorithm.options of remax: x: unknown key" in message


def test_an_option_out_of_its_range_is_refused() -> None:
    message = refusal(find_algorithm("dapo"), quickstart("groups", "algorithm.options.max_rounds=0"))
    assert "max_rounds: must be at least 1 (given: 0)" in message


def test_a_missing_service_is_refused_with_those_there_are() -> None:
    message = refusal(find_algorithm("safe_rlhf"), quickstart())
    assert message == (
        "services.cost_critic: safe_rlhf needs this service, of role critic; the config has: "
        "actor, critic, reference, reward"
    )


def test_a_service_of_another_role_is_refused() -> None:
    config = quickstart("groups")
    other = config.services["reference"].model_copy(update={"address": "127.0.0.1:1"})
    wrong = config.model_copy(update={"services": config.services | {"cost": other}})
    assert refusal(declared, wrong) == "services.cost.role: declared needs role reward here, not reference"


def test_grpo_needs_a_reference_for_its_kl_alone() -> None:
    found = find_algorithm("grpo")
    assert "reference" in found.configure(quickstart("groups", "algorithm.kl_loss_coefficient=0.1")).services
    without = found.configure(quickstart("groups", "algorithm.kl_loss_coefficient=0"))
    assert without.services.keys() == {"actor", "reward"}
    assert found.configure(without) == without
    needs_one = without.model_copy(
        update={"algorithm": without.algorithm.model_copy(update={"kl_loss_coefficient": 0.1})}
    )
    assert refusal(found, needs_one) == (
        "services.reference: grpo needs this service, of role reference, where algorithm.kl_loss_coefficient is not 0; "
        "the config has: actor, reward"
    )


def test_an_actor_with_adapters_is_the_reference_where_there_is_none() -> None:
    for name in ("ppo", "grpo"):
        settings = ("rollout.samples_per_prompt=4",)
        configured = find_algorithm(name).configure(quickstart("lora", *settings))
        assert "reference" not in configured.services
        assert configured.also_served == {"reference": "actor"}


def test_an_actor_that_only_serves_the_reference_is_kept() -> None:
    needed = Algorithm(lambda run: None, {"reference": "reference"})
    assert needed.configure(quickstart("lora")).services.keys() == {"actor"}


def test_a_reference_of_its_own_comes_before_the_actors() -> None:
    config = quickstart("quickstart", "services.actor.lora.rank=4")
    assert "reference" in find_algorithm("ppo").configure(config).services
    assert config.also_served == {}


def test_two_actors_with_adapters_do_not_say_which_is_the_reference() -> None:
    config = quickstart("lora")
    other = config.services["actor"].model_copy(update={"address": "127.0.0.1:1"})
    two = config.model_copy(update={"services": config.services | {"other": other}})
    assert "services.reference: ppo needs this service" in refusal(find_algorithm("ppo"), two)


def test_one_response_to_a_prompt_cannot_be_compared() -> None:
    message = refusal(find_algorithm("grpo"), quickstart())
    assert "rollout.samples_per_prompt: grpo compares the responses" in message
    assert "(given: 1)" in message


def test_a_kl_loss_without_a_reference_is_refused() -> None:
    message = refusal(find_algorithm("dapo"), quickstart("groups", "algorithm.kl_loss_coefficient=0.1"))
    assert "algorithm.kl_loss_coefficient: dapo works without a reference policy" in message


UNREAD = [
    ("grpo", "groups", "kl_reward_coefficient=0.1"),
    ("grpo", "groups", "kl_target=6"),
    ("grpo", "groups", "whiten_advantages=true"),
    ("grpo", "groups", "gamma=0.9"),
    ("grpo", "groups", "pretrain_coefficient=1"),
    ("grpo", "groups", "value_clip=1"),
    ("remax", "quickstart", "gamma=0.9"),
    ("reinforce_pp", "quickstart", "lam=0.9"),
    ("ppo", "quickstart", "pretrain_coefficient=1"),
    ("sft", "quickstart", "clip_high=0.1"),
]


@pytest.mark.parametrize(("name", "config", "setting"), UNREAD)
def test_a_key_that_an_algorithm_does_not_read_is_refused_with_those_it_does(
    name: str, config: str, setting: str
) -> None:
    found = find_algorithm(name)
    message = refusal(found, quickstart(config, f"algorithm.{setting}"))
    assert message.startswith(f"algorithm.{setting.partition('=')[0]}: {name} has no use for this; ")
    assert message.endswith(f"of [algorithm] it reads: {', '.join(sorted(found.reads or ()))}")


@pytest.mark.parametrize("name", ALL)
def test_an_algorithm_reads_what_it_has_defaults_for_and_nothing_unknown(name: str) -> None:
    found = find_algorithm(name)
    assert found.reads is not None
    assert found.defaults.keys() <= found.reads <= AlgorithmTable.model_fields.keys() - {"options"}


def test_every_shared_key_is_read_by_some_algorithm() -> None:
    read = {key for name in ALL for key in find_algorithm(name).reads or ()}
    assert read | {"options"} == AlgorithmTable.model_fields.keys()


def test_an_algorithm_that_does_not_say_what_it_reads_is_given_every_key() -> None:
    config = quickstart("groups", "algorithm.gamma=0.9", "algorithm.kl_target=6")
    assert declared.configure(config_with_cost(config)).algorithm.gamma == 0.9


TOGETHER = [
    (
        "reinforce_pp",
        ("algorithm.options.baseline=group",),
        r"rollout\.samples_per_prompt: baseline group compares .* at least 2 \(given: 1\)",
    ),
    (
        "dapo",
        (
            "rollout.samples_per_prompt=2",
            "rollout.max_response_tokens=8",
            "algorithm.options.overlong_buffer_tokens=9",
        ),
        r"overlong_buffer_tokens: must not be above rollout\.max_response_tokens, 8 \(given: 9\)",
    ),
    (
        "safe_rlhf",
        ("algorithm.options.initial_lambda=6",),
        r"initial_lambda: must not be above largest_lambda, 5 \(given: 6\)",
    ),
]


@pytest.mark.parametrize(("name", "settings", "words"), TOGETHER)
def test_options_that_do_not_go_together_are_refused(
    name: str, settings: tuple[str, ...], words: str
) -> None:
    config = quickstart("safe_rlhf" if name == "safe_rlhf" else "quickstart", *settings)
    assert re.search(words, refusal(find_algorithm(name), config))


def test_what_no_algorithm_could_run_with_is_refused_after_the_defaults_are_in() -> None:
    no_price = algorithm(services=("actor",), defaults={"kl_reward_coefficient": 0.0})(lambda run: None)
    config = quickstart().model_copy(
        update={"algorithm": type(quickstart().algorithm)(mini_batch_size=128, kl_target=1.0)}
    )
    assert "kl_reward_coefficient: an adaptive one" in refusal(no_price, config)


def test_a_plain_function_is_an_algorithm_with_all_services() -> None:
    ran = []
    found = Algorithm(ran.append)
    config = found.configure(quickstart())
    assert config.services == quickstart().services

    class Stub:
        pass

    run = Stub()
    found(run)  # type: ignore[arg-type]
    assert ran == [run]


def test_a_wrapped_function_is_called_as_the_wrapper_is() -> None:
    @wraps(Algorithm.configure)
    def wrapper(run: Run) -> None: ...

    assert Algorithm(wrapper).configure(quickstart())


async def asynchronous(run: Run) -> None: ...


def generator(run: Run) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Algorithm(lambda: None),
            r"algorithm <lambda>\(\) cannot be called with \(run\): too many positional",
        ),
        (
            Algorithm(lambda run, options: None),
            r"\(run, options\) cannot be called with \(run\): missing a required argument: 'options'; options are "
            "given where the decorator declares them",
        ),
        (
            Algorithm(lambda run: None, options=StrengthOptions),
            r"\(run\) cannot be called with \(run, options\): too many positional arguments$",
        ),
        (Algorithm(asynchronous), "algorithm asynchronous is async, and has to be a plain function"),
        (Algorithm(generator), "algorithm generator is a generator, and has to be a plain function"),
    ],
)
def test_a_function_that_cannot_be_called_with_a_run_is_refused(found: Algorithm, words: str) -> None:
    assert re.search(words, refusal(found, quickstart()))


def test_a_declaration_with_a_text_for_names_or_without_a_table_is_refused() -> None:
    with pytest.raises(TypeError, match=r"services: 'actor' is a text; one name is \('actor',\)"):
        algorithm(services="actor")
    with pytest.raises(TypeError, match=r"options of an algorithm must be a subclass of .*\.Strict"):
        algorithm(services=("actor",), options=dict)(lambda run: None)  # type: ignore[arg-type]


def test_an_algorithm_is_given_its_options() -> None:
    given = []
    found = algorithm(services=("actor",), options=StrengthOptions)(
        lambda run, options: given.append(options)
    )

    class Stub:
        config = found.configure(quickstart("quickstart", "algorithm.options.strength=2.5"))

    found(Stub())  # type: ignore[arg-type]
    assert given == [StrengthOptions(strength=2.5)]


def test_the_example_compares_with_the_best_and_the_mean_of_the_others() -> None:
    found: Advantage = compute_advantage(
        np.array([1.0, 0.0, 4.0, 2.0]), np.array([0, 0, 0, 0]), optimism=0.25
    )
    # 1 - 4/4 - 3/4 (0 + 4 + 2)/3, and so on.
    assert found.advantages.tolist() == pytest.approx(
        [-1.5, -1 - 0.75 * 7 / 3, 4 - 0.5 - 0.75, 1 - 0.75 * 5 / 3]
    )


def by_name(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Makes a package known that declares algorithms mine, broken and ppo."""
    (directory / "algorithms_of_mine.py").write_text("def mine(run): pass\nword = 'mine'\n")
    information = directory / "algorithms_of_mine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: algorithms-of-mine\nVersion: 1\n")
    points = "mine = algorithms_of_mine:mine\nbroken = no_module:f\nppo = algorithms_of_mine:mine\n"
    points += "word = algorithms_of_mine:word\n"
    (information / "entry_points.txt").write_text(f"[{algorithms.GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(directory))


def test_an_algorithm_of_an_installed_package_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name(monkeypatch, tmp_path)
    mine = find_algorithm("mine")
    assert mine.name == "mine"
    assert algorithms.reference_of(mine) == "algorithms_of_mine:mine"
    assert find_algorithm("algorithms_of_mine:mine").function is mine.function
    assert find_algorithm("ppo").services, "a name of this project is this project's"
    assert set(algorithms.known_names()) == {*ALL, "mine", "broken", "word"}
    for name, words in (
        (
            "min",
            r"algorithm 'min' is unknown; did you mean 'mine'\?; known: broken, cispo, .*, or module:object",
        ),
        ("broken", "algorithm 'no_module:f' cannot be imported: ModuleNotFoundError"),
        ("word", "algorithm 'word' is not a function"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_algorithm(name)


def test_an_algorithm_is_recorded_by_the_name_that_finds_it_again() -> None:
    class Callable:
        def __call__(self, run: Run) -> None: ...

    def inner(run: Run) -> None: ...

    assert algorithms.reference_of(find_algorithm("ppo")) == "ppo"
    assert algorithms.reference_of(algorithms.as_algorithm(useless)) == f"{__name__}:useless"
    assert algorithms.reference_of(algorithms.as_algorithm(Callable())).endswith(".Callable")
    assert algorithms.as_algorithm(Callable()).name == "Callable"
    inner.__module__ = "__main__"
    assert algorithms.reference_of(algorithms.as_algorithm(inner)).startswith("__main__:")
    own = Algorithm(lambda run: None)
    assert algorithms.as_algorithm(own) is own


def useless(run: Run) -> None:
    """An algorithm of no use."""


def test_an_error_has_the_line_of_a_users_algorithm() -> None:
    def joins(run: Run) -> None:
        FutureBatch.of(x=np.zeros(2)) | FutureBatch.of(y=np.zeros(3))  # type: ignore[reportUnusedExpression]

    with pytest.raises(RlhfError, match="batches of 2 and 3 rows") as raised:
        Algorithm(joins)(cast(Run, None))
    assert raised.value.__notes__ == [f"test_algorithm.py:{joins.__code__.co_firstlineno + 1}"]


def test_a_step_names_what_its_calls_lack() -> None:
    prompts = FutureBatch.of(prompt=["1+1="])
    step = Step(StepContext(1), lambda: (prompts, FutureBatch(1, {})), FutureBatch(1, {}))
    with pytest.raises(
        InvalidRequest, match="compute_advantage, step 1: the function returned ndarray, not Advantage"
    ):
        step.compute(np.asarray, [1.0])  # type: ignore[arg-type]
    made = step.compute(lambda: Advantage([0.5], {}))  # type: ignore[arg-type]
    assert made.columns.keys() == {"advantages"}
    for given in ((), (FutureBatch(0, {}),)):
        with pytest.raises(
            InvalidRequest, match=r"step\.finish has to get the batch that was trained on, first"
        ):
            step.finish(*given)


def test_an_exception_of_a_users_algorithm_is_one_line_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def divides(run: Run) -> None:
        raise ValueError("of \x1b[31m")

    with pytest.raises(
        RlhfError, match=r"^algorithm divides failed: ValueError: of \\x1b\[31m \(test_algorithm.py:\d+\)$"
    ):
        Algorithm(divides)(cast(Run, None))
    (record,) = caplog.records
    assert "in divides" in record.message
    assert record.message.endswith(r"ValueError: of \x1b[31m")
    assert "in __call__" not in record.message


def test_the_line_is_at_the_end_of_the_error_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = InvalidRequest("a column is missing")
    error.add_note("mine.py:3")
    with pytest.raises(SystemExit), errors_shown():
        raise error
    assert capsys.readouterr().err == "error: a column is missing (mine.py:3)\n"
