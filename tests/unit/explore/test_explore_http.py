"""The explorer over HTTP: it gives the database's answers, and only to its own page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explore_site import TOKEN, Site, served
from worlds import holding

import softdb
from softdb.text import HashedNGrams
from softdb.tools.cli.served import Served
from softdb.tools.explore.display import fields_of, named_id, record, title
from softdb.tools.explore.guard import LONGEST, WAITING
from softdb.tools.explore.plane import Plane
from softdb.tools.explore.questions import Question, Weighing
from softdb.tools.explore.replies import Answers
from softdb.tools.explore.server import listening

BELOW = f"/{TOKEN}/".encode()
ROOT = Path(softdb.__file__).parents[1]
HOSTILE = '<img src=x onerror="alert(1)"></script>\x1b[2J\u202e{{1}}'
WORDS = ["call me ishmael", "down the rabbit hole", "the hound of the moor", HOSTILE]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "library"
    with softdb.open(path, metric="cosine", encoder=HashedNGrams(64), fields=["year"]) as db:
        ids: list[str | int] = [1, "1", "hound", HOSTILE, 2**53 + 1]
        payloads: list[Any] = [
            {"year": 1851, "by": {"name": "Melville"}},
            {"year": 1865},
            {"year": 1902},
            {HOSTILE: HOSTILE},
            7,
        ]
        db.insert(ids, texts=[*WORDS, "another"], payloads=payloads)
        db.insert(["bare"], keys=[None], texts=["no key at all"])
        db.index_text()
    return path


@pytest.mark.parametrize("where", [None, {"year": {"$gte": 1860}}])
@pytest.mark.parametrize(
    ("way", "options"), [("exact", {}), ("nearest", {"k": 2}), ("estimate", {"rtol": 0.1})], ids=lambda one: str(one)
)
def test_the_weights_are_those_of_attend(site: Site, place: Path, way: str, options: Any, where: Any) -> None:
    with softdb.open(place, mode="r") as db:
        query, t = db.core.as_queries(["rabbit"]), 0.2
        pooled = db.attend(query, temperature=t, where=where, **options)
        hits = db.search(query, 5, where=where)
        asked: dict[str, Any] = {"text": "rabbit", "way": way, "temperature": t, "shown": 5, **options}
        asked |= {"where": json.dumps(where)} if where else {}
        actual = site.call("ask", **asked)
        soft = actual["soft"]
        assert [hit["id"] for hit in actual["hits"]] == [named_id(one) for one in hits.ids[0]]
        weights = [math.exp(one / t - pooled.lse[0].item()) for one in hits.scores[0, : len(hits.ids[0])].tolist()]
        if way == "nearest":
            weights[2:] = [0.0] * len(weights[2:])
        np.testing.assert_allclose(soft["weights"], weights, rtol=1e-4)
        np.testing.assert_allclose(soft["output"], pooled.output[0, :12].tolist(), rtol=1e-5)
        assert soft["candidates"] == int(pooled.n_pooled[0])
        assert soft["exact"] == bool(pooled.exact[0])
        squares = sum(weight * weight for weight in weights)  # all that take part are shown
        assert soft["effective"] == pytest.approx(1 / squares, rel=1e-3)
        # what the map's records weigh, as the page computes it
        keys, (snapshot, allowed) = site.call("map"), db.core.view(where)
        assert len(keys["points"]) == len(actual["lights"]) == db.core.keyed
        lit = {one[0]: light for one, light in zip(keys["records"], actual["lights"], strict=True)}
        assert lit["1"] == pytest.approx(torch.cosine_similarity(query, db.get([1]).keys).item(), abs=1e-6) or where
        assert sum(one is None for one in lit.values()) == (
            0 if allowed is None else db.core.keyed - int((snapshot.live & allowed).sum())
        )
        again = site.call("weigh", **(asked | {"temperature": 100}))
        assert again["soft"]["effective"] == pytest.approx(2 if way == "nearest" else len(hits.ids[0]), rel=1e-2)


def question(**given: Any) -> tuple[Question, Weighing]:
    words = {name: str(value) for name, value in given.items()}
    return Question.of(words), Weighing.of(words)


def test_the_effective_number_is_that_of_the_weights(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(3000, 4)).astype(np.float32)
    with holding(keys, payloads=[{"x": i} for i in range(3000)], metric="l2", fields=["x"]) as db:
        answers = Answers(Served(None, db=db))
        for where, least in (({}, 0), ({"where": '{"x": {"$gte": 500}}'}, 500)):
            for t in (0.01, 0.5, 20):
                soft = answers.ask(*question(vector="1 0 0 1", temperature=t, **where), lambda: None)["soft"]
                scores = -((keys[least:].astype(np.float64) - [1, 0, 0, 1]) ** 2).sum(1)
                weights = np.exp((scores - scores.max()) / t)
                assert soft["effective"] == pytest.approx(weights.sum() ** 2 / np.square(weights).sum(), rel=1e-4)


def test_the_end_of_an_answer_does_not_wait_for_the_browser() -> None:
    """asyncio switches Nagle's algorithm off where a socket says that it is TCP; else an answer may take 40 ms more."""
    with listening(0) as listener, contextlib.closing(socket.create_connection(listener.getsockname())):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_map_comes_with_the_order_of_declared_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.filters.masks.LARGE", 0)
    with holding(np.ones((40, 2)), payloads=[{"x": i} for i in range(40)], fields=["x"]) as db:
        answers = Answers(Served(None, db=db))
        asked = list[str]()

        def trace(_: object, sql: str, __: object) -> bool:
            asked.append(sql)
            return True

        answers.map()
        db._store.catalog.connection.exec_trace = trace
        assert db.count({"x": {"$lt": 20}}) == 20
        listed = [sql for sql in asked if "payload" in sql and "row IN (SELECT value" not in sql]
        assert listed == []
        assert len(asked) > 1


