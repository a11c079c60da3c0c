"""A database keeps vectors of three texts by the encoder of its keys, and refuses an encoder with other vectors."""

from __future__ import annotations

import base64
import contextlib
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

import softdb
from softdb.encoders import FIXED_TEXTS, SKETCH, TOLERANCE, encoder_of, fingerprint_of, require_like
from softdb.formats import export_records, read_header
from softdb.store.format import setting_crc
from softdb.store.keyed import Keyed
from softdb.text import HashedNGrams, SentenceEncoder


class Model:
    """A model of d numbers; `seed` stands for its weights, and `noise` for another machine."""

    def __init__(self, seed: int = 0, dim: int = 8, noise: float = 0.0) -> None:
        self.dim, self.noise = dim, noise
        self.weight = np.random.default_rng(seed).standard_normal((64, dim)).astype(np.float32)

    def __call__(self, texts: Sequence[str]) -> Any:
        vectors = HashedNGrams(64)(texts) @ self.weight
        drift = np.random.default_rng(len(texts)).standard_normal(vectors.shape)
        return vectors + self.noise * drift * np.linalg.norm(vectors, axis=1, keepdims=True) / self.dim**0.5


class Named(Model):
    """A model that shares its name with others."""

    name = "the same name"


def keyed_by(encoder: Any, dim: int) -> Keyed:
    """The origin of keys that the encoder made."""
    return softdb.open(None, dim=dim).core.store.keyed._replace(fingerprint=fingerprint_of(encoder, dim))


@pytest.mark.parametrize("kind", [Model, Named])
@pytest.mark.parametrize("dim", [1, 8, SKETCH, SKETCH + 1, 384, 4096])
def test_another_model_of_the_same_width_is_refused(tmp_path: Path, kind: type[Model], dim: int) -> None:
    with softdb.open(tmp_path / "db", encoder=kind(0, dim)) as db:
        assert db.core.store.keyed.fingerprint is None
        db.insert(["a"], texts=["a text"])
        assert len(db.core.store.keyed.fingerprint or "") == len(FIXED_TEXTS) * SKETCH * 4 * 4 / 3
    for mode in ("r", "rw"):
        softdb.open(tmp_path / "db", mode=mode, encoder=kind(0, dim)).close()
        softdb.open(tmp_path / "db", mode=mode, encoder=kind(0, dim, noise=0.005)).close()
        for other in (kind(1, dim), kind(0, dim, noise=0.5)):
            with pytest.raises(
                softdb.BadInput, match=r"open: .* not the one that made the keys: .* differ by \d.*reembed"
            ):
                softdb.open(tmp_path / "db", mode=mode, encoder=other)
    softdb.open(tmp_path / "db").close()  # without an encoder nothing is compared


@pytest.mark.parametrize("dim", [8, 384, 100_000])
def test_a_sketch_keeps_distances(dim: int) -> None:
    """The distances that the message names are those of the vectors, to within the error of 64 buckets."""
    a, generator = Model(3, dim), np.random.default_rng(1)
    vectors = np.asarray(a(FIXED_TEXTS), np.float64)
    for share in (0.5, 1.0):
        other = vectors + share * generator.standard_normal(vectors.shape) / dim**0.5 * np.linalg.norm(
            vectors, axis=1, keepdims=True
        )
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), np.linalg.norm(other, axis=1))
        true = (np.linalg.norm(other - vectors, axis=1) / lengths).max()
        with pytest.raises(softdb.BadInput, match="differ by") as caught:
            require_like(keyed_by(a, dim), lambda texts, other=other: other)  # type: ignore[misc]
        distance = float(str(caught.value).split("differ by ")[1].split(" ")[0])
        assert distance == pytest.approx(true, rel=0.05 if dim == 8 else 0.35)


def test_the_probe_is_that_of_the_definition() -> None:
    """The sketch in Python's whole numbers, from the equation of `softdb.encoders`."""
    dim, model = 300, Model(0, 300)
    expected = np.zeros((len(FIXED_TEXTS), SKETCH))
    for row, vector in zip(expected, np.asarray(model(FIXED_TEXTS), np.float32).astype(np.float64), strict=True):
        for i, number in enumerate(vector):
            h = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
            row[h >> 58] += -number if h >> 57 & 1 else number
    fingerprint = fingerprint_of(model, dim)
    assert fingerprint is not None
    stored = np.frombuffer(base64.b64decode(fingerprint), "<f4").reshape(len(FIXED_TEXTS), SKETCH)
    np.testing.assert_allclose(stored, expected, atol=1e-5)


def test_encoders_of_zeros_and_of_one_vector_are_compared() -> None:
    zeros, ones = (lambda texts: np.zeros((len(texts), 3))), (lambda texts: np.ones((len(texts), 3)))
    require_like(keyed_by(zeros, 3), zeros)
    for one, other in ((zeros, ones), (ones, zeros)):
        with pytest.raises(softdb.BadInput, match="differ by 1 of their length"):
            require_like(keyed_by(one, 3), other)
    require_like(keyed_by(ones, 3), lambda texts: np.full((len(texts), 3), 1 + TOLERANCE / 2))


def test_an_encoder_of_another_width_is_refused(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", encoder=lambda texts: Model(0, 8)(texts)) as db:
        assert "undecided" in repr(db)
        db.insert(["a"], ["a text"])
        assert db.dim == 8
    with pytest.raises(softdb.BadInput, match="open: the encoder's vectors are 9 wide but this database is 8 wide"):
        softdb.open(tmp_path / "db", encoder=lambda texts: Model(0, 9)(texts))


def test_an_encoder_of_its_own_texts_has_no_fingerprint(tmp_path: Path) -> None:
    known = {"red": [1.0, 0.0], "blue": [0.0, 1.0]}
    with softdb.open(tmp_path / "db", encoder=lambda texts: [known[text] for text in texts]) as db:
        db.insert(["a", "b"], texts=["red", "blue"])
        assert db.core.store.keyed.fingerprint is None
        assert db.search("red", k=1).ids == [["a"]]
    softdb.open(tmp_path / "db", encoder=lambda texts: [known[text] for text in texts]).close()


def test_an_encoder_that_fails_at_opening_raises_an_error(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", encoder=Model()) as db:
        db.insert(["a"], texts=["a text"])

    def broken(texts: list[str]) -> Any:
        raise ConnectionError("the service is down")

    with pytest.raises(softdb.BadInput, match=r"open: the encoder failed \(ConnectionError: the service is down\)"):
        softdb.open(tmp_path / "db", encoder=broken)
    with pytest.raises(softdb.BadInput, match="open: the encoder gave 1 vectors for 3 texts"):
        softdb.open(tmp_path / "db", encoder=lambda texts: np.ones((1, 8)))
    with softdb.open(tmp_path / "db") as db:  # the lock was released
        assert len(db) == 1


@pytest.mark.parametrize("write", ["insert", "upsert", "update"])
def test_any_write_by_an_encoder_stores_the_probe_once(tmp_path: Path, write: str) -> None:
    with softdb.open(tmp_path / "db", encoder=Model()) as db:
        db.insert(["a"], np.ones((1, 8)))
        assert db.core.store.keyed.fingerprint is None
        getattr(db, write)(["a" if write != "insert" else "b"], texts=["a text"])
        first = db.core.store.keyed.fingerprint
        assert first == fingerprint_of(Model(), 8)
        db.insert(["c"], texts=["more"])
        assert db.core.store.keyed.fingerprint == first
        assert db.verify() == len(db)


def test_copies_and_exports_keep_the_probe_and_reembedding_replaces_it(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", encoder=Named()) as db:
        db.insert(["a", "b"], texts=["a text", "another"])
        first = db.core.store.keyed.fingerprint
        db.snapshot(tmp_path / "copy")
        export_records(db, tmp_path / "out.jsonl")
        assert pickle.loads(pickle.dumps(db)).core.store.keyed.fingerprint == first
    header = read_header(tmp_path / "out.jsonl")
    assert header is not None
    assert (header.encoder, header.fingerprint) == ("the same name", first)
    softdb.salvage(tmp_path / "db", tmp_path / "saved")
    for copy in ("copy", "saved"):
        with pytest.raises(softdb.BadInput, match="not the one that made the keys"):
            softdb.open(tmp_path / copy, encoder=Named(1))
        with softdb.open(tmp_path / copy, encoder=Named()) as db:
            db.compact()
            assert db.core.store.keyed.fingerprint == first
    with softdb.open(tmp_path / "copy") as db:
        db.reembed(Named(1))
        assert db.core.store.keyed.fingerprint == fingerprint_of(Named(1), 8) != first
    softdb.open(tmp_path / "copy", encoder=Named(1)).close()
    with softdb.open(tmp_path / "copy") as db:  # an encoder of its own texts
        db.reembed(lambda texts: [{"a text": [1.0], "another": [2.0]}[text] for text in texts])
        assert db.core.store.keyed.fingerprint is None


@pytest.mark.parametrize("fingerprint", ["", "8", "x y", "!!!!", "AAAA", "ü", "\0", "AAAA" * 256, "x" * 5000])
def test_a_fingerprint_of_a_strangers_choosing_does_no_harm(tmp_path: Path, fingerprint: str) -> None:
    with softdb.open(tmp_path / "db", encoder=Model()) as db:
        db.insert(["a"], texts=["a text"])
        db.core.store.note_encoder(None, fingerprint)
    with contextlib.suppress(softdb.BadInput):  # compared, or not; but no other error
        softdb.open(tmp_path / "db", encoder=Model()).close()
    with softdb.open(tmp_path / "db") as db:
        assert len(db) == 1


@pytest.mark.parametrize("value", [3, 1.5])
def test_an_invalid_probe_is_corruption(tmp_path: Path, value: object) -> None:
    softdb.open(tmp_path / "db", dim=3).close()
    connection = apsw.Connection(str(tmp_path / "db" / "catalog.sqlite"))
    connection.execute(
        "INSERT INTO settings VALUES(?, ?, ?)", ("fingerprint", value, setting_crc("fingerprint", value))
    )
    connection.close()
    with pytest.raises(softdb.CorruptionError, match="damaged setting 'fingerprint'"):
        softdb.open(tmp_path / "db", mode="r")


def test_a_probe_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=3) as db:
        with pytest.raises(softdb.BadInput, match=r"the encoder's fingerprint holds the lone surrogate"):
            db.core.store.note_encoder("a name", "\ud800")
        assert (db.encoder_name, db.core.store.keyed.fingerprint) == (None, None)
    softdb.open(tmp_path / "db", mode="r").close()


# -- encoders by name, and the default -----------------------------------------------------------------------------


def test_a_name_a_folder_or_a_callable_is_an_encoder(tmp_path: Path) -> None:
    assert encoder_of("ngrams") == HashedNGrams()
    assert encoder_of("ngrams(2, 5)", 32) == HashedNGrams(32, (2, 5))
    model, folder = encoder_of("all-MiniLM-L6-v2"), encoder_of(tmp_path)
    assert isinstance(model, SentenceEncoder)
    assert isinstance(folder, SentenceEncoder)
    assert (model.model, folder.model) == ("all-MiniLM-L6-v2", str(tmp_path))
    assert encoder_of(len) is len
    for wrong in ("", 3, b"ngrams", ["ngrams"]):
        with pytest.raises(softdb.BadInput, match="expected 'ngrams', the name or the folder of a sentence-trans"):
            encoder_of(wrong)  # type: ignore[arg-type]


def test_ngrams_by_name_have_the_width_of_the_database(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", encoder="ngrams(2, 3)", dim=32) as db:
        db.insert([1, 2], texts=["Schuler", "Weber"])
        assert (db.dim, db.encoder_name) == (32, "ngrams(2, 3)")
    for mode in ("r", "rw"):
        with softdb.open(tmp_path / "db", mode=mode, encoder="ngrams(2, 3)") as db:
            assert db.search("Schuller", k=1).ids == [[1]]
    with pytest.raises(softdb.BadInput, match=r"made by the encoder 'ngrams\(2, 3\)', not by 'ngrams'"):
        softdb.open(tmp_path / "db", encoder="ngrams")
    with softdb.open(tmp_path / "db") as db:
        assert db.reembed("ngrams").dim == 256


def test_texts_without_an_encoder_become_ngrams_with_one_warning(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db") as db:
        with pytest.warns(
            softdb.EncoderWarning, match=r"spelling, not similar meaning.*softdb\[text\].*MB.*encoder="
        ) as seen:
            db.insert(["a", "b"], texts=["Schuler", "Weber"], payloads=[1, 2])
        assert [warning.filename for warning in seen] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            db.insert(["c"], texts=["Fischer"])
        assert (db.dim, db.encoder_name) == (256, "ngrams")
        assert db.search("Schuller", k=1).ids == [["a"]]
    with warnings.catch_warnings(), softdb.open(tmp_path / "db") as db:
        warnings.simplefilter("error")
        db.upsert(["c"], texts=["Fischler"])
        assert db.search("Fischler", k=1).ids == [["c"]]
    with pytest.raises(softdb.BadInput, match="not the one that made the keys"):
        softdb.open(tmp_path / "db", encoder=Model(0, 256))


def test_the_default_is_chosen_only_for_texts_without_keys() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        db = softdb.open(None)
        db.insert(["a"], keys=[None], texts=["red"])
        assert (db.dim, db.encoder_name) == (None, None)
        db.update(["a"], texts=["blue"])
        assert (db.dim, db.encoder_name) == (None, None)
        db.insert(["b"], np.ones((1, 3)), texts=["red"])
        assert (db.dim, db.encoder_name, db.core.store.keyed.fingerprint) == (3, None, None)
        db.insert(["c"], texts=["red"])  # as ever: a record without a key
        assert db["c"].key is None
        db = softdb.open(None, dim=3)
        db.insert(["c"], texts=["red"])
        assert (db["c"].key, db.encoder_name) == (None, None)
        db = softdb.open(None)
        with pytest.raises(softdb.BadInput, match="text 1 is None"):
            db.insert(["c", "d"], texts=["red", None])
        with pytest.raises(softdb.EncoderWarning):
            db.insert(["c"], texts=["red"])
        assert (db.dim, len(db)) == (None, 0)  # the warning is an error here: nothing was written
