"""The explorer's gradients, training, trails, names and colours, over HTTP and beside the equations in float64."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from explore_site import Site, served
from worlds import holding

import softdb
from softdb.data import load_wordnet
from softdb.data.encoder import KnownWords
from softdb.tools.explore.gradient import Place
from softdb.tools.explore.plane import Plane
from softdb.tools.explore.questions import Weighing
from softdb.tools.explore.regions import colours, region_names
from softdb.tools.explore.training import STEPS

N, D, T = 30, 5, 0.4
METRICS = ["dot", "cosine", "l2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gradient") / "db"
    holding(_keys(), path=path, metric="cosine", payloads=[{"size": i, "kind": "ab"[i % 2]} for i in range(N)]).close()
    return path


def _keys() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def _loss(query: np.ndarray, right: int, metric: str) -> float:
    """Return log Σ exp(s_i / T) - s_right / T in float64."""
    one = {"dot": reference.dot, "cosine": reference.cosine, "l2": reference.negative_l2}[metric]
    scores = np.array([one(query, key) for key in _keys().astype(np.float64)]) / T
    return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[right])


def _differences(query: np.ndarray, right: int, metric: str) -> np.ndarray:
    small = 1e-5 * np.eye(D)
    return np.array([_loss(query + by, right, metric) - _loss(query - by, right, metric) for by in small]) / 2e-5


@pytest.mark.parametrize("metric", METRICS)
def test_loss_gradient_pulls_and_response_are_those_of_the_equations(metric: str) -> None:
    db, query = holding(_keys(), metric=metric), np.linspace(-1, 1, D) + 0.1
    weighing = Weighing.of({"temperature": repr(T)})
    spot = Place(db, Plane.of(db), torch.tensor(query[None], dtype=torch.float32), weighing, None)
    loss, slope = spot.slope(7)
    assert loss == pytest.approx(_loss(query, 7, metric), rel=1e-5)
    np.testing.assert_allclose(slope, _differences(query, 7, metric), rtol=1e-3, atol=1e-4)
    keys = torch.from_numpy(_keys()[[7, *(i for i in range(N) if i != 7)]])
    scores = softdb.scores.Cosine()(spot.query, keys)[0] if metric == "cosine" else None
    if scores is None:
        scores = spot.query @ keys.T if metric == "dot" else -((spot.query - keys) ** 2).sum(1)[None]
        scores = scores[0]
    lse = float(torch.logsumexp(scores / T, 0))
    np.testing.assert_allclose(spot.pulls(keys, scores, lse).sum(0), -slope, rtol=1e-3, atol=1e-4)  # of all records

    def answer(at: np.ndarray) -> Any:
        return spot.plane.at(db.attend(torch.tensor(at[None], dtype=torch.float32), temperature=T).output.double())[0]

    step = 1e-2
    moved = [(answer(query + step * axis) - answer(query - step * axis)) / (2 * step) for axis in spot.plane.axes.T]
    expected = np.array(moved) / spot.plane.drawn_scale(spot.query[0])
    np.testing.assert_allclose(np.array(spot.response()), expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("metric", METRICS)
def test_steps_of_descent_lower_the_loss_until_the_record_is_first(metric: str) -> None:
    with served(None, db=holding(_keys(), metric=metric)) as site:
        vector = json.dumps([0.5] * D)
        moves: list[Any] = []
        losses: list[float] = []
        last = site.call("ask", vector=vector, temperature=T, shown=N)["hits"][-1]["id"]
        for _ in range(20):
            reply = site.call("gradient", vector=vector, temperature=T, right=last, moves=json.dumps(moves))
            losses.append(reply["loss"])
            moves.append([last, T])
        assert all(after < before for before, after in itertools.pairwise(losses))
        answer = site.call("ask", vector=vector, temperature=T, moves=json.dumps(moves))
        assert answer["hits"][0]["id"] == last
        assert site.call("ask", vector=vector, temperature=T)["hits"][0]["id"] != last  # nothing is remembered


def test_the_next_step_is_where_the_question_goes(site: Site) -> None:
    given = {"vector": json.dumps([1, 0, 2, 0, 1]), "temperature": T}
    before, reply = site.call("ask", **given), site.call("gradient", **given, right="3")
    after = site.call("ask", **given, moves=json.dumps([["3", T]]))
    np.testing.assert_allclose(np.subtract(after["at"], before["at"]), reply["step"], atol=1e-5)
    assert reply["pulls"][0][0] == "3"
    assert len(reply["gradient"]) == D


def test_a_trail_leads_from_the_nearest_record_to_the_mean_of_all(site: Site) -> None:
    given = {"id": "3"}
    trail = site.call("trail", **given)["trail"]
    low, high = (site.call("about")["temperatures"][end] for end in ("low", "high"))
    for place, t in ((trail[0], low), (trail[-1], high)):
        np.testing.assert_allclose(place, site.call("ask", **given, temperature=t)["soft"]["answer"], atol=1e-4)


def test_wrong_moves_fields_and_steps_are_refused(site: Site) -> None:
    for moves in ("{", "[1]", '[["3", 0]]', json.dumps([["3", 1]] * 41)):
        assert "expected a JSON list" in site.call("ask", 400, id="3", moves=moves)["message"]
    assert site.call("gradient", 404, id="3", right="nobody")["type"] == "UnknownId"
    assert "no pairs" in site.call("train", 400, steps=1)["message"]
    response, _ = site.fetch("/api/train?steps=1", "POST")
    assert response.status == 405


def test_colours_of_numbers_and_of_kinds(site: Site) -> None:
    ids = [int(name) for name, _ in site.call("map")["records"]]
    assert site.call("colours", field="size")["numbers"] == ids
    kinds = site.call("colours", field="kind")
    assert [kinds["names"][i] for i in kinds["classes"]] == ["ab"[i % 2] for i in ids]
    assert site.call("colours", field="nothing") == {"generation": 1, "names": [], "classes": [-1] * N}
    many = colours([str(i // 2) for i in range(40)])
    assert (len(many["names"]), many["classes"].count(-1)) == (7, 26)
    assert {one["name"]: one["repeated"] for one in site.call("about")["filters"]} == {"kind": True, "size": True}


def test_regions_are_named_by_what_is_frequent_in_them_alone() -> None:
    rng = np.random.default_rng(0)
    centres = {"whale": (-1, -1), "horse": (-1, 1), "eagle": (1, -1), "snake": (1, 1)}
    places = np.concatenate([np.add(centre, 0.1 * rng.standard_normal((50, 2))) for centre in centres.values()])
    titles = [f"{name} with the number {i}" for name in centres for i in range(50)]
    names = region_names(places, titles, [{"number": i} for i in range(200)], [None] * 200)
    assert {name for name, *_ in names} == set(centres)
    numbered = region_names(places, [""] * 200, [{"size": i // 50} for i in range(200)], [None] * 200)
    assert {name for name, *_ in numbered} == {f"size {i}" for i in range(4)}
    for name, x, y, _ in names:
        np.testing.assert_allclose((x, y), centres[name], atol=0.2)


# -- training ----------------------------------------------------------------------------------------------------------


def _demo() -> softdb.SoftDB:
    data = load_wordnet()
    db = softdb.open(None, dim=96, metric="cosine", encoder=KnownWords(data))
    db.insert(data.ids, data.keys, texts=[payload["gloss"] for payload in data.payloads])
    return db


@pytest.fixture(scope="module")
def demo() -> Any:
    with _demo() as db, served(None, db=db) as site:
        yield site, db


def test_training_lowers_the_loss_and_helps_words_that_it_has_not_seen(demo: Any) -> None:
    site, db = demo
    before = db.generation, db.get(["noun.02503517"]).keys.numpy().tobytes()
    steps, reply = 0, {}
    while steps < 30:
        reply = site.call("train", steps=30, text="Kettle")
        assert reply["steps"] >= steps
        steps = reply["steps"]
    reply = site.call("train", steps=30, measure=1)
    losses = reply["losses"]
    assert np.mean(losses[20:]) < np.mean(losses[:10])
    (first, among), (then, later) = reply["recalls"]
    assert then > first
    assert later > among
    place = site.call("train", steps=30, text="Kettle")["place"]
    assert (place["before"], place["now"], place["held_out"]) == (4, 1, True)
    assert site.call("train", steps=30, text="no word at all")["place"] is None
    assert before == (db.generation, db.get(["noun.02503517"]).keys.numpy().tobytes())
    plain, trained = (site.call("ask", text="kettle", **more)["hits"] for more in ({}, {"trained": 30}))
    assert [hit["id"] for hit in plain[:4]].index("noun.03612814") == 3
    assert trained[0]["id"] == "noun.03612814"
    assert site.call("train", steps=0)["losses"] == []  # a step back is a smaller number


def test_the_projection_of_a_number_of_steps_is_the_same_in_every_run(demo: Any) -> None:
    site, _ = demo
    with served(None, db=_demo()) as other:
        for one in (site, other):
            while one.call("train", steps=5)["steps"] < 5:
                pass
        shown = [one.call("ask", text="kettle", trained=5)["scores"] for one in (site, other)]
        np.testing.assert_allclose(shown[0], shown[1], rtol=1e-4)
        refused = other.call("ask", 400, text="kettle", trained=STEPS)
        assert "train it to that step first" in refused["message"]
        assert f"0 to {STEPS}" in other.call("train", 400, steps=STEPS + 1)["message"]


def test_questions_are_answered_while_training_goes_on(demo: Any) -> None:
    site, _ = demo
    stop, busy = threading.Event(), []

    def train() -> None:
        while not stop.is_set():
            busy.append(site.call("train", steps=STEPS)["steps"])

    threads = [threading.Thread(target=train) for _ in range(3)]  # three pages that train at once
    for thread in threads:
        thread.start()
    try:
        limit = time.monotonic() + 60
        while not busy and time.monotonic() < limit:
            time.sleep(0.01)
        assert site.call("ask", text="violin", temperature=0.05)["hits"]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert math.isfinite(busy[-1])
