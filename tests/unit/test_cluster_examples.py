"""The files of docs/cluster.md: they parse, fit together and use command lines that there are. None of them is executed
here but the config, in tests/integration/test_two_hosts.py."""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from controller.cli import main as rlhf_controller
from controller.config.config import Config, load
from controller.config.hosts import rank_hosts
from deploy.cli import main as rlhf_deploy
from deploy.hosts import HostPlan
from deploy.launch import LaunchOptions
from deploy.processes import KILL_TIMEOUT_S
from deploy.supervisor import service_names
from settings.strict import read_toml, validate

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
PAGE = (ROOT / "docs" / "cluster.md").read_text()
CONFIG = EXAMPLES / "two_nodes.toml"
NODES = ["node-0", "node-1"]
PROGRAMS = {"rlhf-deploy": rlhf_deploy, "rlhf-controller": rlhf_controller}


def parse(command: Sequence[str]) -> dict[str, Any]:
    """Parameters of a command line of one of the programs; raises click.UsageError where it has no such option."""
    program, arguments = PROGRAMS[command[0]], list(command[1:])
    if program is rlhf_deploy:
        sub = rlhf_deploy.commands[arguments[0]]
        return {"": arguments[0], **sub.make_context(arguments[0], arguments[1:]).params}
    return program.make_context("rlhf-controller", arguments).params


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def manifest(kind: str) -> Any:
    (found,) = (each for each in manifests() if each["kind"] == kind)
    return found


def compose() -> Any:
    return yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


def hosts_of(config: Config) -> list[str]:
    return sorted({host for each in rank_hosts(config).values() for host in each})


def plans(config: Config) -> dict[str, dict[str, list[int]]]:
    """Ranks of the services on each host."""
    made = {host: HostPlan.of(config, service_names(config), host) for host in hosts_of(config)}
    return {host: {name: list(plan.ranks(name)) for name in plan.names} for host, plan in made.items()}


def test_a_wrong_command_line_is_found() -> None:
    for wrong in (["rlhf-deploy", "up", "a.toml", "--hots", "a"], ["rlhf-controller", "--confg", "a.toml"]):
        with pytest.raises(click.UsageError):
            parse(wrong)


def test_the_two_nodes_start_each_rank_once() -> None:
    assert plans(load(CONFIG)) == {
        "node-0": {"actor": [0], "reference": [0]},
        "node-1": {"actor": [1], "critic": [0], "reward": [0]},
    }


def test_the_config_of_four_nodes_on_the_page_starts_each_rank_once(tmp_path: Path) -> None:
    (text,) = (block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "node-3" in block)
    (path := tmp_path / "four.toml").write_text(text)
    config = validate(Config, read_toml(path), "of the page")
    found = plans(config)
    assert found == {
        "node-0": {"actor": [*range(8)]},
        "node-1": {"actor": [*range(8, 16)]},
        "node-2": {"rollout": [*range(8)]},
        "node-3": {"critic": [0, 1, 2, 3], "reference": [0, 1], "reward": [0, 1]},
    }
    started = {(name, rank) for each in found.values() for name, ranks in each.items() for rank in ranks}
    assert len(started) == sum(table.ranks for table in config.services.values())


def test_the_page_shows_the_files_that_are_there() -> None:
    named = set(re.findall(r"\.\./deploy/examples/([\w.]+)", PAGE))
    assert named == {path.name for path in EXAMPLES.iterdir()}


def commands_of_the_page() -> Iterator[list[str]]:
    for block in PAGE.split("```")[1::2]:
        for line in block.splitlines():
            words = line.partition("#")[0].split()
            if words and words[0] in PROGRAMS:
                yield words


def test_the_commands_of_the_page_parse() -> None:
    found = list(commands_of_the_page())
    assert {" ".join(words[:2]) for words in found} >= {
        *(f"rlhf-deploy {name}" for name in ("certs", "check", "up", "status", "logs", "down")),
        "rlhf-controller --algo",
    }
    for words in found:
        parse(words)