def test_an_estimated_effective_number_is_at_most_the_records(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = softdb.SoftDB.attend

    def off(self: softdb.SoftDB, queries: Any, temperature: float = 1.0, **words: Any) -> Any:
        pooled = attend(self, queries, temperature=temperature, **words)
        return dataclasses.replace(pooled, lse=pooled.lse + 0.01 * math.log(temperature))  # as estimates are

    monkeypatch.setattr(softdb.SoftDB, "attend", off)
    with holding(rng.normal(size=(30, 4))) as db:
        answers = Answers(Served(None, db=db))
        given = {"vector": "1 2 3 4", "way": "estimate", "temperature": "1e6"}
        assert answers.ask(Question.of(given), Weighing.of(given), lambda: None)["soft"]["effective"] == 30


@pytest.mark.parametrize("way", ["exact", "nearest", "estimate"])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_at_any_temperature_weights_are_weights(metric: Any, way: str, rng: np.random.Generator) -> None:
    with holding(1e3 * rng.normal(size=(30, 4)), metric=metric) as db:
        answers = Answers(Served(None, db=db))
        for t in ("1e-320", "1e-38", "1e-10", "1e-3", "1", "1e30", "1e300"):
            given = {"vector": "1 2 3 4e3", "way": way, "k": "5", "temperature": t, "shown": "50"}
            soft = answers.ask(Question.of(given), Weighing.of(given), lambda: None)["soft"]
            assert sum(soft["weights"]) == pytest.approx(1, rel=0.02), t
            assert soft["weights"] == sorted(soft["weights"], reverse=True)
            assert 1 <= soft["effective"] <= 30.01
            assert 0 <= soft["rest"] <= 0.02
        assert soft["effective"] == pytest.approx(5 if way == "nearest" else 30, rel=1e-3)


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "rabbit"},
        {"id": "hound"},
        {"id": '"1"', "ranking": "hybrid", "words": "hole"},
        {"text": "hole", "ranking": "text"},
    ],
    ids=lambda one: str(one)[:30],
)
def test_the_python_of_an_answer_gives_the_answer(site: Site, asked: dict[str, str]) -> None:
    actual = site.call("ask", shown=3, temperature=0.3, where='{"year": {"$lt": 1900}}', **asked)
    scope: dict[str, Any] = {}
    exec(actual["python"], scope)
    with scope["db"]:
        assert [named_id(one) for one in scope["hits"].ids[0]] == [hit["id"] for hit in actual["hits"]]
        assert scope["answer"].lse[0].item() == pytest.approx(actual["soft"]["lse"], rel=1e-5)


