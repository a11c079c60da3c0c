"""Types of answers as a type checker infers them; mypy reads this file, and a run confirms it."""

from __future__ import annotations

import pytest
import torch
from typing_extensions import assert_type
from worlds import holding

import softdb
from softdb import nn
from softdb.reports import IndexReport


def test_answers_have_types() -> None:
    with softdb.open(None, dim=2) as db:
        assert_type(db, softdb.SoftDB)
        db.insert(["a", 7], [[1, 0], [0, 1]])
        hits = db.search([1, 0], k=1)
        assert_type(hits.ids, list[list[int | str]])
        assert_type(hits[0], softdb.QueryHits)
        assert_type(hits[0][0], softdb.Hit)
        assert_type(hits[:1], softdb.Hits)
        assert_type(db.get(["a"])[0], softdb.Record)
        assert_type(db.build_index(), IndexReport)
        assert_type(db.build_index(background=True), softdb.Build[IndexReport])
        assert isinstance(hits[0][0], softdb.Hit)


def test_modules_have_types() -> None:
    with holding([[1, 0], [0, 1]], ids=["a", 7]) as db:
        view = softdb.nn.View(db, torch.nn.Linear(2, 2))
        assert_type(view, nn.View)
        answer = view(torch.zeros(1, 2))
        assert_type(answer, softdb.Pooled)
        assert isinstance(answer, softdb.Pooled)
        remembered = nn.Memory(db)(torch.zeros(1, 2))
        assert_type(remembered, softdb.Pooled)
        assert isinstance(remembered, softdb.Pooled)
        output = nn.Attention(db, 4, 2)(torch.zeros(1, 4))
        assert_type(output, tuple[torch.Tensor, torch.Tensor | None])
        assert isinstance(output, tuple)


def test_a_wrong_argument_is_an_error_to_a_type_checker() -> None:
    with softdb.open(None, dim=2) as db:
        with pytest.raises(softdb.BadInput, match="expected real numbers"):
            db.search({"query": 1})  # type: ignore[arg-type]
        with pytest.raises(softdb.BadInput, match="expected a list of str or int"):
            db.get(3.5)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="serch"):
            _ = softdb.serch  # type: ignore[attr-defined]
