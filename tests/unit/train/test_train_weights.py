"""Training a projection: weights of the queries; the report of a fall of recall@1."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds.trainings import SMALL, D, M, keys_of, run, same, world

from softdb.errors import BadInput, TrainingWarning
from softdb.train import Fitted, QueryProjection, fit, load, read_pairs
from softdb.train.held_out import Ranking, split

WEIGHTS = np.random.default_rng(0).uniform(0, 2, M)
WHOLE: dict[str, Any] = {**SMALL, "batch_size": 4 * M, "temperature": 0.3}


def test_one_step_is_adams_on_the_weighted_equation() -> None:
    db, queries, positives = world()
    names = [f"r{i}" if i % 3 == 0 else i for i in range(120)]
    done = fit(db, queries, positives, **{**WHOLE, "epochs": 1}, sample_weight=WEIGHTS)
    train = split(queries, positives, 0.2, False, 0).train.tolist()
    weight = torch.eye(D, dtype=torch.float64, requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for i in train:
        scores = keys_of().double() @ (weight @ queries[i].double()) / 0.3
        right = torch.tensor([names.index(name) for name in positives[i]])
        loss = loss + WEIGHTS[i] * (scores.logsumexp(0) - scores[right].logsumexp(0)) / WEIGHTS[train].sum()
    adam = torch.optim.Adam([weight], lr=0.02)
    loss.backward()  # type: ignore[no-untyped-call]
    adam.step()
    assert done.history[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(done.projection.weight.double(), weight, rtol=0, atol=1e-5)


def test_a_weight_of_2_is_a_query_twice_and_a_weight_of_0_is_none() -> None:
    db, queries, positives = world()
    held = np.zeros(M, np.bool_)
    held[split(queries, positives, 0.3, False, 7).test] = True
    counts = np.where(held, 1, np.arange(M) % 3)
    order = np.repeat(np.arange(M), counts)
    weighed = fit(db, queries, positives, **WHOLE, holdout=held, sample_weight=counts)
    repeated = fit(db, queries[order], [positives[i] for i in order], **WHOLE, holdout=held[order])
    torch.testing.assert_close(weighed.projection.weight, repeated.projection.weight, rtol=0, atol=1e-5)
    assert [epoch.loss for epoch in weighed.history] == pytest.approx([epoch.loss for epoch in repeated.history])
    assert weighed.before == repeated.before
    # of several batches each step divides by the mean weight of all training queries: larger weights change nothing
    scaled = [fit(db, queries, positives, **SMALL, sample_weight=by * WEIGHTS) for by in (1, 8)]
    same(*scaled)


def test_a_resumed_run_has_the_same_weights(tmp_path: Path) -> None:
    db, queries, positives = world()
    whole = fit(db, queries, positives, **SMALL, sample_weight=WEIGHTS)
    file = tmp_path / "run.pt"
    fit(db, queries, positives, **{**SMALL, "epochs": 3}, sample_weight=WEIGHTS, checkpoint=file)
    with pytest.raises(BadInput, match="checkpoint of another run: sample_weight was"):
        fit(db, queries, positives, **SMALL, checkpoint=file, resume=True)
    same(whole, fit(db, queries, positives, **SMALL, sample_weight=WEIGHTS, checkpoint=file, resume=True))


def test_senseless_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    db, queries, positives = world()
    held = np.zeros(M, np.bool_)
    held[split(queries, positives, 0.3, False, 7).test] = True
    for weights, match in (
        (np.ones(M - 1), r"shape \(239,\); expected \(240,\)"), (-WEIGHTS, "the least number is -"),
        (WEIGHTS * np.nan, "hold NaN or infinity"), (held * 1.0, "zero for every query that trains"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=f"sample_weight.*{match}"):
            fit(db, queries, positives, **SMALL, holdout=held, sample_weight=weights, checkpoint=tmp_path / "c.pt")
    assert not list(tmp_path.iterdir())


def test_weights_are_a_field_of_the_pairs(tmp_path: Path) -> None:
    db, queries, positives = world()
    db.snapshot(tmp_path / "db")
    lines = [
        {"query": query, "positives": right, "w": weight}
        for query, right, weight in zip(queries.tolist(), positives, WEIGHTS.tolist(), strict=True)
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--lr", 0.02, "--batch-size", 64, "--epochs", 6, "--patience", 0)
    run("train", tmp_path / "db", pairs, "--out", tmp_path / "p.pt", "--weight", "w", *words)
    done = fit(db, queries, positives, **SMALL, sample_weight=WEIGHTS)
    torch.testing.assert_close(load(tmp_path / "p.pt").weight, done.projection.weight)
    assert not torch.equal(done.projection.weight, fit(db, queries, positives, **SMALL).projection.weight)
    table = tmp_path / "pairs.csv"
    table.write_text("query,positives,w\na,1,0.5\nb,2,3\n")
    assert read_pairs(table, weight="w").weights == [0.5, 3.0]
    assert read_pairs(table).weights is None
    for cell, match in (("-1", "field 'w' is -1; expected a number of at least 0"), ("x", "field 'w' is 'x'"),
                        ("nan", "field 'w' is"), ("", "the cell is empty")):  # fmt: skip
        table.write_text(f"query,positives,w\na,1,0.5\nb,2,{cell}\n")
        with pytest.raises(BadInput, match=rf"pairs\.csv line 3: .*{match}"):
            read_pairs(table, weight="w")
    with pytest.raises(BadInput, match="no field 'v'"):
        read_pairs(table, weight="v")


def test_a_fall_of_recall_1_is_reported_though_recall_10_rose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_db: Any, queries: Any, _right: Any, projection: Any, _view: Any = None) -> Ranking:
        return Ranking(0.5, 0.6, 0.55, len(queries)) if projection is None else Ranking(0.4, 0.8, 0.56, len(queries))

    monkeypatch.setattr(sys.modules["softdb.train.fit"], "ranked", measured)  # the package's name is the function
    db, queries, positives = world()
    fall = "recall@1 0.500 -> 0.400, though recall@10 0.600 -> 0.800 rose"
    with pytest.warns(TrainingWarning, match=f"^fit: held-out queries fell by {fall}; choose the epoch"):
        done = fit(db, queries, positives, **{**SMALL, "epochs": 1})
    assert (done.fell, done.fall) == (["recall_1"], fall)
    assert str(done).splitlines()[-1] == f"fell: {fall}"
    db.snapshot(tmp_path / "db")
    lines = [{"query": query, "positives": right} for query, right in zip(queries.tolist(), positives, strict=True)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ask = ("train", tmp_path / "db", tmp_path / "p.jsonl", "--out", tmp_path / "p.pt", "--epochs", 1)
    assert f"held-out queries fell by {fall}:" in " ".join(run(*ask, "--patience", 0).stdout.split())
    assert json.loads(run(*ask, "--patience", 0, "--json").stdout)["fell"] == ["recall_1"]


def test_a_fall_without_a_rise_names_only_what_fell() -> None:
    before, lower, higher = Ranking(0.5, 0.6, 0.5, 9), Ranking(0.4, 0.6, 0.5, 9), Ranking(0.5, 0.7, 0.4, 9)
    projection = QueryProjection(2)
    assert Fitted(projection, before, lower, [], 1, 0.05).fall == "recall@1 0.500 -> 0.400"
    assert Fitted(projection, before, higher, [], 1, 0.05).fall == "MRR@100 0.500 -> 0.400"
    assert Fitted(projection, before, before, [], 1, 0.05).fall == ""
    assert "though" not in str(Fitted(projection, before, lower, [], 1, 0.05))
