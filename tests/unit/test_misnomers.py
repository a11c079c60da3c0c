"""Errors for names of other libraries name softdb's own call, argument or column."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import softdb
from softdb.misnomers import ARGUMENTS, CALLS


@pytest.fixture(scope="module")
def db() -> Any:
    with softdb.open(None, metric="cosine") as database:
        database.insert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], payloads=[{"n": 1}, {"n": 2}])
        yield database


@pytest.mark.parametrize(
    ("name", "own"), [("add", "insert"), ("query", "search"), ("peek", "get"), ("serach", "search"), ("Client", "open")]
)
def test_a_missing_attribute_names_the_call(db: Any, name: str, own: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'; (in softdb it is|did you mean) {own}"):
        getattr(db, name)


@pytest.mark.parametrize(
    ("call", "arguments", "own"),
    [
        ("insert", {"documents": ["a"], "ids": ["1"]}, "in softdb it is texts"),
        ("search", {"queries": [1.0, 0.0], "n_results": 2}, "in softdb it is k"),
        ("search", {"queries": [1.0, 0.0], "where_document": {}}, r"in softdb it is where=\{'\$text'"),
        ("update", {"ids": ["a"], "metadatas": [{}]}, "in softdb it is payloads"),
        ("get", {"limt": 2}, "did you mean limit"),
        ("to_pandas", {"fields": ["n"]}, "in softdb it is columns"),
    ],
)
def test_an_unknown_argument_names_the_right_one(db: Any, call: str, arguments: Any, own: str) -> None:
    with pytest.raises(TypeError, match=rf"^{call}\(\) got an unexpected keyword argument '\w+'; {own}"):
        getattr(db, call)(**arguments)


def test_answers_name_their_columns(db: Any) -> None:
    hits = db.search([1.0, 0.0], k=1)
    for part, name, own in (
        (hits, "distances", "scores"),
        (hits[0][0], "metadata", "payload"),
        (db["a"], "vector", "key"),
    ):
        with pytest.raises(AttributeError, match=f"{name}'; in softdb it is {own}"):
            getattr(part, name)
    with pytest.raises(TypeError, match="'columns'; in softdb it is fields"):
        hits.to_pandas(columns=["n"])
    with pytest.raises(AttributeError, match=r"its tensor has it: \.output\.sum"):
        db.attend(torch.ones(1, 2)).sum()


def test_open_and_the_module_name_the_right_word() -> None:
    with pytest.raises(TypeError, match="'embedding_function'; in softdb it is encoder"):
        softdb.open(None, embedding_function="ngrams")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="'PersistentClient'; in softdb it is open"):
        softdb.PersistentClient  # type: ignore[attr-defined]  # noqa: B018


def test_an_attribute_without_a_relative_is_plainly_missing(db: Any) -> None:
    with pytest.raises(AttributeError, match=r"^'SoftDB' object has no attribute 'zzz'$"):
        db.zzz  # noqa: B018
    assert not hasattr(db, "__array__")
    assert copy.copy(db["a"]).id == "a"


def test_every_name_is_foreign_and_every_answer_is_own(db: Any) -> None:
    """No entry shadows a name of softdb; each first word of an entry is an attribute or argument that exists."""
    hits = db.search([1.0, 0.0], k=1)
    owners = (db, softdb, hits, hits[0][0], db["a"], db.get())
    assert not [name for name in CALLS if hasattr(db, name)]
    for own in CALLS.values():
        word = own.partition("(")[0].partition(",")[0].split(" ")[0].split(".")[0]
        assert word == "len" or any(hasattr(owner, word) for owner in owners), own
    assert not ARGUMENTS.keys() & {"queries", "k", "where", "texts", "keys", "ids", "payloads", "fields", "columns"}


def test_records_and_hits_still_pickle(db: Any) -> None:
    assert pickle.loads(pickle.dumps(db["a"])).payload == {"n": 1}
