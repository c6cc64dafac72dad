"""Parts that the command lines of this project share: how errors end a command, files that it writes, the option
--set, addresses."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from rlhf.addresses import check_address
from rlhf.errors import ConfigError, RlhfError

USAGE_ERROR = 2
"""Exit code of a wrong command line or config."""

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of the config; repeatable.",
)


def address_given(context: click.Context, option: click.Parameter, address: str | None) -> str | None:
    """Callback of an argument or option HOST:PORT, which refuses a text that is none."""
    try:
        if address is not None:
            check_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    return address


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Context manager that ends the process with one line on stderr where its block fails or is interrupted: with
    `USAGE_ERROR` for a ConfigError, 1 for another RlhfError, and 128 + n for signal n. The line has the notes of an
    error at its end."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        click.echo(f"stopped by {signal.Signals(number).name}", err=True)
        sys.exit(128 + number)
    except RlhfError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        click.echo(f"error: {error}{notes}", err=True)
        sys.exit(USAGE_ERROR if isinstance(error, ConfigError) else 1)


class Commands(click.Group):
    """Commands whose errors are one line, as `errors_shown` prints it, and no traceback."""

    def invoke(self, ctx: click.Context) -> object:
        with errors_shown():
            return super().invoke(ctx)


def write_file(path: Path, text: str) -> None:
    """Writes a text to a file that the user has named, in directories that are made if they are missing. Raises
    ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