def test_ids_and_payloads_arrive_complete_and_as_text(site: Site) -> None:
    about = site.call("about")
    assert (about["records"], about["keyless"], about["takes_text"], about["text_index"]) == (6, 1, True, "words")
    fields = {one["name"]: (one["kinds"], one["indexed"]) for one in about["filters"]}
    assert (fields["by.name"], fields["year"]) == ((["text"], False), (["number"], True))
    (hit,) = site.call("ask", id=named_id(HOSTILE), shown=1)["hits"]
    assert hit["title"].startswith("<img src=x")
    assert hit["payload"] == [[one := '<img src=x onerror="alert(1)"></script>\\x1b[2J\\u202e{{1}}', one]]
    assert site.call("ask", id=hit["id"], shown=1)["hits"] == [hit]
    assert site.call("ask", id=2**53 + 1, shown=1)["hits"][0]["id"] == str(2**53 + 1)  # JavaScript's numbers end before
    assert [site.call("ask", id=one, shown=1)["hits"][0]["text"] for one in ("1", '"1"')] == WORDS[:2]


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        ({}, "BadInput", "the query is empty or given twice"),
        ({"text": " "}, "BadInput", "the query is empty"),
        ({"text": "a", "id": "b"}, "BadInput", "or given twice"),
        ({"text": "a", "limit": 5}, "BadInput", "there is no parameter 'limit'"),
        ({"vector": "[1, nan" + ", 0" * 62 + "]"}, "BadInput", "NaN or infinity"),
        ({"vector": "[1e999" + ", 0" * 63 + "]"}, "BadInput", "NaN or infinity"),
        ({"vector": "[1, 2]"}, "BadInput", "2 wide"),
        ({"vector": "[[1]]"}, "BadInput", "a vector is numbers"),
        ({"vector": "one two"}, "BadInput", "a vector is numbers"),
        ({"id": "nobody"}, "UnknownId", "nobody"),
        ({"id": "-"}, "UnknownId", "'-'"),
        ({"id": "x" * 100_000}, "UnknownId", "xxx"),
        ({"id": "bare"}, "BadInput", "has no key"),
        ({"text": "a", "temperature": 0}, "BadInput", "above 0"),
        ({"text": "a", "temperature": "nan"}, "BadInput", "above 0"),
        ({"text": "a", "temperature": "inf"}, "BadInput", "above 0"),
        ({"text": "a", "shown": 51}, "BadInput", "from 1 to 50"),
        ({"text": "a", "shown": 1.5}, "BadInput", "whole number"),
        ({"text": "a", "way": "nearest", "k": 0}, "BadInput", "k is '0'"),
        ({"text": "a", "way": "guess"}, "BadInput", "choose one of 'exact'"),
        ({"text": "a", "where": "{"}, "BadInput", "the filter is not JSON"),
        ({"text": "a", "where": "[" * 50_000}, "BadInput", "the filter is not JSON"),
        ({"text": "a", "where": '{"year": {"$gtt": 1}}'}, "BadFilter", "$gt"),
        ({"text": "a", "where": "5"}, "BadFilter", "where"),
        ({"id": "hound", "ranking": "hybrid"}, "BadInput", "needs words"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_bad_questions_are_typed_errors_in_a_line(site: Site, parameters: Any, kind: str, message: str) -> None:
    error = site.call("ask", 404 if kind == "UnknownId" else 400, **parameters)
    assert (error["type"], "\n" in error["message"]) == (kind, False)
    assert message in error["message"]
    assert site.call("about")["records"] == 6


def test_only_the_page_itself_is_answered(site: Site) -> None:
    for host in ("evil.example", f"evil.example:{site.port}", "127.0.0.1", "127.0.0.1:1", ""):
        response, body = site.fetch("/api/about", Host=host)
        assert (response.status, b"ForeignHost" in body, b"records" in body) == (403, True, False)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"):
        response, _ = site.fetch("/api/about", method)
        assert (response.status, response.headers["Allow"]) == (405, "GET")
    assert site.fetch("/api/about", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0].status == 403
    for origin in ("http://evil.example", f"https://127.0.0.1:{site.port}", "null"):
        assert site.fetch("/api/about", Origin=origin)[0].status == 403
    assert site.fetch("/api/about", Origin=f"http://127.0.0.1:{site.port}")[0].status == 200
    assert site.fetch("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0].status == 200
    for path in ("/", "/page.js", "/style.css", "/icon.svg", "/api/about", "/nothing"):
        response, _ = site.fetch(path)
        headers = {name.lower(): value for name, value in response.headers.items()}
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_without_the_token_nothing_is_answered(site: Site) -> None:
    for token in ("", "b" + TOKEN[1:], TOKEN[:-1], TOKEN + "x", "%ff", f"x/{TOKEN}"):
        stranger = Site(site.port, None, token)
        for path in ("/", "/page.js", "/api/about", "/api/ask?text=a"):
            response, body = stranger.fetch(path)
            assert (response.status, response.headers["Content-Type"]) == (403, "text/plain; charset=utf-8")
            assert body.startswith(
                b"This address lacks the explorer's token. Open the address that softdb explore printed"
            )
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
    response, _ = Site(site.port, None, TOKEN).fetch("")
    assert (response.status, response.headers["Location"]) == (307, f"/{TOKEN}/")
    assert "Set-Cookie" not in site.fetch("/")[0].headers  # browsers send cookies to all ports of a host
    assert site.fetch("/api/about")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2fserver.py",
        "//etc/passwd",
        "/page.js%00",
        "/api/",
        "/api/../page.js",
        "/%ff",
    ],
)
def test_no_other_file_is_served(site: Site, path: str) -> None:
    response, body = site.fetch(path)
    assert (response.status, b"NotFound" in body) == (404, True)


