"""Rewards that are Python functions of text: the built-in ones, and those of users, found by name."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError, InvalidRequest, encodable, full_traceback
from rlhf.plugins import PluginError, load_object
from rlhf.v1 import reward_pb2
from services.reward import mathematics, verifiers
from services.reward.groups import GroupFunction, group_fault
from services.reward.scorers.base import GaveUp, metadata_of, row_score

RewardFunction = Callable[[str, str, str, Mapping[str, Any]], float | Sequence[float]]
"""Maps (prompt, response, ground truth, metadata) to a score of the response, or to one score per response token."""


def exact_match(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Returns 1 if response and ground truth are equal except for whitespace at both ends, else 0. Raises ValueError
    where there is no ground truth."""
    if not ground_truth.strip():
        raise ValueError("the row has no ground truth")
    return float(response.strip() == ground_truth.strip())


def environment(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Returns the reward that the environment of an episode has given. Raises ValueError where it has given none."""
    if "environment_reward" not in metadata:
        raise ValueError(
            "rollout.environment has given no reward: its method reward is missing or returned None"
        )
    return float(metadata["environment_reward"])


BUILT_IN: dict[str, RewardFunction] = {
    "environment": environment,
    "exact_match": exact_match,
    "format": verifiers.form,
    "gsm8k": verifiers.gsm8k,
    "length": verifiers.length,
    "math": mathematics.math,
}
_logged: set[tuple[str, int]] = set()
"""File and line of each exception whose traceback was logged."""
for _function in BUILT_IN.values():
    if _function is not environment:
        _function.score_range = (0.0, 1.0)  # type: ignore[attr-defined]


def find_function(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Returns a reward function with its options bound: a `RewardFunction`, or a `GroupFunction` if `is_over_groups`. A
    function with the signature of verl's rewards is adapted.

    Args:
        name: Name of a built-in function, or "module:function".
        options: Keyword arguments of every call. Default: none.

    Raises:
        ConfigError: The function does not exist, cannot be imported, needs a package that is not installed, or does
            not take an option.
    """
    function = _find(name)
    module = required_module(name)
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(f"function: {name} needs {module}; pip install 'rlhf-cluster[{name}]'")
    if is_verl(function):
        adapted = _from_verl(function, options or {})
    else:
        adapted = functools.partial(function, **options) if options else function
    try:
        signature = inspect.signature(function)
    except ValueError:
        return adapted
    known = _options(signature)
    unknown = sorted(set(options or ()) - known)
    if unknown:
        raise ConfigError(
            f"options: {name} takes none named {', '.join(unknown)}, only: {', '.join(sorted(known)) or 'none'}"
        )
    return adapted


def truth_reader(name: str) -> Callable[[str], object] | None:
    """Returns the function that parses a ground truth, the attribute `read_truth` of a verifier; None for functions
    that are not verifiers, as those over groups. Raises ConfigError if there is no function `name`.

    A verifier runs in separate processes, since it may never return. It reads the ground truth first; if that fails,
    the row is an error. Any later failure is caused by the response, which scores 0.
    """
    return None if is_over_groups(name) else getattr(_find(name), "read_truth", None)


def warm_up(name: str) -> None:
    """Imports the modules that a built-in function needs, so that its first call is fast. Does nothing for others."""
    getattr(BUILT_IN.get(name), "warm_up", lambda: None)()


def score_range(name: str) -> tuple[float, float] | None:
    """Returns the lowest and the highest score of a function, its attribute `score_range`; None if it has none. Raises
    ConfigError if there is no function `name`."""
    return getattr(_find(name), "score_range", None)


def is_over_groups(name: str) -> bool:
    """Returns whether a function scores all responses to a prompt at once; see `groups.over_groups`. Raises ConfigError
    if there is no function `name`."""
    return bool(getattr(_find(name), "over_groups", False))


def required_module(name: str) -> str:
    """Returns the name of the optional module that a function needs, or "" if it needs none. Raises ConfigError
    if there is no function `name`."""
    return getattr(_find(name), "required_module", "")


def score_row(
    name: str, function: RewardFunction, row: reward_pb2.TextRow
) -> tuple[reward_pb2.RowScore, str]:
    """Scores a row; returns its score and "". If the function raises GaveUp, returns score 0 and the cause; for
    any other exception of the function, returns an error as the score, and "".

    Args:
        name: Name of the function, for errors.
        function: The function, from `find_function`.
        row: The row.
    """
    try:
        return row_score(function(row.prompt, row.response, row.ground_truth, metadata_of(row))), ""
    except GaveUp as cause:
        return reward_pb2.RowScore(score=0.0), str(cause)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the row carries it
        return _failure(name, error), ""


def score_group(
    name: str, function: GroupFunction, rows: Sequence[reward_pb2.TextRow]
) -> list[reward_pb2.RowScore]:
    """Scores the rows of a group; returns one score per row. An exception of the function, a wrong number of scores,
    or rows that differ in prompt, ground truth or metadata become the error of every row.

    Args:
        name: Name of the function, for errors.
        function: The function, from `find_function`.
        rows: The rows, at least one.
    """
    try:
        if fields := group_fault(rows):
            raise InvalidRequest(f"the rows of group {rows[0].group} differ in {fields}")
        first, responses = rows[0], [row.response for row in rows]
        scores = function(first.prompt, responses, first.ground_truth, metadata_of(first))
        if isinstance(scores, str | bytes | Mapping) or not isinstance(scores, Iterable):
            raise InvalidRequest(
                f"{name} returned {type(scores).__name__}, not a sequence with one score per response"
            )
        scores = list(scores)
        if len(scores) != len(rows):
            raise InvalidRequest(f"{name} returned {len(scores)} scores for {len(rows)} responses")
        return [row_score(score) for score in scores]
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the rows carry it
        return [_failure(name, error)] * len(rows)


def _failure(name: str, error: Exception) -> reward_pb2.RowScore:
    """Returns an exception of a function as the error of a row. Logs its traceback, in each process once for each
    line of code that raises."""
    if isinstance(error, InvalidRequest):
        return reward_pb2.RowScore(error=encodable(str(error)))
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = frame.f_code.co_filename, line
    if place not in _logged:
        _logged.add(place)
        logging.error("%s cannot score a row:\n%s", name, encodable(full_traceback(error)))
    return reward_pb2.RowScore(error=encodable(f"{name} raised {type(error).__name__}: {error}"))


def is_verl(function: Callable[..., Any]) -> bool:
    """Returns whether a function has the signature of verl's rewards: compute_score(data_source, solution_str,
    ...)."""
    try:
        return "solution_str" in inspect.signature(function).parameters
    except ValueError:
        return False


def _from_verl(function: Callable[..., Any], options: Mapping[str, Any]) -> RewardFunction:
    """Adapts a reward of verl: passes arguments by name; of a returned dictionary, takes the value of "score"."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}

    def score(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
        given = {
            "data_source": metadata.get("data_source", ""),
            "solution_str": response,
            "ground_truth": _ground_truth(metadata, ground_truth),
            "extra_info": metadata.get("extra_info") or dict(metadata),
        }
        verdict = function(**{name: x for name, x in given.items() if takes_all or name in names}, **options)
        return verdict["score"] if isinstance(verdict, Mapping) else verdict

    return score


def _ground_truth(metadata: Mapping[str, Any], text: str) -> Any:
    """Returns the ground truth in the metadata of a verl row if it is a list or a mapping, else `text`."""
    reward_model = metadata.get("reward_model")
    given = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return given if isinstance(given, list | Mapping) else text


def _options(signature: inspect.Signature) -> set[str]:
    """Returns the names of the parameters that have a default, which are those that options can set."""
    return {
        name for name, parameter in signature.parameters.items() if parameter.default is not parameter.empty
    }


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(
            f"function: {name!r} is neither module:function nor one of: {', '.join(sorted(BUILT_IN))}"
        )
    try:
        function = load_object(name, object)
    except PluginError as error:
        raise ConfigError(f"function: {error}") from error
    if not callable(function):
        raise ConfigError(f"function: {name!r} is not callable")
    return function
