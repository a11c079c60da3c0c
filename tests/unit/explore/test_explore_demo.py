"""The explorer over the demo's records: the same in memory and from the directory, and never the network."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from explore_site import Site, served
from rich.console import Console

import softdb
from softdb.data import load_wordnet
from softdb.tools.cli.serve import _demo_database
from softdb.tools.demo import run_demo


@pytest.fixture(scope="module", params=["in memory", "directory"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site of the demo with a sentence-transformers that must not be used."""

    loaded = list[Any]()

    class Model:
        def __init__(self, *given: Any, **_: Any) -> None:
            loaded.append(given)

    with pytest.MonkeyPatch.context() as patch:
        library = types.ModuleType("sentence_transformers")
        library.SentenceTransformer = Model  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "sentence_transformers", library)
        if request.param == "in memory":
            with _demo_database(None) as db, served(None, db=db) as site:
                yield site
        else:
            path = tmp_path_factory.mktemp("demo") / "softdb-demo"
            patch.setattr("softdb.tools.demo._learn", lambda *_: ((0, 0), (0, 0)))
            run_demo(path, console=Console(quiet=True))
            with served(path) as site:
                yield site
    assert loaded == []


def test_a_directory_of_the_demo_is_as_good_as_the_demo(demo: Site) -> None:
    about = demo.call("about")
    assert (about["records"], about["metric"], about["takes_text"], about["text_index"]) == (
        19988,
        "cosine",
        True,
        "words",
    )
    assert about["examples"][0] == ["text", "violin", "violin"]
    assert about["fields"] == ["pos"]
    assert about["known_words"] > 9900
    for _, word, _ in about["examples"]:
        answer = demo.call("ask", text=word, shown=5)
        assert answer["notes"] == []
        assert answer["scores"][0] > 0.5
    violin = demo.call("ask", text="violin", shown=1)["hits"][0]
    assert (violin["title"], violin["text"]) == ("violinist", "a musician who plays the violin")
    assert violin["payload"] == [["word", "violinist"], ["lemmas", '["violinist", "fiddler"]'], ["pos", "noun"]]


def test_a_word_without_a_vector_is_searched_in_the_texts(demo: Site) -> None:
    assert "bread" not in load_wordnet().query_texts
    answer = demo.call("ask", text="bread", shown=5, temperature=0.07)
    assert answer["notes"][0].startswith("“bread” has no vector here: these records have the word")
    assert all("bread" in hit["text"].lower() for hit in answer["hits"])
    assert answer["soft"]["weights"][0] == max(answer["soft"]["weights"]) > 0  # near to the first of them
    assert answer["at"] is not None
    assert f"db.get(['{answer['hits'][0]['id']}']).keys" in answer["python"]
    nothing = demo.call("ask", text="lighth")
    assert (nothing["hits"], nothing["soft"]) == ([], None)
    assert nothing["notes"] == ["“lighth” has no vector here, and no text has it."]


def test_typed_words_are_completed(demo: Site) -> None:
    assert (
        demo.call("complete", kind="text", text="Viol")["completions"]
        == [[word, ""] for word in sorted(load_wordnet().query_texts) if word.startswith("viol")][:8]
    )
    assert ["kettle", ""] in demo.call("complete", kind="text", text="kettel")["completions"]  # misspelt
    assert demo.call("complete", kind="text", text="lighthouse")["completions"] == [["lighter", ""], ["light", ""]]
    assert demo.call("complete", kind="text", text="xqzj")["completions"] == []
    ids = demo.call("complete", kind="id", text="noun.1")["completions"]
    assert len(ids) == 8
    assert all(id_.startswith("noun.1") and title for id_, title in ids)


def test_the_encoder_option_names_the_model_of_the_demo() -> None:
    with pytest.raises(softdb.BadInput, match="the keys of --demo were made by 'demo'; leave it out"):
        _demo_database("ngrams")
    with pytest.MonkeyPatch.context() as patch, _demo_database("demo") as db:
        patch.setattr("softdb.text.SentenceEncoder.__call__", lambda self, texts: load_wordnet().keys[: len(texts)])
        assert db.search("a phrase", k=1).ids == [[load_wordnet().ids[0]]]
