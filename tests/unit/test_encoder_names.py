"""A database stores the name and settings of its encoder, and copies keep them."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

import softdb
from softdb.encoders import encoder_of, name_of, ngrams
from softdb.formats import export_records, import_records, read_header, read_records
from softdb.store.format import setting_crc
from softdb.text import HashedNGrams, SentenceEncoder
from softdb.tools.cli.places import chosen, named_encoder

BOOK = ["Schumacher", "Schneider", "Fischer", "Weber", "Schuler"]


class Letters:
    """An encoder of a user's own."""

    def __init__(self, name: object = "letters", dim: int = 26) -> None:
        self.name, self.dim = name, dim

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            np.add.at(vector, [ord(letter) % self.dim for letter in text], 1)
        return vectors


def book(path: Path | None, encoder: Any) -> softdb.SoftDB:
    db = softdb.open(path, encoder=encoder, metric="cosine")
    db.insert(BOOK, BOOK)
    return db


def set_encoder(path: Path, value: object) -> None:
    """A name of a stranger's choosing, with its checksum."""
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    row = ("encoder", value, setting_crc("encoder", value))
    connection.execute("INSERT OR REPLACE INTO settings VALUES(?, ?, ?)", row)
    connection.close()


def test_ngrams_answer_texts_when_opened_again_without_being_given(tmp_path: Path) -> None:
    book(tmp_path / "db", HashedNGrams(64)).close()
    for mode in ("r", "rw"):
        with softdb.open(tmp_path / "db", mode=mode) as db:
            assert db.encoder_name == db.stats().encoder == "ngrams"
            assert db.search("Schuller", k=1).ids == [["Schuler"]]
    with softdb.open(tmp_path / "db") as db:
        db.insert(["Schulz"], ["Schulz"])
        assert db.search("Schultz", k=1).ids == [["Schulz"]]


