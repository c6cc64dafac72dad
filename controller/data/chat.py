"""Chat templates and token counts on the controller, from the files of a model directory, without transformers.

Needs jinja2 and tokenizers, of the extra `data`, where a template is rendered or tokens are counted.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from controller.data.prompt_form import NoTemplate
from controller.data.readers import required
from controller.data.tool_calls import with_parsed_arguments
from rlhf.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
"""A conversation: a list of messages, which are dictionaries with keys `role` and `content`."""
Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools of a conversation; None: those of the template's options, if any."""

SAID = "<<response>>"
"""Stands for a response where the text after it is rendered."""
BEGUN: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}]
"""A conversation up to such a response."""
TEMPLATE, TOKENIZER, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
TOOL_USE, TOOL_TEMPLATE = "tool_use", "additional_chat_templates/tool_use.jinja"
"""Name and file of a model's second template, for conversations with tools."""
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
"""File that sets special tokens where `TOKENIZER_CONFIG` is of a transformers before 4.34."""
FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, TEMPLATE, TOOL_TEMPLATE)
"""All files of a model directory that prompts depend on."""
SAFE_JINJA2 = (3, 1, 6)
"""First version of jinja2 whose sandbox has no known way out: a template of a model must not run code here."""


class Chat:
    """Renders conversations with a model's chat template, and counts tokens with its tokenizer. Files are read when
    they are first needed.

    Args:
        directory: Model directory with chat_template.jinja, tokenizer_config.json and tokenizer.json, in an older
            format also special_tokens_map.json.
        now_unix_s: Unix time in seconds that the template function `strftime_now` formats, in UTC: the start of the
            run, so that a run that is continued on another day has the same prompts. Default: now.
        options: Further variables of the template by name, such as enable_thinking. With `tools`, also those
            of a conversation, a model that has a template `tool_use` renders by that one, as in transformers. Default:
            none.
    """

    def __init__(
        self,
        directory: Path,
        now_unix_s: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._options = dict(options or {})
        self._now = datetime.fromtimestamp(time.time() if now_unix_s is None else now_unix_s, UTC)
        self._templates: dict[bool, Any] = {}

    def render(self, messages: Messages, tools: Tools = None) -> str:
        """Renders a conversation up to the response, as transformers' `apply_chat_template` does with
        `add_generation_prompt=True`. A BOS token at its start is removed where the tokenizer adds one itself.
        Arguments of tool calls that are a JSON text are rendered as the object in it, as vLLM's server does.

        Raises:
            NoTemplate: The model has no chat template.
            ConfigError: The template cannot render the conversation.
        """
        text = self._rendered(messages, tools)
        begin = self._special.get("bos_token", "")
        return text.removeprefix(begin) if begin and self._adds_bos else text

    def turn(self, messages: Messages, message: Mapping[str, Any], tools: Tools = None) -> str:
        """Renders what a message of the assistant adds to the prompt that `render` returns for the messages before it:
        its content, tool calls and thinking, and what ends it.

        Raises:
            ConfigError: As `render`; or the text of the conversation with the message does not begin with the prompt.
        """
        begun, whole = (
            self._rendered(messages, tools),
            self._rendered([*messages, message], tools, is_open=False),
        )
        if not whole.startswith(begun):
            raise ConfigError(
                f"the chat template of {self._directory} renders the messages before this one in another way than as a "
                "prompt, so that the text of the message alone cannot be told; write it into the content"
            )
        return whole[len(begun) :]

    def continuation(self, messages: Messages, tools: Tools = None) -> str:
        """Renders what follows the content of a message of the assistant where `messages` come after it, up to the next
        response: the end of that message, the messages, and the head of the response. It is the difference of two
        renderings, so it does not depend on what was said before.

        Raises:
            ConfigError: The model has no chat template, it cannot render the messages, or it does not render
                conversations so that messages are only added.
        """
        alone = self._rendered(BEGUN, tools, is_open=False)
        whole = self._rendered([*BEGUN, *messages], tools)
        # The first: messages may contain the text as well.
        _, found, end = alone.partition(SAID)
        _, found_again, rest = whole.partition(SAID)
        if not (found and found_again and rest.startswith(end)):
            raise ConfigError(
                f"the chat template of {self._directory} renders a message of the assistant in another way where "
                "others follow it, so that a response cannot be continued; have the environment return a text instead"
            )
        return rest

    def ends_of_message(self) -> list[str]:
        """Returns the special tokens that the template puts after the content of a message of the assistant, in their
        order; none where it ends the message without one.

        Raises:
            ConfigError: The model has no chat template or tokenizer, or the template cannot render a conversation of
                two messages.
        """
        end = self._after_message()
        return sorted((token for token in self._special_tokens if token in end), key=end.index)

    def end_of_response(self, eos_ids: Set[int]) -> str:
        """Returns the text that ends a response as the template ends the content of a message of the assistant: up to
        the first special token that is an EOS token, at which generation stops, or else up to the first special token.
        Empty where the template ends messages without one. Raises ConfigError as `ends_of_message`.

        Args:
            eos_ids: Ids of the EOS tokens of the model.
        """
        tokens = self.ends_of_message()
        last = next((token for token in tokens if self.token_id(token) in eos_ids), next(iter(tokens), ""))
        before, _, _ = self._after_message().partition(last) if last else ("", "", "")
        return before + last

    def split_turn(self, turn: str, eos_ids: Set[int]) -> tuple[str, str]:
        """Splits a text that `turn` returned into the response and what ends it: that of `end_of_response` where the
        template ends this message as others, or else the first EOS token in it, or a special token at its end. The end
        is empty where there is none. Raises ConfigError as `ends_of_message`.

        Args:
            turn: The text.
            eos_ids: Ids of the EOS tokens of the model.
        """
        after, usual = self._after_message(), self.end_of_response(eos_ids)
        if usual and turn.endswith(after):
            return turn.removesuffix(after), usual
        found = [token for token in self._special_tokens if token in turn]
        if stops := [token for token in found if self.token_id(token) in eos_ids]:
            first = min(stops, key=turn.index)
            return turn[: turn.index(first)], first
        last = max(found, key=turn.rindex, default="")
        before, _, rest = turn.rpartition(last) if last else (turn, "", turn)
        return (before, last) if not rest.strip() else (turn.removesuffix(after), "")

    def _after_message(self) -> str:
        """Renders what follows the content of a message of the assistant that is the last of a conversation."""
        return self._rendered(BEGUN, is_open=False).partition(SAID)[2]

    @property
    def eos_token(self) -> str:
        """EOS token of the tokenizer; empty where it has none. Reading it raises ConfigError where its files cannot be
        read."""
        return self._special.get("eos_token", "")

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token; None where the tokenizer does not have it. Raises ConfigError as `count`."""
        return self._tokenizer.token_to_id(token)

    def _rendered(self, messages: Messages, tools: Tools = None, *, is_open: bool = True) -> str:
        tools = self._options.get("tools") if tools is None else tools
        template = self._template(has_tools=tools is not None)
        given = {"documents": None, **self._special, **self._options, "tools": tools}
        given["add_generation_prompt"] = is_open
        parsed = with_parsed_arguments(messages)
        # Some templates, as that of DeepSeek-V3, take the arguments of a call as a JSON text alone.
        forms = [parsed] if parsed is messages else [parsed, messages]
        errors = []
        for form in forms:
            try:
                return template.render({**given, "messages": form})
            except Exception as error:  # noqa: BLE001 - a template calls methods of texts and lists, which raise anything
                errors.append(error)
        raise ConfigError(f"the chat template of {self._directory} refuses it: {errors[0]}")

    def count(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text, special tokens included.

        Raises:
            ConfigError: The model directory has no tokenizer.json, or it cannot be read.
        """
        return [len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = required("tokenizers", "counting tokens")
        path = self._directory / TOKENIZER
        if not path.is_file():
            raise ConfigError(f"{self._directory} has no tokenizer.json, by which tokens are counted")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}") from None
        # The file has the settings of the last call before it was saved; services ignore them, as transformers does.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _adds_bos(self) -> bool:
        begin = self._special["bos_token"]
        return self._tokenizer.encode("").tokens[:1] == [begin]

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._table(TOKENIZER_CONFIG)

    @cached_property
    def _special(self) -> dict[str, str]:
        given, extra = dict(self._config), self._config.get("extra_special_tokens")
        if "added_tokens_decoder" not in given and (self._directory / SPECIAL_TOKENS_MAP).is_file():
            given |= self._table(SPECIAL_TOKENS_MAP)
        given = {name: token for name, token in given.items() if name.endswith("_token")}
        given |= extra if isinstance(extra, dict) else {}
        # A token is a text, or a table with its text and the rules for splitting it.
        texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in given.items()}
        return {name: text for name, text in texts.items() if text and isinstance(text, str)}

    def _table(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def _template(self, *, has_tools: bool) -> Any:
        if has_tools not in self._templates:
            self._templates[has_tools] = _compile(self._template_text(has_tools=has_tools), self._now)
        return self._templates[has_tools]

    def _template_text(self, *, has_tools: bool) -> str:
        for name in (TOOL_TEMPLATE, TEMPLATE) if has_tools else (TEMPLATE,):
            file = self._directory / name
            if file.is_file():
                return file.read_text(encoding="utf-8")
        given = self._config.get("chat_template")
        if isinstance(given, list):
            named = {entry["name"]: entry["template"] for entry in given}
            given = named.get(TOOL_USE if has_tools and TOOL_USE in named else "default")
        if not given:
            raise NoTemplate(
                f"{self._directory} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json)"
            )
        return given


def _compile(text: str, now: datetime) -> Any:
    """Compiles a chat template in a sandboxed jinja2 environment with the filters and functions that transformers
    offers.

    Raises:
        ConfigError: The template is not valid, or jinja2 is older than `SAFE_JINJA2`.
    """
    jinja2 = required("jinja2", "chat templates")
    installed = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < SAFE_JINJA2:
        raise ConfigError(
            f"chat templates: jinja2 {installed} has known ways out of its sandbox, by which a model's template runs "
            "code; upgrade it: pip install 'jinja2>=3.1.6'"
        )
    sandbox, extensions = (
        required("jinja2.sandbox", "chat templates"),
        required("jinja2.ext", "chat templates"),
    )

    class GenerationTag(extensions.Extension):
        """Jinja2 extension for the tag `{% generation %}`, which marks messages of the assistant; leaves the text as
        it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, extensions.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template cannot be read: {error}") from None
