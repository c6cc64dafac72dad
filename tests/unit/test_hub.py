"""Models on the Hugging Face hub, by the real huggingface_hub from a server on loopback (hub_server.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Hub
from huggingface_hub import snapshot_download

from deploy.launch import environment
from integration.harness import free_ports
from services.runtime import main
from settings.hub import commit_of, hub_model
from settings.hub_download import why
from settings.reference import ReferenceTable

pytestmark = pytest.mark.timeout(60)

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"pickled",
}
SCRIPT = """
import json, sys
from pathlib import Path
from rlhf.errors import ConfigError
from settings import hub
found = []
for model, within_s, files in json.loads(sys.argv[1]):
    try:
        found.append(str(hub.fetch(Path(model), "services.actor.model", within_s, getattr(hub, files))))
    except ConfigError as error:
        found.append(f"ConfigError: {error}")
    found.append(str(hub.local_directory(Path(model))))
print(json.dumps(found))
"""
"""Fetches models; prints for each its directory or the error, and its `local_directory` then."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    models = {
        "owner/tiny": FILES,
        "owner/gated": FILES,
        "owner/pickled": {"config.json": b"{}", "x.bin": b""},
    }
    with Hub(models, token="hf_right", gated=frozenset({"owner/gated"})).serving() as hub:
        yield hub


class Host:
    """A host with a cache of its own, and the hub that its processes know."""

    def __init__(self, directory: Path, url: str) -> None:
        self.cache, self.directory = directory / "hub", directory
        self.env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(directory), "HF_TOKEN": "hf_right",
                    "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
        self.env.pop("HF_HUB_OFFLINE", None)

    def start(self, asked: Sequence[tuple[str, float, str]], **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
        return subprocess.Popen(
            command, env={**self.env, **env}, cwd=self.directory, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def fetch(self, *asked: tuple[str, float, str], **env: str) -> list[str]:
        return self.end(self.start(asked, **env))

    @staticmethod
    def end(process: subprocess.Popen[str]) -> list[str]:
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        return json.loads(out)


@pytest.fixture
def host(tmp_path: Path, hub: Hub) -> Host:
    return Host(tmp_path, hub.url)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("owner/name", "owner/name@main"),
        ("owner/name-7B.v2@v1", "owner/name-7B.v2@v1"),
        ("owner/name@refs/pr/3", "owner/name@refs/pr/3"),
        ("name", None),
        ("runs/arithmetic/model", None),
        ("/owner/name", None),
        ("./name", None),
        ("../owner/name", None),
        ("owner/name@", None),
        ("owner/../name", None),
    ],
)
def test_a_model_on_the_hub_is_owner_slash_name_with_or_without_a_revision(
    model: str, named: str | None
) -> None:
    found = hub_model(Path(model))
    assert (None if found is None else str(found)) == named


def test_a_directory_that_exists_is_no_model_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub_model(Path("owner/name")) is None
    assert commit_of(tmp_path) is None


def test_the_ranks_of_a_service_load_the_directory_of_a_model_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = ReferenceTable(role="reference", address="127.0.0.1:1", model=Path("owner/tiny"))
    monkeypatch.setattr(main, "fetch", lambda model, key, within_s: tmp_path)
    assert main._with_local_model(table, "reference").model_directory == tmp_path
    at_home = table.model_copy(update={"model": tmp_path})
    assert main._with_local_model(at_home, "reference") is at_home


def test_a_model_is_downloaded_once_with_the_token_and_is_in_the_cache_without_network_then(
    host: Host, hub: Hub
) -> None:
    model, by_commit = ("owner/tiny@v1", 20.0, "WHOLE"), (f"owner/tiny@{COMMIT}", 20.0, "WHOLE")
    description, whole = ("owner/tiny@v1", 20.0, "DESCRIPTION"), [model, by_commit]
    directory, known, *again = host.fetch(description, *whole)
    assert {directory, known, *again} == {str(host.cache / f"models--owner--tiny/snapshots/{COMMIT}")}
    assert commit_of(Path(directory)) == COMMIT
    held = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    assert held == {name: data for name, data in FILES.items() if name != "pytorch_model.bin"}
    assert set(hub.downloads.values()) == {1}
    downloads = dict(hub.downloads)
    assert set(host.fetch(*whole, HF_HUB_OFFLINE="1")) == {directory}
    assert hub.downloads == downloads