def test_the_pods_are_the_hosts_of_the_config() -> None:
    config, pods, service = load(CONFIG), manifest("StatefulSet"), manifest("Service")
    name, spec = pods["metadata"]["name"], pods["spec"]
    assert [f"{name}-{number}" for number in range(spec["replicas"])] == hosts_of(config) == NODES
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert spec["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["podManagementPolicy"] == "Parallel"
    run = manifest("Job")["spec"]["template"]
    for pod in (spec["template"]["spec"], run["spec"]):
        assert pod["dnsConfig"]["searches"] == [f"{service['metadata']['name']}.default.svc.cluster.local"]
    policy = manifest("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    (allowed,) = policy["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    assert allowed["values"] == [labels["app"], run["metadata"]["labels"]["app"]]


def test_the_pods_have_what_the_config_names() -> None:
    for kind, program in (("StatefulSet", "rlhf-deploy"), ("Job", "rlhf-controller")):
        pod = manifest(kind)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"][0] == program
        parse(container["command"])
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["volumes"]}
        check_paths(mounts.values(), container["workingDir"])
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    probe = pod["containers"][0]["readinessProbe"]
    assert parse(probe["exec"]["command"])[""] == "status"
    assert not any("$" in word for word in probe["exec"]["command"]), "probes expand no variables"
    assert pod["terminationGracePeriodSeconds"] > rlhf_deploy_stops_within_s()


def rlhf_deploy_stops_within_s() -> float:
    return LaunchOptions().grace_s + KILL_TIMEOUT_S


def check_paths(mounts: Any, directory: str) -> None:
    """Every relative path of the config is below a mount, and the config is one."""
    given = {str(Path(path)) for path in mounts}
    text = CONFIG.read_text()
    tops = {path.split("/")[0] for path in re.findall(r'"((?:runs|certs)/[^"]+)"', text)}
    assert {f"{directory}/{top}" for top in (*tops, CONFIG.name)} == given


def test_the_pods_may_run_where_pods_are_restricted() -> None:
    """Pods meet the Pod Security Standard "restricted", and get no token for the API of the cluster."""
    for kind in ("StatefulSet", "Job"):
        pod = manifest(kind)["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_containers_are_the_hosts_of_the_config() -> None:
    services = compose()["services"]
    nodes = {name: each for name, each in services.items() if name != "controller"}
    assert sorted(nodes) == hosts_of(load(CONFIG)) == NODES
    for name, each in services.items():
        parse(each["command"])
        check_paths([volume.split(":")[1] for volume in each["volumes"]], "/rlhf")
        assert (EXAMPLES / each["build"]["context"]).resolve() == ROOT
        assert (ROOT / each["build"]["dockerfile"]).is_file()
        assert each["networks"] == list(compose()["networks"])
        assert name == "controller" or each["hostname"] == name
    for each in nodes.values():
        kind, *command = each["healthcheck"]["test"]
        assert (kind, parse(command)[""]) == ("CMD", "status")
        assert float(each["stop_grace_period"].removesuffix("s")) > rlhf_deploy_stops_within_s()
    waits = services["controller"]["depends_on"]
    assert waits == {name: {"condition": "service_healthy"} for name in NODES}


def test_the_image_works_in_the_directory_of_the_mounts() -> None:
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    assert "WORKDIR /rlhf" in lines
    assert (
        f"--uid {manifest('Job')['spec']['template']['spec']['securityContext']['runAsUser']} "
        in " ".join(lines)
    )


def test_the_image_is_built_from_the_packages_and_from_no_keys() -> None:
    """The directory that `COPY . /source` copies has certs/ and runs/ too, which would stay in a layer of the image."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*", "all that is not named is left out"
    copied = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    moved = project["tool"]["setuptools"]["package-dir"]
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    needed = {moved.get(name, name).partition("/")[0] for name in packages}
    assert copied == {*needed, "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    # The last rule that matches decides, so these come after those that let packages in.
    last = max(place for place, rule in enumerate(rules) if rule.startswith("!"))
    assert {"**/certs", "**/runs"} <= set(rules[last + 1 :]), "made by a command in deploy/examples, say"
    assert "COPY . /source" in (EXAMPLES / "Dockerfile").read_text()


def test_the_batch_script_starts_one_launcher_per_node_and_one_controller(tmp_path: Path) -> None:
    """The script itself, with Slurm's programs and ours replaced by ones that print their command lines."""
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    (programs := tmp_path / "bin").mkdir()
    for name, text in {
        "scontrol": 'echo "$@" >> asked; printf "gpu17\\ngpu18\\n"',
        "srun": 'trap "echo ended > ended; exit 0" TERM; echo "$@" > line; mv line started; '
        "while true; do sleep 0.05; done",
        "rlhf-controller": 'until [ -e started ]; do sleep 0.05; done; echo "rlhf-controller $@" > ran',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(stat.S_IRWXU)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[17-18]",
    }
    subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=True, timeout=30)
    assert (tmp_path / "asked").read_text() == "show hostnames gpu[17-18]\n"
    options, command = (tmp_path / "started").read_text().split("rlhf-deploy")
    assert options.split() == ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert parse(["rlhf-deploy", *command.split()])["config"] == Path("runs/slurm-7.toml")
    assert parse((tmp_path / "ran").read_text().split())["config_path"] == Path("runs/slurm-7.toml")
    assert (tmp_path / "ended").exists(), "the services are stopped when the controller has ended"
    config = load(tmp_path / "runs" / "slurm-7.toml")
    assert hosts_of(config) == ["gpu17", "gpu18"]
    assert config.services["critic"].address == "gpu18:7102"
    options = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert {"--nodes=2", "--ntasks-per-node=1"} <= set(options)
