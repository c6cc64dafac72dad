"""The program and tests of a row. Pure functions."""

from __future__ import annotations

import hashlib
import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.reward.sandbox import wire

# Possessive quantifiers, for linear time on any response.
_OPENING = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^`]*+")
_PYTHON = ("python", "python3", "py")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "call": {"args": [], "kwargs": {}, "tolerance": 0.0},
    "stdin": {"input": ""},
    "asserts": {},
}
_TYPES = {
    "call": {"function": str, "accepted": list, "args": list, "kwargs": dict, "tolerance": float | int},
    "stdin": {"expected": str, "input": str},
    "asserts": {"code": str, "entry_point": str},
}


class BadProgramRow(ValueError):
    """A row whose tests are missing or invalid."""


@dataclass(frozen=True)
class Submission:
    """A program to be graded, with its tests.

    Attributes:
        code: Source of the whole program.
        prelude: Source whose names assert-style tests may use beside the program's.
        tests: Tests as in docs/sandbox.md, with all defaults filled in.
        score: "all" gives 1 if every test passes, else 0; "fraction" gives the share of passed tests.
    """

    code: str
    prelude: str
    tests: list[dict[str, Any]]
    score: str

    def key(self, limits: str) -> str:
        """Hash of everything that the verdict depends on, including the limits."""
        parts = json.dumps([asdict(self), limits], sort_keys=True)
        return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


def read_row(
    prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], score: str
) -> Submission:
    """The program and tests of a row; `docs/sandbox.md` lists the keys of `metadata`.

    Args:
        score: "all" or "fraction", for rows without that key.

    Raises:
        BadProgramRow: The tests are missing or invalid.
    """
    prelude = metadata.get("prelude", prompt if metadata.get("completes_prompt") else "")
    score = metadata.get("score", score)
    if score not in ("all", "fraction"):
        raise BadProgramRow(f"score is {score!r}, neither 'all' nor 'fraction'")
    if not isinstance(prelude, str):
        raise BadProgramRow("prelude is not text")
    tests = read_tests(metadata["tests"]) if "tests" in metadata else read_ground_truth(ground_truth)
    return Submission(prelude + extract_code(response), prelude, tests, score)


def extract_code(response: str) -> str:
    """The last fenced block of Python, or else the last one without a language; without a block, the whole text."""
    blocks = list(_fenced_blocks(response))
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (python or plain or [response])[-1]


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each closed fenced block."""
    lines = text.splitlines(keepends=True)
    last = {line.strip(): number for number, line in enumerate(lines)}
    fence, language, start = "", "", 0
    for number, line in enumerate(lines):
        if fence:
            if line.strip() == fence:
                yield language, "".join(lines[start:number])
                fence = ""
        elif (opening := _OPENING.fullmatch(line)) and last.get(opening[1], 0) > number:
            fence, language = opening.groups()
            start = number + 1


def read_tests(tests: Any) -> list[dict[str, Any]]:
    """Reads a list of tests, or the JSON of one, and fills in all defaults.

    Numbers of a message are doubles; whole ones become integers. Numbers in JSON are kept.

    Raises:
        BadProgramRow: The tests are invalid.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise BadProgramRow(f"tests are not JSON: {error}") from None
    else:
        tests = _integers(tests)
    if not isinstance(tests, list) or not tests:
        raise BadProgramRow("tests are not a list with something in it")
    return [_checked(number, test) for number, test in enumerate(tests)]


def _checked(number: int, test: Any) -> dict[str, Any]:
    kind = test.get("kind") if isinstance(test, dict) else None
    if kind not in _TYPES:
        raise BadProgramRow(f"test {number}: kind is {kind!r}, none of {', '.join(_TYPES)}")
    full = {**_DEFAULTS[kind], **test}
    if kind == "call" and "expected" in full:
        full["accepted"] = [full.pop("expected")]
    for key, required in _TYPES[kind].items():
        if not isinstance(full.get(key), required):
            shown = "expected" if key == "accepted" else key
            name = getattr(required, "__name__", required)
            raise BadProgramRow(f"test {number}: {shown} is missing or not {name}")
    if unknown := set(full) - {"kind", *_TYPES[kind]}:
        raise BadProgramRow(f"test {number}: unknown keys {', '.join(sorted(unknown))}")
    if cause := _unusable(full):
        raise BadProgramRow(f"test {number}: {cause}")
    return full


def _unusable(test: dict[str, Any]) -> str:
    """The reason why no program could pass a test with complete keys, or none could fail it; else ""."""
    for key in ("function", "entry_point"):
        if key in test and (not test[key].isidentifier() or keyword.iskeyword(test[key])):
            return f"{key} {test[key]!r} is not a name"
    tolerance = test.get("tolerance", 0.0)
    if isinstance(tolerance, bool) or not 0 <= tolerance <= sys.float_info.max:
        return f"tolerance is {tolerance}, not a number from 0 up"
    if test.get("accepted") == []:
        return "accepted is empty"
    try:
        wire.encode(test)
    except wire.Malformed as error:
        return str(error)
    return ""


def read_ground_truth(ground_truth: str) -> list[dict[str, Any]]:
    """Reads the ground truth of verl's data sets for code: {"inputs": [...], "outputs": [...]} for standard input and
    output, or for calls with "fn_name", where an input is a list of arguments or has the JSON of one argument per line.

    Raises:
        BadProgramRow: The ground truth has another form.
    """
    try:
        table = json.loads(ground_truth)
        inputs, outputs, name = table["inputs"], table["outputs"], table.get("fn_name")
        pairs = list(zip(inputs, outputs, strict=True))
        if name:
            tests = [_call(name, given, expected) for given, expected in pairs]
        else:
            tests = [{"kind": "stdin", "input": _text(i), "expected": _text(o)} for i, o in pairs]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadProgramRow(
            f"no tests: neither metadata.tests nor inputs and outputs as ground truth ({error})"
        ) from None
    return read_tests(json.dumps(tests))


def _call(name: str, given: Any, expected: Any) -> dict[str, Any]:
    args = [json.loads(line) for line in given.split("\n") if line] if isinstance(given, str) else given
    # Some of these data sets wrap the expected value in a list, and do not mark where.
    accepted = [expected, expected[0]] if isinstance(expected, list) and expected else [expected]
    return {"kind": "call", "function": name, "args": args, "accepted": accepted}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    return value
