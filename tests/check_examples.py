"""Chore `make check-examples`: checks the manifests in deploy/examples against the published schemas: each of their
fields is one of Kubernetes' own models (of its Python client) or of the Compose specification, and none that is
required is missing. Needs the packages `check-jsonschema` and `kubernetes`, with which the Makefile runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client  # pyright: ignore[reportMissingImports]

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"
KINDS = {
    "Service": "V1Service",
    "StatefulSet": "V1StatefulSet",
    "Job": "V1Job",
    "NetworkPolicy": "V1NetworkPolicy",
}
SCALARS = {"str": str, "int": int, "bool": bool}


def check(value: Any, kind: str, where: str) -> Any:
    """Returns a value as an object of the client's type `kind`. Raises ValueError with its place where it is none."""
    if items := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        return [check(each, items[1], f"{where}[{number}]") for number, each in enumerate(value)]
    if values := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        return {key: check(each, values[1], f"{where}.{key}") for key, each in value.items()}
    if kind in SCALARS:
        if not isinstance(value, SCALARS[kind]):
            raise ValueError(f"{where}: {value!r} is no {kind}")
        return value
    if kind == "object":
        return value
    model = getattr(client, kind)
    names = {key: name for name, key in model.attribute_map.items()}
    if unknown := value.keys() - names.keys():
        raise ValueError(f"{where}: {kind} has no field {', '.join(sorted(unknown))}")
    given = {names[key]: each for key, each in value.items()}
    return model(
        **{name: check(each, model.openapi_types[name], f"{where}.{name}") for name, each in given.items()}
    )


def main() -> None:
    for manifest in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()):
        check(manifest, KINDS[manifest["kind"]], manifest["kind"])
        print(f"kubernetes.yaml: {manifest['apiVersion']} {manifest['kind']} fits")
    compose = EXAMPLES / "compose.yaml"
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(compose)]
    sys.exit(subprocess.run(command, timeout=60).returncode)


if __name__ == "__main__":
    main()