def test_the_writer_is_killed_and_the_encoder_is_still_known(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        book(tmp_path / "db", HashedNGrams(64, (3,)))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with softdb.open(tmp_path / "db") as db:
        assert db.encoder_name == "ngrams(3)"
        assert db.search("Schuller", k=1).scores.item() == pytest.approx(
            float((HashedNGrams(64, (3,))(["Schuller", "Schuler"]).prod(0)).sum())
        )


def test_ngrams_of_other_sizes_have_another_name() -> None:
    assert ngrams("ngrams", 8) == HashedNGrams(8)
    assert ngrams(HashedNGrams(8, (1, 5)).name, 8) == HashedNGrams(8, (1, 5))
    for name in ("ngrams(2,3)", " ngrams (2 ,3) ", "ngrams( 2,  3 )"):
        assert ngrams(name, 8) == HashedNGrams(8, (2, 3))
    for name in ("ngram", "ngrams()", "ngrams(2); x", "NGRAMS", "ngrams(" + "2, " * 20 + "2)"):
        assert ngrams(name) is None


@pytest.mark.parametrize(
    "name", ["ngram", "ngrams()", "NGRAMS", "n-grams", "ngrams(2-5)", "ngrams [2, 5]", "ngrams256"]
)
def test_a_name_like_ngrams_is_no_model(name: str) -> None:
    with pytest.raises(
        softdb.BadInput, match=r"open: encoder is .*; did you mean 'ngrams', or with sizes 'ngrams\(2, 5"
    ):
        softdb.open(None, encoder=name)
    for other in ("ngram-bert", "someone/ngrams", "./ngrams", "ngrams/"):
        assert name_of(encoder_of(other)) == other


def test_encoders_with_other_vectors_have_other_names() -> None:
    eye = np.eye(4, 2)
    encoders = [
        SentenceEncoder("m"), SentenceEncoder("n"), SentenceEncoder("m", normalise=False),
        SentenceEncoder("m", projection=eye), SentenceEncoder("m", projection=-eye),
    ]  # fmt: skip
    names = [name_of(encoder) for encoder in encoders]
    assert names[0] == "m"
    assert len(set(names)) == 5
    assert name_of(SentenceEncoder("m", projection=eye.copy())) == names[3]
    assert name_of(named_encoder("demo")) == "demo"
    assert name_of(SentenceEncoder("m", device="cuda", batch_size=3)) == "m"


def test_another_encoder_is_refused_and_both_are_named(tmp_path: Path) -> None:
    with book(tmp_path / "db", Letters()) as db:
        assert db.encoder_name == "letters"
    for mode in ("r", "rw"):
        with pytest.raises(softdb.BadInput, match=r"open: .* made by the encoder 'letters', not by 'other'.*reembed"):
            softdb.open(tmp_path / "db", mode=mode, encoder=Letters("other"))
    with softdb.open(tmp_path / "db", encoder=Letters()) as db:
        assert db.search("Schuler", k=1).ids == [["Schuler"]]
    message = r"open: the encoder 'letters' gives 64 numbers a text, but this database's keys have 26; open it with"
    with pytest.raises(softdb.BadInput, match=message):
        softdb.open(tmp_path / "db", encoder=Letters(dim=64))
    with pytest.raises(softdb.BadInput, match="dim=64 was asked for but this database has 26"):
        softdb.open(tmp_path / "db", dim=64)


def test_an_encoder_without_a_name_is_taken_and_not_remembered(tmp_path: Path) -> None:
    letters = Letters()
    with softdb.open(tmp_path / "db", dim=26, encoder=lambda texts: letters(texts)) as db:
        db.insert(BOOK, BOOK)
        assert db.encoder_name is None
    with softdb.open(tmp_path / "db") as db, pytest.raises(softdb.BadInput, match="without an encoder; pass encoder="):
        db.search("Weber")
    with softdb.open(tmp_path / "db", encoder=letters) as db:  # keys are there: they may be another's
        assert db.encoder_name is None
    book(tmp_path / "noted", Letters()).close()
    with pytest.raises(softdb.BadInput, match=r"not the one that made the keys.* differ by 2 of their length"):
        softdb.open(tmp_path / "noted", encoder=lambda texts: -letters(texts))
    with softdb.open(tmp_path / "noted", encoder=lambda texts: letters(texts)) as db:
        assert db.search("Weber", k=1).ids == [["Weber"]]


def test_a_database_without_records_takes_the_first_name(tmp_path: Path) -> None:
    softdb.open(tmp_path / "db", dim=26).close()
    with softdb.open(tmp_path / "db", mode="r", encoder=Letters()) as db:
        assert db.encoder_name is None
    with softdb.open(tmp_path / "db") as db:
        db.insert(["a"], np.ones((1, 26)))
        db.delete(["a"])
    with softdb.open(tmp_path / "db", encoder=Letters()) as db, softdb.open(tmp_path / "db", mode="r") as reader:
        assert db.encoder_name == reader.encoder_name == "letters"
    with softdb.open(None, encoder=Letters()) as db:
        assert db.encoder_name == "letters"


def test_an_open_reader_learns_the_name(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=64) as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.close()
        with softdb.open(tmp_path / "db", encoder=HashedNGrams(64)) as writer:
            writer.insert(BOOK, BOOK)
            reader.refresh()
            assert reader.encoder_name == "ngrams"
            assert reader.search("Schuller", k=1).ids == [["Schuler"]]


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 1001])
def test_a_name_that_cannot_be_stored_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(softdb.BadInput, match=r"the encoder's name (is|holds the lone surrogate)"):
        softdb.open(tmp_path / "db", encoder=Letters(name))
    assert name_of(Letters(7)) is None


def test_a_model_is_not_loaded_by_its_name_alone(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=3) as db:
        db.core.store.note_encoder("stranger/model")
    with softdb.open(tmp_path / "db") as db:
        message = r"search: .* texts need the encoder 'stranger/model'.*open\(path, encoder='stranger/model'\)"
        with pytest.raises(softdb.BadInput, match=message):
            db.search("a text")
        with pytest.raises(softdb.BadInput, match="insert: this database's texts need the encoder"):
            db.insert(["a"], ["a text"])
        db.insert(["a"], [[1, 2, 3]])
        assert db.search([1, 2, 3], k=1).ids == [["a"]]