def test_ranks_that_are_launched_download_their_model(
    host: Host, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    table = ReferenceTable(role="reference", address="127.0.0.1:1", model=Path("owner/tiny@v1"))
    directory, _ = host.fetch(("owner/tiny@v1", 20.0, "WHOLE"), **environment(table, "id") | host.env)
    assert Path(directory, "model.safetensors").is_file()
    at_home = table.model_copy(update={"model": tmp_path})
    assert environment(at_home, "id")["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("model", "revision", "token", "expected"),
    [
        (
            "owner/none",
            "main",
            "hf_right",
            "HUB has no owner/none, or shows it only to those whose HF_TOKEN may read it",
        ),
        (
            "owner/tiny",
            "main",
            "hf_wrong",
            "HUB has no owner/tiny, or shows it only to those whose HF_TOKEN may read it",
        ),
        ("owner/tiny", "v9", "hf_right", "owner/tiny has no revision 'v9'"),
        ("owner/gated", "main", "hf_right", "is gated: ask for access at HUB/owner/gated and set HF_TOKEN"),
    ],
)
def test_what_cannot_be_downloaded_is_told(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    revision: str,
    token: str,
    expected: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    with pytest.raises(Exception) as raised:
        snapshot_download(model, revision=revision, endpoint=hub.url, token=token, cache_dir=tmp_path)
    assert why(raised.value, model, revision).endswith(expected.replace("HUB", hub.url))


def test_a_failed_download_is_one_line_with_the_key_of_the_config(host: Host, hub: Hub) -> None:
    unknown, _, pickled, _ = host.fetch(("owner/none", 20.0, "WHOLE"), ("owner/pickled", 20.0, "WHOLE"))
    start = "ConfigError: services.actor.model: there is no directory owner/{0}, and the model owner/{0}@main on the "
    start += "Hugging Face hub "
    told = (
        f"cannot be read: {hub.url} has no owner/none, or shows it only to those whose HF_TOKEN may read it"
    )
    assert unknown == start.format("none") + told
    assert pickled == start.format("pickled") + "has no weights as *.safetensors"


def test_without_network_and_cache_one_line_says_so(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    host = Host(tmp_path, url)
    line, _ = host.fetch(("owner/tiny", 20.0, "WHOLE"))
    assert re.search(
        rf"owner/tiny@main .* is not in the cache {host.cache}, and {url} cannot be reached \(", line
    )
    assert "\n" not in line


@pytest.mark.slow
def test_processes_of_a_host_that_start_together_download_once_and_wait_until_their_deadlines(
    host: Host, hub: Hub
) -> None:
    """The processes hold the download for longer than one of them may wait."""
    hub.pause.clear()
    first = host.start([("owner/tiny", 30.0, "WHOLE")])
    deadline = time.monotonic() + 20
    while not hub.downloads["owner/tiny/model.safetensors"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    others: list[subprocess.Popen[Any]] = [host.start([("owner/tiny", 30.0, "WHOLE")])]
    line, _ = host.fetch(("owner/tiny", 0.5, "WHOLE"))
    assert line.endswith("was not downloaded within 0.5 s; another process of this host downloads it")
    hub.pause.set()
    directories = {host.end(each)[0] for each in (first, *others)}
    assert directories == {str(host.cache / f"models--owner--tiny/snapshots/{COMMIT}")}
    assert set(hub.downloads.values()) == {1}


def test_a_download_that_does_not_end_is_left_at_the_deadline(host: Host, hub: Hub) -> None:
    hub.pause.clear()
    line, _ = host.fetch(("owner/tiny", 1.0, "WHOLE"))
    assert line.endswith("owner/tiny@main on the Hugging Face hub was not downloaded within 1 s")
