"""The signatures that a reward function may have: ours, that of verl's rewards, and that of TRL's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhf.errors import ConfigError, InvalidRequest

Convention = Literal["ours", "verl", "trl"]

ACCEPTED = (
    "a reward function takes (prompt, response, ground_truth, metadata); with over_groups (prompt, responses, "
    "ground_truth, metadata); like verl's (data_source, solution_str, ground_truth, extra_info); or like TRL's "
    "(prompts, completions, **columns)"
)
"""Accepted signatures, for messages."""
TOKENS = "response_tokens"
"""Parameter of a function of any convention by which it asks for the number of tokens of the response, or of each."""
TEXTS = (
    "completions are texts; for lists of messages, as TRL gives functions for conversations, set "
    "{}.conversational = True"
)
"""Advice for a function of TRL, by its name, that reads texts as messages."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = ("prompts", "completions", "ground_truth")
_TRL_TRAINER = frozenset({"completion_ids", "environments", "log_extra", "log_metric", "trainer_state"})
"""Arguments that TRL's trainer gives, and that are not there where a service scores."""


def convention_of(function: Callable[..., Any]) -> Convention:
    """Returns the convention of a function, by the names of its parameters: verl's has `solution_str`; TRL's has
    `completions`, but neither `prompt` nor the attribute `over_groups`."""
    names = _parameters(function)
    if "solution_str" in names:
        return "verl"
    is_ours = "prompt" in names or getattr(function, "over_groups", False)
    return "trl" if "completions" in names and not is_ours else "ours"


def reads_messages(function: Callable[..., Any]) -> bool:
    """Returns whether a function of TRL reads conversations in place of texts: its parameter `completions` is annotated
    with dictionaries, as `list[list[dict[str, str]]]` of TRL's own rewards is, or it has the attribute
    `conversational`."""
    annotation = str(_parameters(function)["completions"].annotation)
    return "dict" in annotation.lower() or bool(getattr(function, "conversational", False))


def asks_for_tokens(function: Callable[..., Any]) -> bool:
    """Returns whether a function has a parameter `TOKENS`."""
    return TOKENS in _parameters(function)


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a function, or the `__call__` of an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def bound(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function with its options bound. One of verl then takes (prompt, response, ground truth, metadata); one
    of TRL takes (prompts, responses, ground truths, metadata), a list of each. One that `asks_for_tokens` also takes
    `TOKENS`, by name. What it returns is not changed.

    Args:
        name: Name of the function, for errors.
        function: The function.
        options: Keyword arguments of every call.

    Raises:
        ConfigError: The function does not take an option, or cannot be called by any convention; the text has the
            accepted signatures.
    """
    convention = convention_of(function)
    with contextlib.suppress(ValueError):  # a function without a signature, of an extension module
        _check(name, function, convention, options)
    if convention == "verl":
        return _from_verl(function, options)
    if convention == "trl":
        return _from_trl(name, function, options)
    return functools.partial(function, **options) if options else function


def _check(
    name: str, function: Callable[..., Any], convention: Convention, options: Mapping[str, Any]
) -> None:
    """Raises ConfigError as `bound` does, and ValueError if the function has no signature."""
    signature = inspect.signature(function)
    given = {"ours": (), "verl": _VERL, "trl": _TRL}[convention]
    asked = {TOKENS: 0} if asks_for_tokens(function) else {}
    known = {parameter.name for parameter in signature.parameters.values() if _is_option(parameter)} - {
        *given,
        TOKENS,
    }
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"options: {name} takes none named {', '.join(unknown)}, only: {', '.join(sorted(known)) or 'none'}"
        )
    try:
        if convention == "ours":
            signature.bind("", "", "", {}, **asked, **options)
        elif convention == "verl":
            signature.bind(**_taken(function, dict.fromkeys(given, "")), **asked, **options)
        elif missing := _TRL_TRAINER & _required(signature):
            raise TypeError(f"there is no {' and no '.join(sorted(missing))} here")
        else:
            columns = dict.fromkeys({*given, *asked, *_required(signature)} - options.keys())
            signature.bind(**_taken(function, columns), **options)
    except TypeError as error:
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        shown = signature.replace(parameters=plain, return_annotation=signature.empty)
        raise ConfigError(f"function: {name}{shown} cannot be called: {error}; {ACCEPTED}") from None


def _from_verl(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Adapts a reward of verl: passes arguments by name."""

    def score(
        prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], **tokens: int
    ) -> Any:
        given = {
            "data_source": metadata.get("data_source", ""),
            "solution_str": response,
            "ground_truth": _ground_truth(metadata, ground_truth),
            "extra_info": metadata.get("extra_info") or dict(metadata),
        }
        return function(**_taken(function, given), **tokens, **options)

    return score


def _ground_truth(metadata: Mapping[str, Any], text: str) -> Any:
    """Returns the ground truth in the metadata of a verl row if it is a list or a mapping, else `text`."""
    reward_model = metadata.get("reward_model")
    given = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return given if isinstance(given, list | Mapping) else text


def _from_trl(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Adapts a reward of TRL: passes one list per argument, by name. The columns are the fields of the metadata, with
    None for a row that lacks one. If it `reads_messages`, each prompt and each completion is a list of one message."""
    required = _required_or_none(function) - options.keys()
    asks_for_messages = reads_messages(function)

    def score(
        prompts: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        **tokens: Sequence[int],
    ) -> Any:
        fields = dict.fromkeys(field for row in metadata for field in row)
        columns = {field: [row.get(field) for row in metadata] for field in fields if field not in options}
        columns |= {
            "prompts": _messages("user", prompts) if asks_for_messages else list(prompts),
            "completions": _messages("assistant", responses) if asks_for_messages else list(responses),
            "ground_truth": list(ground_truths),
            **tokens,
        }
        if missing := sorted(required - columns.keys()):
            raise InvalidRequest(
                f"{name} needs {', '.join(missing)}; the rows have {', '.join(sorted(columns))}"
            )
        try:
            return function(**_taken(function, columns), **options)
        except TypeError as error:
            if not asks_for_messages and "string indices" in str(error):
                error.args = (f"{error}; {TEXTS.format(name.rpartition(':')[2] or name)}",)
            raise

    return score


def _messages(role: str, texts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text}] for text in texts]


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the given arguments that a function takes by name."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; none if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _required_or_none(function: Callable[..., Any]) -> set[str]:
    try:
        return _required(inspect.signature(function))
    except ValueError:
        return set()


def _required(signature: inspect.Signature) -> set[str]:
    """Returns the names of the parameters that a call by name has to give."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in variable
    }


def _is_option(parameter: inspect.Parameter) -> bool:
    """Whether options may set a parameter: it has a default, or is passed by its name alone."""
    return parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY
