"""The form that prompts of the data get: a template around the question, a system message, and the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.config.data import QUESTION
from controller.data.malformed import MalformedRow, check_text
from rlhf.errors import ConfigError

Render = Callable[[Any], str]
"""Function that renders a conversation, a list of messages, as text."""


class NoTemplate(ConfigError):
    """Raised where there is no chat template to render a conversation with."""


class NoTokenizer(ConfigError):
    """Raised where the directory of the model whose chat template renders prompts does not exist."""


def no_template(messages: Any) -> str:
    """Raises NoTemplate; stands for the render function where no chat template is configured."""
    raise NoTemplate("there is no chat template: give data.tokenizer, or a service with a model")


@dataclass(frozen=True)
class PromptForm:
    """Form of the prompts of a source.

    Attributes:
        render: Function that renders conversations.
        end: Function that returns the text with which the chat template ends a response to a conversation; empty: the
            EOS token of the tokenizer ends it.
        chat: Whether a prompt that is a text becomes a conversation, as one message of the user.
        system: System message that begins conversations without one; empty: none.
        template: Text around the question, whose place is `{prompt}`; empty: the question alone.
    """

    render: Render = no_template
    end: Callable[[], str] = str
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

    def text(self, prepared: str | list[Any], given: Any) -> str:
        """Returns a prepared prompt as text; conversations are rendered.

        Args:
            prepared: The prompt, as `prepare` returned it.
            given: What `prepare` made it of, for messages.

        Raises:
            MalformedRow: There is no chat template, or it cannot render the conversation.
            NoTokenizer: The directory of the model that should have it does not exist, whatever the row.
        """
        if isinstance(prepared, str):
            return prepared
        try:
            text = self.render(prepared)
        except NoTokenizer:
            raise
        except NoTemplate as error:
            why = "data.chat is true" if isinstance(given, str) else "the prompt is a list of messages"
            raise MalformedRow(f"prompt: {error}; {why}, which needs one") from None
        except ConfigError as error:
            raise MalformedRow(f"prompt: {error}") from None
        check_text(text, "prompt")
        return text

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
