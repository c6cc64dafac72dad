"""Charts show values where they lie, and numbers are written as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reports.axes import linear_axis, log_axis, nice_ticks, step_axis, tick_label
from reports.charts import Bar, Point, Series, bar_chart, line_chart, thin
from reports.page import card, page, table
from reports.units import bytes_text, counted, duration_text, rate_text, seconds_text


def drawn(points: Sequence[Point]) -> str:
    series = Series("y", points)
    x, y = step_axis([x for x, _ in series.finite]), linear_axis([y for _, y in series.finite])
    return line_chart([series], x, y, "step", "")


FINITE = st.floats(-1e12, 1e12)


class TestCharts:
    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [
            (0, 1, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (0.24, 0.61, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
            (-3, 101, [-50, 0, 50, 100, 150]),
            (5, 5, [2, 3, 4, 5, 6, 7, 8]),
            (0, 0, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]),
        ],
    )
    def test_ticks_are_round(self, low: float, high: float, ticks: list[float]) -> None:
        assert nice_ticks(low, high) == ticks

    def test_whole_ticks_are_integers(self) -> None:
        assert nice_ticks(0, 3, target=6, whole=True) == [0, 1, 2, 3]

    @example(a=1e-5, b=-1.9e-283, target=2)
    @given(FINITE, FINITE, st.integers(1, 10))
    def test_ticks_enclose_the_range_and_are_few(self, a: float, b: float, target: int) -> None:
        low, high = min(a, b), max(a, b)
        ticks = nice_ticks(low, high, target)
        slack = 1e-6 * max(abs(low), abs(high))
        assert ticks[0] <= low + slack
        assert ticks[-1] >= high - slack
        assert 2 <= len(ticks) <= target + 2
        assert ticks == sorted(set(ticks))

    @pytest.mark.parametrize(
        ("value", "step", "label"),
        [(0.3, 0.1, "0.3"), (1500, 500, "1,500"), (0.002, 0.001, "0.002"), (2e-7, 1e-7, "2e-07")],
    )
    def test_labels_have_the_decimals_their_ticks_need(self, value: float, step: float, label: str) -> None:
        assert tick_label(value, step) == label

    def test_thinning_keeps_the_extremes(self) -> None:
        points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
        points[5_432] = (5_432.0, 9.0)
        thinned = thin(points)
        assert len(thinned) <= 400
        assert (5_432.0, 9.0) in thinned
        assert thinned == sorted(thinned)
        assert set(thinned) <= set(points)

    def test_points_lie_where_their_values_say(self) -> None:
        chart = drawn([(0, 0), (1, 5), (2, 10)])
        circles = [
            circle for circle in ElementTree.fromstring(chart).iter("circle") if circle.get("class") == "dot"
        ]
        xs, ys = ([float(circle.get(key, "")) for circle in circles] for key in ("cx", "cy"))
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
        assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
        assert xs[0] < xs[1]
        assert ys[0] > ys[1]

    def test_a_number_that_is_not_finite_breaks_the_line(self) -> None:
        points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 2.0), (4, 1.0)]
        chart = ElementTree.fromstring(drawn(points))
        assert len(list(chart.iter("path"))) == 2

    def test_bars_are_as_long_as_their_values(self) -> None:
        bars = [Bar("a <b>", 4.0, "4"), Bar("c", 1.0, "1")]
        rects = list(ElementTree.fromstring(bar_chart(bars, "")).iter("rect"))
        first, second = (float(rect.get("width", "")) for rect in rects)
        assert first == pytest.approx(4 * second, abs=0.3)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (310 * 2**20, "310 MiB"), (2**50, "1024 TiB")],
)
def test_bytes_as_people_read_them(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (200, "3 min 20 s"), (3600 * 2 + 301, "2 h 05 min")]
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.00 µs"),
        (8.5e-4, "850 µs"),
        (9.996e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
    ],
)
def test_seconds_are_told_in_a_unit_that_suits(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_rates_have_three_digits_or_all_of_the_integer_part() -> None:
    assert [rate_text(rate) for rate in (1.234, 45.67, 234.5, 12345)] == ["1.23", "45.7", "234", "12,345"]


def test_axes_enclose_their_values() -> None:
    linear = linear_axis([0, 3.0, 87.0])
    assert [tick for tick, _ in linear.ticks] == [0, 50, 100]
    assert linear.place(100) == 1
    log = log_axis([0.0008, 0.3], str)
    assert [round(tick, 9) for tick, _ in log.ticks] == [0.0001, 0.001, 0.01, 0.1, 1.0]
    assert log.place(0.01) == pytest.approx(0.5)


def test_a_mark_is_an_upright_line_with_its_name() -> None:
    axis = linear_axis([0.0, 10.0])
    chart = ElementTree.fromstring(line_chart([], axis, axis, "x", "", marks=[(5.0, "knee")]))
    mark = next(line for line in chart.iter("line") if line.get("class") == "mark")
    assert mark.get("x1") == mark.get("x2")
    assert "knee" in [text.text for text in chart.iter("text")]


def test_a_page_escapes_text_and_leaves_out_empty_sections() -> None:
    cells = table(["a <b>"], [["<code>1</code>"]])
    html = page("<t>", [card("c & d", cells, note="<n>"), card("none", "")])
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    assert [section.findtext("h2") for section in root.iter("section")] == ["c & d"]
    assert [cell.text for cell in root.iter("th")] == ["a <b>"]
    assert root.findtext(".//title") == "<t>"


def test_a_table_without_a_head_names_its_rows() -> None:
    row = ElementTree.fromstring(table([], [["name", "value"]])).find(".//tr")
    assert row is not None
    assert [(cell.tag, cell.text) for cell in row] == [("th", "name"), ("td", "value")]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 rows"), (1, "1 row"), (1.0, "1 row"), (2.5, "2.5 rows"), (64, "64 rows")]
)
def test_a_number_of_things(number: float, text: str) -> None:
    assert counted(number, "row") == text
