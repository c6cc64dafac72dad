"""Models on the Hugging Face hub: which values of `model` name one, and their files in the cache of huggingface_hub.

`model` is a directory. Where there is none, a text of the form owner/name or owner/name@revision names a model on the
hub. Cache (HF_HOME), token (HF_TOKEN, or that of `hf auth login`), HF_ENDPOINT and HF_HUB_OFFLINE are those of
huggingface_hub, which is imported at the first use alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import ConfigError

_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the files without weights: config, tokenizer and chat template."""
WHOLE = (*DESCRIPTION, "*.safetensors")
"""Patterns of the files of a model that is loaded."""
POLL_S = 0.2


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        name: owner/name.
        revision: Branch, tag or commit.
    """

    name: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def hub_model(model: Path) -> HubModel | None:
    """Returns the model on the hub that a value of `model` names; None for a directory that exists, and for what can be
    none but a directory."""
    found = _NAME.fullmatch(str(model))
    if found is None or model.exists():
        return None
    return HubModel(found["name"], found["revision"] or "main")


def local_directory(model: Path) -> Path:
    """Returns the directory of a model on this host: `model` itself, or the hub's snapshot in the cache. `model` also
    where there is neither. Uses no network."""
    named = hub_model(model)
    if named is None:
        return model
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return model
    config = try_to_load_from_cache(named.name, "config.json", revision=named.revision)
    return Path(config).parent if isinstance(config, str) else model


def directory_problem(model: Path) -> str:
    """Returns why a path is no directory of a model on this host: it does not exist, or has no config.json. Empty for a
    directory with one."""
    if (model / "config.json").is_file():
        return ""
    relative = "" if model.is_absolute() else f" (relative to the working directory {Path.cwd()})"
    problem = f"directory {model} has no config.json" if model.is_dir() else f"there is no directory {model}"
    return f"{problem}{relative}"


def commit_of(directory: Path) -> str | None:
    """Returns the commit of a snapshot in the cache, given its directory; None for other directories."""
    return directory.name if directory.parent.name == "snapshots" else None


def fetch(model: Path, key: str, within_s: float, files: Sequence[str] = WHOLE) -> Path:
    """Returns the directory of a model on this host. One that is on the hub is downloaded into the cache first, unless
    it is there; of the processes of this host that ask for it at the same time one does so, and the others wait.

    Args:
        model: Value of `model`.
        key: Key of the config that has it, for messages.
        within_s: Longest time, in seconds.
        files: Patterns of the files that are needed.

    Raises:
        ConfigError: The model cannot be downloaded, or not in time. The text is one line that says why.
    """
    named = hub_model(model)
    if named is None:
        return model
    deadline = time.monotonic() + within_s
    where = f"{key}: there is no directory {model}, and the model {named} on the Hugging Face hub"
    late = f"{where} was not downloaded within {within_s:g} s"
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise ConfigError(f"{where} cannot be downloaded: {error}; pip install huggingface_hub") from error
    with _alone(named, Path(constants.HF_HUB_CACHE), deadline, late):
        directory = _download(named, files, deadline, where, late)
    if files is WHOLE and not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{where} has no weights as *.safetensors")
    return directory


def _download(named: HubModel, files: Sequence[str], deadline: float, where: str, late: str) -> Path:
    """Downloads files of a model, in a process of its own, which the deadline ends; returns their directory. Raises
    ConfigError where that fails, beginning with `where`, or with the text `late` at the deadline."""
    command = [
        sys.executable,
        "-m",
        "settings.hub_download",
        named.name,
        named.revision,
        str(os.getpid()),
        *files,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 0.1)
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(late) from None
    said = (
        done.stdout.strip() or done.stderr.strip() or f"ended with status {done.returncode}"
    ).splitlines()[-1]
    if done.returncode != 0:
        raise ConfigError(f"{where} {said}")
    return Path(said)


@contextlib.contextmanager
def _alone(named: HubModel, cache: Path, deadline: float, late: str) -> Iterator[None]:
    """Context manager that one process of this host at a time enters for a model. Raises ConfigError with the text
    `late` where it is not entered by the deadline. The kernel frees the lock of a process that has died."""
    path = cache / ".locks" / f"rlhf-{named.name.replace('/', '--')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise ConfigError(f"{late}: the cache cannot be written: {error}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{late}; another process of this host downloads it") from None
                time.sleep(POLL_S)
        yield
