"""The form that prompts of the data get: a template around the question, a system message, and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from controller.config.data import QUESTION
from controller.data.conversations import keys_beside_content
from controller.data.malformed import MalformedRow, check_text
from rlhf.errors import ConfigError


class Renderer(Protocol):
    """Protocol of chat templates; see `controller.data.chat.Chat`."""

    def render(self, messages: Any, tools: Any = None) -> str: ...

    def turn(self, messages: Any, message: Mapping[str, Any], tools: Any = None) -> str: ...


class NoTemplate(ConfigError):
    """Raised where there is no chat template to render a conversation with."""


class NoTokenizer(ConfigError):
    """Raised where the directory of the model whose chat template renders prompts does not exist."""


@dataclass(frozen=True)
class NoRenderer:
    """Stands for the chat template where there is none: renders nothing, and raises what `error` returns."""

    error: Callable[[], ConfigError] = lambda: NoTemplate(
        "there is no chat template: give data.tokenizer, or a service with a model"
    )

    def render(self, messages: Any, tools: Any = None) -> str:
        raise self.error()

    def turn(self, messages: Any, message: Mapping[str, Any], tools: Any = None) -> str:
        raise self.error()


class ResponseEnds(Protocol):
    """Protocol of the ends of responses to conversations; see `controller.data.response_end.TemplateEnds`."""

    def usual(self) -> str: ...

    def split(self, turn: str) -> tuple[str, str]: ...


class EosEnds:
    """Ends of responses by the EOS token of the tokenizer."""

    def usual(self) -> str:
        return ""

    def split(self, turn: str) -> tuple[str, str]:
        return turn, ""


@dataclass(frozen=True)
class PromptForm:
    """Form of the prompts of a source.

    Attributes:
        renderer: Chat template, which renders conversations.
        ends: Ends of responses to conversations.
        chat: Whether a prompt that is a text becomes a conversation, as one message of the user.
        system: System message that begins conversations without one; empty: none.
        template: Text around the question, whose place is `{prompt}`; empty: the question alone.
    """

    renderer: Renderer = field(default_factory=NoRenderer)
    ends: ResponseEnds = field(default_factory=EosEnds)
    chat: bool = False
    system: str = ""
    template: str = ""

    def prepare(self, given: Any) -> str | list[Any]:
        """Returns the prompt of a row with template and system message: a text, or a conversation to be rendered.

        Raises:
            MalformedRow: It is neither, or empty; a conversation has no text of the user for the template; or a text
                would need a system message.
        """
        if given and isinstance(given, list):
            return self._with_system(self._with_template(given))
        check_text(given, "prompt")
        text = self._filled(given)
        if self.chat:
            return self._with_system([{"role": "user", "content": text}])
        if self.system:
            raise MalformedRow(
                "prompt is a text, which has no place for a system message (data.system); data.chat = true makes it a "
                "conversation"
            )
        return text

    def text(self, prepared: str | list[Any], given: Any, tools: Any = None) -> str:
        """Returns a prepared prompt as text; conversations are rendered.

        Args:
            prepared: The prompt, as `prepare` returned it.
            given: What `prepare` made it of, for messages.
            tools: JSON schemas of the tools of the conversation. Default: those of the chat options.

        Raises:
            MalformedRow: There is no chat template, or it cannot render the conversation.
            NoTokenizer: The directory of the model that should have it does not exist, whatever the row.
        """
        if isinstance(prepared, str):
            return prepared
        try:
            text = self.renderer.render(prepared, tools)
        except NoTokenizer:
            raise
        except NoTemplate as error:
            why = "data.chat is true" if isinstance(given, str) else "the prompt is a list of messages"
            raise MalformedRow(f"prompt: {error}; {why}, which needs one") from None
        except ConfigError as error:
            raise MalformedRow(f"prompt: {error}") from None
        check_text(text, "prompt")
        return text

    def response(
        self, prepared: str | list[Any], message: Mapping[str, Any], name: str, tools: Any = None
    ) -> tuple[str, str]:
        """Renders a message of the assistant with tool calls or thinking as the response to a prepared prompt. Returns
        its text and what ends it; an empty end: the EOS token of the tokenizer.

        Args:
            prepared: The prompt, as `prepare` returned it, which could be rendered.
            message: The message.
            name: Field with the message, for messages of errors.
            tools: As in `text`.

        Raises:
            MalformedRow: The prompt is a text; or the chat template cannot render the message after it, or leaves out
                its tool calls or thinking.
        """
        shown = keys_beside_content(message)
        # A response may be in field messages.
        last = "the last message" if name == "response" else f"{name}: the last message"
        if isinstance(prepared, str):
            raise MalformedRow(
                f"{last} has {shown[0][0]}, which the chat template renders, and the prompt is a text; "
                "data.chat = true makes it a conversation"
            )
        try:
            turn = self.renderer.turn(prepared, message, tools)
            for keys in shown:
                without = {key: value for key, value in message.items() if key not in keys}
                if self._turn_or_nothing(prepared, without, tools) == turn:
                    raise MalformedRow(
                        f"{last} has {keys[0]}, which the chat template leaves out, so that it would not be trained; "
                        "write it into the content, in the form that the model has to learn"
                    )
        except ConfigError as error:
            raise MalformedRow(f"{last}: {error}") from None
        text, end = self.ends.split(turn)
        check_text(text, f"{last}, rendered,")
        return text, end

    def _turn_or_nothing(self, prepared: list[Any], message: Mapping[str, Any], tools: Any) -> str:
        """Returns a message as its template renders it; an empty text where it refuses to."""
        try:
            return self.renderer.turn(prepared, message, tools)
        except ConfigError:
            return ""

    def _filled(self, question: str) -> str:
        if not self.template:
            return question
        before, _, after = self.template.partition(QUESTION)
        return f"{before}{question}{after}"

    def _with_template(self, messages: list[Any]) -> list[Any]:
        """Returns messages with the template around the last one of the user."""
        if not self.template:
            return messages
        for number in reversed(range(len(messages))):
            message = messages[number]
            if isinstance(message, dict) and message.get("role") == "user":
                check_text(message.get("content"), "prompt: content of the last message of the user")
                filled = {**message, "content": self._filled(message["content"])}
                return [*messages[:number], filled, *messages[number + 1 :]]
        raise MalformedRow("prompt has no message of the user, around which the template could be put")

    def _with_system(self, messages: list[Any]) -> list[Any]:
        """Returns messages with the system message before them, unless they begin with one of their own."""
        first = messages[0]
        if not self.system or (isinstance(first, dict) and first.get("role") == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]
