"""The scaling model: near what was measured, its sums right, and its tables those of the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
OFF = {"a_pass": 0.5, "a_round": 0.5, "merging": 0.5, "judging": 0.5, "sending": 0.5}  # at most; the page says how much


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling_model

    return scaling_model


@pytest.fixture
def results(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(model.RESULTS.read_text())
    return found


def test_the_model_is_near_the_measurements(model: Any, results: dict[str, Any]) -> None:
    actual = model.errors(results)
    assert set(actual) == set(OFF)
    for name, points in actual.items():
        assert len(points) >= 3, name
        for x, true, said in points:
            assert abs(said / true - 1) <= OFF[name], f"{name} at {x:g}: {said:.3g} ms, measured {true:.3g}"


def test_the_predicted_total_is_near_a_timed_question(model: Any, results: dict[str, Any]) -> None:
    """Of other records, through Ray and two shards: no line was fitted to it."""
    fit, shape = model.fitted(results), results["overhead"]
    for name in ("ray", "ray-2"):
        line = shape["milliseconds"][name]
        hosts = line["actors"]
        caller = fit.merging.at(hosts) + line["floor"]["empty calls"]["median"]
        assert 0.2 < caller / line["attend"]["overhead"]["median"] < 1.2, "what is not modelled is most of it"
    a_pass = fit.a_pass.at(shape["n"] * shape["dim"] * 4 / 1e9)
    assert 0.5 < a_pass / shape["milliseconds"]["here"]["attend"]["slowest shard"]["median"] < 2


def test_the_parts_of_the_model_add_up(model: Any) -> None:
    line = model.Line
    fit = model.Fit(
        line(1.0, 10.0), model.Power(2.0, 0.0), line(0.5, 0.01), line(1.0, 0.1), line(0.0, 0.2), 50.0, 1e5, 1e6
    )
    given = model.DEFAULT._replace(
        host_memory_gb=100, usable=0.5, dim=100, value_dim=100, number_bytes=2, code_bytes=50, other_bytes=50,
        host_read_gb_s=100, network_gbit_s=8, round_trip_ms=0.5, price=2.0, replicas=2, shards_a_host=4, rounds=3,
    )  # fmt: skip
    one = model.needed(1e9, fit, given)
    assert (one.hosts, one.memory_gb, one.shards, one.dollars_an_hour) == (10, 500.0, 16, 40.0)
    assert one.exact_caller_ms == pytest.approx(10 * 0.2 + 0.5 + 10 * 0.01 + 10 * 1e5 / 1e6)
    assert one.exact_ms == pytest.approx(0.5 + one.exact_caller_ms + 1.0 + 10.0 * 40 / 2)
    assert one.estimate_caller_ms == pytest.approx(3 * (10 * 0.2 + 1.0 + 40 * 0.1 + 40 * 1e6 / 1e6))
    assert one.estimate_ms == pytest.approx(one.estimate_caller_ms + 3 * (0.5 + 2.0))
    assert one.dollars_a_million == pytest.approx(40 * one.exact_ms / 1e3 / 3600 * 1e6)
    ends = dict(model.breaks(fit, given))
    assert ends["one host's memory is full"] == pytest.approx(1e8, rel=0.05)
    assert ends["65,536 shards are too few"] == pytest.approx(65_536e8, rel=0.05)


def test_lines_through_points(model: Any) -> None:
    line = model.line_through([(1, 3.0), (2, 5.0), (10, 21.0)])
    assert (line.base, line.slope) == pytest.approx((1.0, 2.0))
    assert model.line_through([(1, 1.0), (2, 3.0), (3, 5.0)]).base == 0
    assert model.line_through([(1, 5.0), (2, 4.0), (3, 3.0)]).slope == 0
    power = model.power_through([(10, 2.0), (1000, 20.0)])
    assert (power.exponent, power.at(100)) == pytest.approx((0.5, math.sqrt(40)))


def test_the_tables_of_the_page_are_the_models(model: Any, results: dict[str, Any]) -> None:
    page, fit = (ROOT / "docs" / "cluster.md").read_text(), model.fitted(results)
    for part in (model.table([1e8, 1e9, 1e10, 1e11], fit), model.broken(fit)):
        assert part in page, f"docs/cluster.md shows other figures; put in:\n{part}"
    for name, (value, source) in model.ASSUMED.items():
        assert source, name
        assert model.DEFAULT[list(model.ASSUMED).index(name)] == value


def test_the_model_draws_its_picture(model: Any, results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    model.draw(tmp_path / "scale.png", model.fitted(results))
    assert (tmp_path / "scale.png").stat().st_size > 10_000