def test_the_page_has_no_inline_code_and_no_remote_address(site: Site) -> None:
    html = site.fetch("/")[1].decode()
    for word in ("<script>", "<style", " style=", " onclick=", "http://", "https://", "//"):
        assert word not in html
    names = [file.name for file in (ROOT / "softdb/tools/explore/page").iterdir() if file.suffix != ".svg"]
    assert {"page.js", "style.css"} < set(names)
    for name in names:
        source = site.fetch(f"/{name}")[1].decode()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "http://",
            "https://",
            "url(",
        ):
            assert word not in source, name
        assert len(source.splitlines()) <= 400


def test_a_request_that_is_too_long_is_refused(site: Site) -> None:
    for length in (LONGEST + 1, 10_000_000):
        with socket.create_connection(("127.0.0.1", site.port), timeout=120) as raw, contextlib.suppress(OSError):
            raw.sendall(
                b"GET %bapi/ask?text=%b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % (BELOW, b"x" * length, site.port)
            )
            assert raw.recv(100).startswith((b"HTTP/1.1 414", b"HTTP/1.1 400"))  # or it has hung up before the end
    assert site.call("ask", 400, vector="0 " * 10_000)["message"].startswith("queries are 10000 wide")
    assert site.call("about")["records"] == 6


@pytest.mark.parametrize("name", ["Host", "Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode", "sec-fetch-DEST"])
@pytest.mark.parametrize("second", ["same-origin", "cross-site"])
def test_a_header_that_decides_comes_once(site: Site, name: str, second: str) -> None:
    first = f"127.0.0.1:{site.port}" if name == "Host" else "same-origin"
    host = b"" if name == "Host" else b"Host: 127.0.0.1:%d\r\n" % site.port
    pair = f"{name}: {first}\r\n{name.upper()}: {second}\r\n".encode()
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as raw:
        raw.sendall(b"GET %bapi/about HTTP/1.1\r\n%b%b\r\n" % (BELOW, host, pair))
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")