@pytest.mark.parametrize("name", ["ngrams(0)", "ngrams(99)", "ngrams\n", "ngrams(2, 65)"])
def test_a_false_ngrams_name_creates_no_encoder(tmp_path: Path, name: str) -> None:
    with softdb.open(tmp_path / "db", dim=3) as db:
        db.core.store.note_encoder(name)
    with softdb.open(tmp_path / "db") as db, pytest.raises(softdb.BadInput, match="softdb loads no model by itself"):
        db.search("a text")


@pytest.mark.parametrize("value", [3, 1.5, "", "x" * 1001])
def test_an_invalid_encoder_name_is_corruption(tmp_path: Path, value: object) -> None:
    softdb.open(tmp_path / "db", dim=3).close()
    set_encoder(tmp_path / "db", value)
    with pytest.raises(softdb.CorruptionError, match="damaged setting 'encoder'"):
        softdb.open(tmp_path / "db", mode="r")


def test_a_changed_name_differs_from_its_checksum(tmp_path: Path) -> None:
    book(tmp_path / "db", Letters()).close()
    connection = apsw.Connection(str(tmp_path / "db" / "catalog.sqlite"))
    connection.execute("UPDATE settings SET value = 'evil' WHERE name = 'encoder'")
    connection.close()
    with pytest.raises(softdb.CorruptionError, match="damaged setting, 'encoder'"):
        softdb.open(tmp_path / "db")


def test_copies_salvage_exports_and_pickles_keep_the_encoder(tmp_path: Path) -> None:
    with book(tmp_path / "db", HashedNGrams(64)) as db:
        db.snapshot(tmp_path / "copy")
        export_records(db, tmp_path / "out.jsonl")
        assert pickle.loads(pickle.dumps(db)).search("Schuller", k=1).ids == [["Schuler"]]
        expected = db.search(BOOK, k=3).ids
    header = read_header(tmp_path / "out.jsonl")
    assert header is not None
    assert header.encoder == "ngrams"
    (tmp_path / "db" / "keys-00000000.npy").touch()
    softdb.salvage(tmp_path / "db", tmp_path / "saved")
    for name in ("copy", "saved"):
        with softdb.open(tmp_path / name, verify=True) as db:
            assert db.search(BOOK, k=3).ids == expected


def test_keys_of_another_encoder_are_not_imported(tmp_path: Path) -> None:
    with book(None, HashedNGrams(64)) as db:
        export_records(db, tmp_path / "out.jsonl")
    with softdb.open(None, dim=64, metric="cosine") as db:
        db.core.store.note_encoder("other")
        with pytest.raises(softdb.BadInput, match="keys were made by the encoder 'ngrams', this database's by 'other'"):
            import_records(db, read_records(tmp_path / "out.jsonl"))
        assert not len(db)


def test_the_command_line_chooses(tmp_path: Path) -> None:
    assert chosen(tmp_path, None, None, "ngrams") == "ngrams"
    assert chosen(tmp_path, None, "some-model") == chosen(tmp_path, "some-model", "some-model") == "some-model"
    assert chosen(tmp_path, "ngrams(3)", None) == "ngrams(3)"
    assert chosen(tmp_path, "demo", None) == "demo"
    with pytest.raises(softdb.BadInput, match="stores no name of an encoder; add --encoder"):
        chosen(tmp_path, None, None)
    with pytest.raises(softdb.BadInput, match="made by the encoder 'ngrams', not 'demo'"):
        chosen(tmp_path, "ngrams", "demo")
    with pytest.raises(softdb.BadInput, match="load it with --encoder 'some model'"):
        chosen(tmp_path, "some model", None)
