"""Pure functions that read the program and the tests of a row."""

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
    """The tests of a row are missing or invalid, or its prelude or kind of score is invalid."""


@dataclass(frozen=True)
class Submission:
    """A program to be graded, with its tests.

    Attributes:
        code: Source of the whole program, the prelude included.
        prelude: Source code whose names the tests of kind "asserts" may use.
        tests: Tests in the form of docs/sandbox.md, with all defaults filled in.
        score: "all" scores 1 if every test passes, else 0; "fraction" scores the share of tests that pass.
    """

    code: str
    prelude: str
    tests: list[dict[str, Any]]
    score: str

    def key(self, limits: str) -> str:
        """Returns a hash of everything that the verdict depends on; `limits` is the JSON of the limits of a run."""
        parts = json.dumps([asdict(self), limits], sort_keys=True)
        return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


def read_row(
    prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], score: str
) -> Submission:
    """Reads the program and the tests of a row.

    Args:
        prompt, response: Texts of the row; the program is in the response.
        ground_truth: Tests in verl's form; read only if `metadata` has no key "tests".
        metadata: Fields of the row; docs/sandbox.md lists the keys that are used.
        score: "all" or "fraction", for rows whose metadata has no key "score".

    Raises:
        BadProgramRow: The tests are missing or invalid, or the prelude or the kind of score is invalid.
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
    """Returns the last fenced block of Python; else the last fenced block without a language; else the whole text."""
    blocks = list(_fenced_blocks(response))
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (python or plain or [response])[-1]


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields (language, content) of each closed fenced block of Markdown."""
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
    """Checks tests, and returns them with all defaults filled in.

    Args:
        tests: List of tests, or its JSON text. In a list, whole floats become integers, since numbers in metadata
            are doubles; numbers in JSON are kept.

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
    if not isinstance(kind, str) or kind not in _TYPES:
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
    """Returns why a test, whose keys are complete, cannot be used, or "": its names, tolerance or values are
    invalid."""
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
    """Reads tests from the ground truth of verl's data sets of code, the JSON of {"inputs": [...], "outputs": [...]}.

    With a key "fn_name", each test calls that function: an input is a list of arguments, or a text with the JSON of
    one argument per line. Without it, inputs and outputs are standard input and output of the program.

    Raises:
        BadProgramRow: The ground truth does not have this form.
    """
    try:
        table = json.loads(ground_truth)
        inputs, outputs, name = table["inputs"], table["outputs"], table.get("fn_name")
        pairs = list(zip(inputs, outputs, strict=True))
        if name:
            tests = [_call(name, given, expected) for given, expected in pairs]
        else:
            tests = [{"kind": "stdin", "input": _text(i), "expected": _text(o)} for i, o in pairs]
        text = json.dumps(tests)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadProgramRow(
            f"no tests: neither metadata.tests nor inputs and outputs as ground truth ({error})"
        ) from None
    return read_tests(text)


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