def test_half_sent_requests_neither_lock_the_page_out_nor_stay(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.tools.explore.guard.SECONDS", 600.0)
    half = b"GET %bapi/about HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX: " % (BELOW, site.port)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(600)]
        for one in strangers:
            with contextlib.suppress(ConnectionError):  # closed already, for a later one
                one.sendall(half)
        assert site.call("about")["records"] == 6
        ended = [stranger for stranger in strangers if hung_up(stranger, 0)]
        assert len(strangers) - len(ended) <= WAITING
        assert not hung_up(strangers[-1], 0)  # the oldest go first
    monkeypatch.setattr("softdb.tools.explore.guard.SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        late = [stack.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(3)]
        late[1].sendall(half)
        late[2].sendall(half + b"\r\n\r\n" + half)  # a whole one first
        assert late[2].recv(100).startswith(b"HTTP/1.1 200 ")
        assert all(hung_up(one, 60) for one in late)
        assert site.call("about")["records"] == 6


def hung_up(connection: socket.socket, seconds: float) -> bool:
    """Return whether the server closes a connection within so many seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except (BlockingIOError, TimeoutError):
        return False
    except ConnectionError:
        return True
    return True


def test_only_this_host_can_connect() -> None:
    with listening(None) as first, listening(None) as second:  # where the port is taken, by another
        assert {one.getsockname()[0] for one in (first, second)} == {"127.0.0.1"}
        assert first.getsockname()[1] != second.getsockname()[1]


def test_overtaken_questions_are_not_answered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    gate, ended = threading.Event(), threading.Event()

    def slow(self: Answers, question: Question, weighing: Weighing, wanted: Any) -> dict[str, Any]:
        begun.append(question.text or "")
        gate.wait(60)
        try:
            wanted()
        except BaseException:
            ended.set()
            raise
        return {}

    monkeypatch.setattr(Answers, "ask", slow)
    before, raw = site.desk.overtaken, []
    for text in ("first", "second", "third", "fourth"):  # two run, two wait
        one = socket.create_connection(("127.0.0.1", site.port))
        one.sendall(f"GET /{TOKEN}/api/ask?text={text} HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n".encode())
        raw.append(one)
        until(lambda: len(begun) == min(2, len(raw)))
    for one in raw:
        one.close()  # as a browser does when a fetch is aborted
    until(lambda: site.desk.overtaken == before + 4)
    gate.set()
    until(ended.is_set)
    assert site.call("about")["records"] == 6
    assert sorted(begun) == ["first", "second"]  # those that waited were never begun


def until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_many_requests_at_once_are_answered_or_told_to_wait(site: Site) -> None:
    with ThreadPoolExecutor(60) as pool:
        kinds = [one.result() for one in [pool.submit(site.fetch, f"/api/ask?text=t{i}") for i in range(120)]]
    statuses = [response.status for response, _ in kinds]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 30
    assert all(b"Busy" in body for response, body in kinds if response.status == 503)
    assert site.call("ask", text="rabbit")["hits"]


def test_writes_are_seen_and_a_removed_database_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with softdb.open(path, dim=2, num_classes=3) as db, served(path) as site:
        about = site.call("about")
        assert (about["records"], about["values"], about["temperatures"]["start"]) == (0, "classes", 0.1)
        assert site.call("map") == {
            "generation": about["generation"],
            "of": 0,
            "share": 0.0,
            "dim": 2,
            "names": [],
            "points": [],
            "records": [],
        }
        empty = site.call("ask", vector="1 0")
        assert (empty["hits"], empty["soft"]["candidates"], empty["soft"]["effective"]) == ([], 0, 0)
        db.insert(["a", "b"], [[1, 0], [0, 1]], [2, 0])
        actual = site.call("ask", vector="1 0", temperature=1)
        classes = dict(map(tuple, actual["soft"]["classes"]))
        assert classes[2] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-5)
        assert actual["map"] < actual["generation"]  # so the page fetches another
        assert len(site.call("map")["points"]) == 2
        assert site.call("ask", vector="1 0")["map"] == actual["generation"]
        db.delete(["a"])
        assert [one["id"] for one in site.call("ask", vector="1 0")["hits"]] == ["b"]
        db.close()
        shutil.rmtree(path)
        assert site.call("ask", 503, vector="1 0")["type"] == "NotADatabase"
        holding([[0, 0, 1]], ids=["c"], path=path).close()
        assert site.call("ask", vector="[0, 0, 1]")["hits"][0]["id"] == "c"
        assert site.call("ask", 400, vector="1 0")["message"].endswith("3 wide; encode them alike")


def test_questions_while_another_process_writes(tmp_path: Path) -> None:
    path, stop = tmp_path / "db", threading.Event()
    with softdb.open(path, dim=2, durability="relaxed") as db, served(path) as site:
        db.insert(range(50), np.eye(2)[np.arange(50) % 2])
        db.flush()

        def write() -> None:
            for i in range(50, 10_000):
                if stop.is_set():
                    return
                db.insert([i], [[1, i / 1e4]])
                db.delete([i - 40])
                db.flush()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for i in range(60):
                response, body = site.fetch(f"/api/{'map' if i % 5 == 0 else 'ask?vector=1+0'}")
                assert response.status == 200 or b"StaleRead" in body or b"UnknownId" in body, body
        finally:
            stop.set()
            thread.join()
        assert site.call("ask", vector="1 0")["hits"]


def test_recall_of_an_answer(site: Site) -> None:
    actual = site.call("compare", text="rabbit", shown=3)
    assert (actual["recall"], actual["missed"], actual["of"]) == (1.0, [], 3)
    assert "only a ranking by vector" in site.call("compare", 400, text="rabbit", ranking="text")["message"]


def test_a_filter_on_an_unknown_field_suggests_the_nearest(place: Path) -> None:
    with Served(place) as database:
        answers = Answers(database)
        for noted in (["no record has the field 'yeer'"], []):  # a handle warns once, the page tells each time
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("softdb.tools.explore.replies._WARNINGS", noted)
                actual = answers.ask(Question.of({"text": "a", "where": '{"yeer": 1}'}), Weighing.of({}), lambda: None)
            assert actual["notes"] == ["no record has the field 'yeer'"]
            answers._cache.clear()


def test_a_database_cannot_make_the_explorer_load_a_model(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=2) as db:
        db.core.store.note_encoder("stranger/model")
        db.insert([1], [[1, 0]], texts=["a thief in space"])
        db.index_text()
    with served(tmp_path / "db") as site:
        assert not site.call("about")["takes_text"]
        actual = site.call("ask", text="space")
        assert (actual["hits"][0]["id"], actual["soft"]["weights"]) == ("1", [1.0])
        assert actual["notes"][0].startswith("“space” has no vector here: these records have the word")
        assert "query = db.get([1]).keys\nhits = db.search(texts=['space'], mode='text'" in actual["python"]
        missing = site.call("ask", text="sea")
        assert (missing["hits"], missing["soft"], missing["lights"]) == ([], None, [None])
    with softdb.open(tmp_path / "db") as db:
        db.drop_text_index()
    with served(tmp_path / "db") as site:
        assert "--encoder MODEL" in site.call("ask", 400, text="space")["message"]


def test_the_plane_is_that_of_pca(rng: np.random.Generator) -> None:
    for n, d in ((300, 8), (20, 50)):
        keys = rng.normal(size=(n, d)) * np.linspace(3, 1, d) + 5
        with holding(keys, metric="l2") as db:
            plane = Plane.of(db)
            left, singular, _ = np.linalg.svd(keys - keys.mean(0), full_matrices=False)
            np.testing.assert_allclose(np.abs(plane.at(plane.keys)), np.abs(left * singular)[:, :2], atol=1e-3)
            squares = np.square(singular)
            assert plane.share == pytest.approx(squares[:2].sum() / squares.sum(), rel=1e-4)
            db.insert([n], keys[:1])
            again = Plane.of(db, plane)
            assert ((again.axes * plane.axes).sum(0) > 0).all()  # it is not mirrored when a record comes


@pytest.mark.parametrize("keys", [[[1.0, 1.0]], [[1.0, 1.0]] * 5, [[0.0, 0.0], [1.0, 0.0]]])
def test_the_map_works_with_very_few_records(keys: list[list[float]]) -> None:
    with holding(keys, metric="cosine") as db:
        plane = Plane.of(db)
        assert np.isfinite(plane.at(plane.keys)).all()
        assert 0 < plane.temperatures.low < plane.temperatures.start < plane.temperatures.high < math.inf


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize(("n", "kind"), [(3, "apart"), (40, "apart"), (3000, "apart"), (3000, "heaps"), (3000, "long")])
def test_the_slider_starts_at_a_soft_query(n: int, kind: str, metric: Any, rng: np.random.Generator) -> None:
    """The stored keys as queries, as in the page's first question."""
    keys = rng.normal(size=(n, 16))
    if kind == "heaps":
        keys = keys * 0.1 + rng.normal(size=(30, 16))[rng.integers(30, size=n)]
    with softdb.open(None, dim=16, metric=metric) as db:
        db.insert(range(n), keys * (1000 if kind == "long" else 1))
        start = Plane.of(db).temperatures.start
        asked = db.get(range(min(n, 200))).keys.double()
        warm, colder = (db.attend(asked, temperature=t).lse for t in (start, start / 2))
        effective = float((2 * warm - colder).exp().median())  # 1 / Σ w²
        assert min(1.2, n / 3) < effective < max(0.8 * n, 2.5)
        if n == 3000:
            assert 1.9 < effective < 6


def test_a_sample_stays_when_records_come(rng: np.random.Generator) -> None:
    with holding(rng.normal(size=(5000, 2))) as db:
        first = Plane.of(db)
        db.insert(range(5000, 5100), rng.normal(size=(100, 2)))
        second = Plane.of(db)
        assert len(first.rows) == len(second.rows) == 2000
        assert len(set(first.rows.tolist()) & set(second.rows.tolist())) > 1900
        assert first.rows.mean() == pytest.approx(2500, abs=100)


def test_names_of_records_and_fields() -> None:
    names: list[str | int] = [7, "7", "a b", " a", "", '"', "-", "a\n"]
    assert [named_id(name) for name in names] == ["7", '"7"', "a b", '" a"', '""', '"\\""', '"-"', '"a\\n"']
    payloads: list[Any] = [{"b": 1, "a": "x", "name": "n"}, {"b": 1}, None, 5]
    assert [title(payload, "t") for payload in payloads[:2]] + [title(payload, None) for payload in payloads[2:]] == [
        "n",
        "t",
        "",
        "",
    ]
    assert title({"b": [1]}, None) == ""  # so the id stands in its place
    assert record(1, {"b": [0.1 + 0.2, 1]}, None)["payload"] == [["b", "[0.3, 1]"]]
    assert [title({"a": "x"}, one) for one in ("t", None)] == ["t", "x"]
    actual = fields_of([{"a.b": 1, "c": {"d": ["x", "y"]}, "": 2}, {"a.b": True}, 5], ["e"], True)
    kinds = {one["name"]: one["kinds"] for one in actual}
    assert kinds == {"a\\.b": ["boolean", "number"], "c.d": ["list"], "e": [], "$text": ["text"]}
    assert sorted(actual[1]["values"]) == ['"x"', '"y"']


def test_the_command_prints_its_address_and_ends_at_ctrl_c(place: Path) -> None:
    words = [sys.executable, "-m", "softdb", "explore", str(place), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port, token = re.fullmatch(r"softdb explore: http://127.0.0.1:(\d+)/([\w-]{22})/ .*\n", line).groups()  # type: ignore[union-attr]
        assert Site(int(port), None, token).call("about")["records"] == 6
        assert Site(int(port), None, "").fetch("/api/about")[0].status == 403
        taken = subprocess.run([*words[:-1], port], capture_output=True, text=True, check=False, cwd=ROOT)
        assert (taken.returncode, f"port {port} cannot be used" in taken.stderr) == (1, True)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, errors) == (0, "", "")


def test_the_browser_gets_the_address_in_a_private_file(place: Path, tmp_path: Path) -> None:
    script, seen = tmp_path / "browser", tmp_path / "seen"
    script.write_text(
        f'#!/bin/sh\ncp "${{1#file://}}" {seen}\nstat -c %a "$(dirname "${{1#file://}}")" > {tmp_path}/mode\n'
    )
    script.chmod(0o755)
    words = [sys.executable, "-m", "softdb", "explore", str(place), "--port", "0", "--open"]
    environment = {**os.environ, "BROWSER": f"{script} %s"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[2]
            until(lambda: (tmp_path / "mode").exists() and (tmp_path / "mode").read_text().strip() != "")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    assert (tmp_path / "mode").read_text() == "700\n"
    assert f'url={address}"' in seen.read_text()


def test_the_command_refuses_paths_without_a_database(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from softdb.tools.cli.commands import app

    for words, message in (([], "or --demo"), (["db", "--demo"], "or --demo"), ([str(tmp_path)], "holds no")):
        result = CliRunner().invoke(app, ["explore", *words])
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr
