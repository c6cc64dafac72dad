"""Rows of JSON arrays and CSV files: read one by one from the disk, with errors that name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from controller.data.readers import open_rows
from rlhf.errors import ConfigError

ROWS = [
    {"prompt": 'a, "b" [{', "nested": {"list": [1, {"x": []}], "escaped": '\\"]'}},
    {"prompt": "zwei\nZeilen\r\n ü\u2028", "nested": {}},
    {"prompt": "}", "nested": {"list": [], "escaped": ""}},
]
TEXTS = [{"prompt": 'a, "b"', "answer": ""}, {"prompt": "two\nlines\r\n ü\u2028x\ry", "answer": "007"}]


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def as_csv(ends: str = "\n") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["prompt", "answer"], lineterminator=ends)
    writer.writeheader()
    writer.writerows(TEXTS)
    return file.getvalue().encode()


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("name", ["a.json", "a.JSON", "a.json.gz"])
def test_a_json_file_may_be_one_array(indent: int | None, name: str, tmp_path: Path) -> None:
    content = "\n" + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n"
    rows = open_rows(written(tmp_path, name, content.encode()), "data.train")
    assert list(rows) == [rows[i] for i in range(len(rows))] == ROWS


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n".join(json.dumps(row) for row in ROWS)),
        ("a.json", "\n".join(json.dumps(row) for row in ROWS)),
        ("a.json.gz", json.dumps(ROWS)),
    ],
)
def test_a_byte_order_mark_before_json_is_skipped(name: str, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, b"\xef\xbb\xbf" + text.encode())
    assert list(open_rows(path, "data.train")) == ROWS


def test_a_json_file_may_have_one_object_on_each_line(tmp_path: Path) -> None:
    content = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert list(open_rows(written(tmp_path, "a.json", content.encode()), "data.train")) == ROWS


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_the_fields_of_csv_are_texts(ends: str, mark: bytes, name: str, tmp_path: Path) -> None:
    rows = open_rows(written(tmp_path, name, mark + as_csv(ends)), "data.train")
    assert list(rows) == [rows[i] for i in range(len(rows))] == TEXTS


def test_a_field_of_csv_may_be_as_long_as_a_prompt(tmp_path: Path) -> None:
    content = f"prompt,answer\n{'x' * 200_000},1\n".encode()
    (row,) = open_rows(written(tmp_path, "a.csv", content), "data.train")
    assert len(row["prompt"]) == 200_000


def test_blank_lines_of_csv_are_no_rows(tmp_path: Path) -> None:
    rows = open_rows(written(tmp_path, "a.csv", b'\na,b\n\n1,2\n\n"3\n",4\n\n'), "data.train")
    assert list(rows) == [{"a": "1", "b": "2"}, {"a": "3\n", "b": "4"}]
    assert rows.where(1).endswith("a.csv:6")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "x"},\n\n {"prompt": }]', r"a\.json:3: not JSON: Expecting value"),
        ("a.json", b'[{"a": 1}\n {"a": 2}]', r"a\.json:1: not JSON: Extra data"),
        ("a.json", b'[{"a": 1},\n]', r"a\.json:2: not JSON: Expecting value"),
        ("a.json", b'[{"a": 1},\n{"a": "b}]', r"a\.json:2: not JSON: Unterminated string"),
        ("a.json", b'[{"a": NaN}]', r"a\.json:1: not JSON: NaN is not a number"),
        ("a.json", b'[{"a": 1}, {"a":', r"data\.train: .*a\.json: not JSON: the array has no end"),
        ("a.json", b'[{"a": 1}]\n{}', r"a\.json: not JSON: there is more after the end of the array"),
        ("a.json", b'[{"a": "\xe9"}]', r"a\.json:1: not UTF-8"),
        ("a.json", b" [ ] ", r"a\.json has no rows"),
        ("a.json", b'{\n"a": 1}', r"a\.json:1: not JSON"),
        ("a.json", b"", r"a\.json has no rows"),
        ("a.csv", b"a,b\n1,2\n\n1,2,3\n", r"a\.csv:4: 3 fields, and the first line names 2: a, b"),
        ("a.csv", b'a,b\n1,"2\n3\n', r"a\.csv:3: not CSV: unexpected end of data"),
        ("a.csv", b'a,b\n1,2\n"1"x,2\n', r"a\.csv:3: not CSV: "),
        ("a.csv", b"a,b\n1,\xe9\n", r"a\.csv:2: not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv: the first line must name the fields, each once: 'a'"),
        ("a.csv", b"a,b\n", r"a\.csv has no rows"),
        (
            "a.tsv",
            b"a\tb\n",
            r"no reader for files that end with '\.tsv'; there are \.jsonl, .*\.csv, .*\.parquet",
        ),
        ("a.xlsx.gz", b"x", r"no reader for files that end with '\.xlsx'"),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_its_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        list(open_rows(written(tmp_path, name, content), "data.train"))


def test_contents_have_fingerprints(tmp_path: Path) -> None:
    names = ("a.csv", "b.csv.gz", "c.csv")
    contents = (as_csv(), as_csv(), as_csv().replace(b"007", b"008"))
    paths = [written(tmp_path, name, content) for name, content in zip(names, contents, strict=True)]
    one, packed, other = (open_rows(path, "data.train").fingerprint() for path in paths)
    assert one == packed != other
