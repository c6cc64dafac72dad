"""Services that cannot run on this host are refused before any of them is started."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from controller.config.config import load
from deploy import preflight
from nccl_transfer import registry
from rlhf.errors import ConfigError
from settings.services import Service
from settings.transports import TRANSPORT_GROUP, TRANSPORTS

QUICKSTART = Path(__file__).parent.parent.parent / "deploy" / "quickstart" / "quickstart.toml"


@pytest.mark.parametrize(
    ("package", "setting", "expected"),
    [
        ("torch", "run.seed=1", "torch is not installed"),
        (
            "deepspeed",
            "services.critic.engine=zero",
            r"services\.critic\.engine: zero needs deepspeed, which is not installed; install it: pip",
        ),
        (
            "vllm",
            "services.actor.rollout_engine=vllm",
            r"services\.actor\.rollout_engine: vllm needs vllm, which is not installed; docs/rollout",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_key_that_asks_for_it(
    package: str, setting: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str) -> object:
        return None if name == package else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match=expected):
        preflight.check(load(QUICKSTART, (setting,)), ["actor", "critic"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"config.json": "{"}, r"config\.json cannot be read: Expecting"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": None},
            r"model has no files of a tokenizer, such as tokenizer\.json",
        ),
        ({"model.safetensors": None}, r"model has no weights as \*\.safetensors$"),
        (
            {"model.safetensors": None, "pytorch_model.bin": ""},
            r"no weights as \*\.safetensors; pytorch_model\.bin is not read: load it with transformers, and save it",
        ),
        (
            {"model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"},
            r"model\.safetensors is a pointer of Git LFS in place of the weights, which `git lfs pull` downloads",
        ),
        (
            {
                "model.safetensors.index.json": '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            },
            r"model has no model-2\.safetensors, which model\.safetensors\.index\.json names",
        ),
    ],
    ids=["config", "tokenizer", "weights", "pickled weights", "git lfs", "one of several files"],
)
def test_files_that_a_model_directory_lacks_are_told(
    changes: dict[str, str | None], expected: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    whole = {
        "config.json": "{}",
        "tokenizer_config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "",
    }
    for name, text in {**whole, **changes}.items():
        if text is not None:
            (model / name).write_text(text)
    table = load(QUICKSTART, (f"services.critic.model='{model}'",)).services["critic"]
    with pytest.raises(ConfigError, match=rf"^services\.critic\.model: .*{expected}"):
        preflight.check_model_files("critic", table)
    for name, text in whole.items():
        (model / name).write_text(text)
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    preflight.check_model_files("critic", table)


def test_a_link_of_the_hubs_cache_to_weights_that_are_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    table = load(QUICKSTART, (f"services.critic.model='{tmp_path}'",)).services["critic"]
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: No such file"):
        preflight.check_model_files("critic", table)


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "address"), ("[::1]", "address"), ("[::]", "bind_host")]
)
def test_a_port_in_use_is_named_with_the_key_that_says_the_host(host: str, shown: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as listener:
        port = listener.getsockname()[1]
        keys = {"address": f"{host if shown == 'address' else '[::1]'}:{port}", "bind_host": ""}
        if shown == "bind_host":
            keys["bind_host"] = host
        table = load(QUICKSTART).services["actor"].model_copy(update=keys)
        with pytest.raises(ConfigError) as caught:
            preflight.check_address("actor", table)
    assert str(caught.value).startswith(
        f"services.actor.{shown}: {host}:{port} is in use; where services of the config run already, "
        "start rlhf-controller without --launch"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]", "0.0.0.0", "localhost"])
def test_a_port_that_is_free_can_be_served(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    keys = {"address": f"127.0.0.1:{port}", "bind_host": host}
    preflight.check_address("actor", load(QUICKSTART).services["actor"].model_copy(update=keys))


def test_a_service_that_asks_for_no_package_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, table in load(QUICKSTART).services.items():
        preflight.check_engines(name, table)


def test_a_service_that_other_hosts_reach_is_refused_without_certificates(certificates: Path) -> None:
    def check(*settings: str) -> None:
        preflight.check(
            load(QUICKSTART, (f"services.reward.address=127.0.0.1:{free_port()}", *settings)), ["reward"]
        )

    everywhere = "services.reward.bind_host=0.0.0.0"
    check()
    with pytest.raises(ConfigError, match=r"services\.reward\.bind_host: other hosts reach 0\.0\.0\.0"):
        check(everywhere)
    check(everywhere, "security.allow_plaintext=true")
    files = {"ca": "ca.pem", "certificate": "service.pem", "key": "service.key"}
    check(everywhere, *(f"security.{key}={certificates.parent / name}" for key, name in files.items()))


def test_a_missing_certificate_is_named_before_anything_starts(tmp_path: Path) -> None:
    files = (f"security.{key}={tmp_path / key}" for key in ("ca", "certificate", "key"))
    config = load(QUICKSTART, (f"services.reward.address=127.0.0.1:{free_port()}", *files))
    with pytest.raises(ConfigError, match=f"security: {tmp_path}/ca: No such file or directory"):
        preflight.check(config, ["reward"])


def test_a_transport_that_is_unknown_is_named_with_the_known_ones() -> None:
    def check(name: str) -> None:
        settings = (
            f"services.reward.transports=['{name}']",
            f"services.reward.address='127.0.0.1:{free_port()}'",
        )
        preflight.check(load(QUICKSTART, settings), ["reward"])

    with pytest.raises(
        ConfigError,
        match=r"^services\.reward\.transports: 'tpc' is unknown; did you mean 'tcp'\?; known: cuda_ipc, ",
    ):
        check("tpc")
    for name in (*TRANSPORTS, "package.module:transport"):
        check(name)


def test_the_names_of_transports_are_those_of_the_data_plane() -> None:
    assert (registry.GROUP, tuple(registry.BUILT_IN)) == (TRANSPORT_GROUP, TRANSPORTS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("127.0.0.1", ""), ("localhost", "127.0.0.1")),
        (("127.0.0.1", ""), ("node", "0.0.0.0")),
        (("node", "[::]"), ("127.0.0.1", "")),
        (("node", "[::]"), ("node-2", "0.0.0.0")),
    ],
)
def test_two_services_on_one_port_are_refused_under_whatever_names(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    def table(host: str, bind_host: str) -> Service:
        keys = {"address": f"{host}:7101", "bind_host": bind_host}
        return load(QUICKSTART).services["actor"].model_copy(update=keys)

    services = {"actor": table(*one), "critic": table(*other)}
    with pytest.raises(
        ConfigError, match=r"^services\.critic\..*:7101 is taken by services\.actor, which listens on"
    ):
        preflight.check_ports(services)


def test_services_on_ports_or_addresses_of_their_own_are_apart() -> None:
    hosts = ("127.0.0.1:7101", "127.0.0.2:7101", "[::1]:7101", "127.0.0.1:7102")
    table = load(QUICKSTART).services["actor"]
    preflight.check_ports({host: table.model_copy(update={"address": host}) for host in hosts})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("settings", "key", "variable"),
    [
        (
            ("kind=http", 'http.urls=["http://127.0.0.1:1/"]', "http.header_variables.X-Key=NO_SUCH_KEY"),
            "http.header_variables.X-Key",
            "NO_SUCH_KEY",
        ),
        (
            (
                "kind=judge",
                "judge.url=http://127.0.0.1:1/v1",
                "judge.model=m",
                "judge.api_key_variable=NO_SUCH_KEY",
            ),
            "judge.api_key_variable",
            "NO_SUCH_KEY",
        ),
    ],
)
def test_an_endpoint_whose_secret_is_missing_is_named_by_its_key(
    settings: tuple[str, ...], key: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(QUICKSTART, tuple(f"services.reward.{setting}" for setting in settings))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError) as refused:
        preflight.check_endpoint("reward", config.services["reward"])
    assert str(refused.value) == f"services.reward.{key}: the environment has no {variable}"
    monkeypatch.setenv(variable, "secret")
    preflight.check_endpoint("reward", config.services["reward"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^services\.reward\.kind: .* needs httpx, which is not installed"):
        preflight.check_endpoint("reward", config.services["reward"])


def test_a_code_grader_without_bubblewrap_is_refused_unless_it_may_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("services.reward.kind=sandbox", "services.reward.function=")
    table = load(QUICKSTART, settings).services["reward"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^services\.reward\.kind: sandbox: bwrap is not on PATH: install"):
        preflight.check_sandbox("reward", table)
    bold = load(QUICKSTART, (*settings, "services.reward.sandbox.allow_unsandboxed=true"))
    preflight.check_sandbox("reward", bold.services["reward"])
    preflight.check_sandbox("reward", load(QUICKSTART).services["reward"])
