"""Demonstration data: about 20,000 WordNet glosses with their embeddings, for `softdb demo`.

This folder reads only files of the package. Begin with `load_wordnet` below.
"""

import gzip
import io
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.scoring import unit

__all__ = ["DemoData", "load_wordnet"]

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class DemoData:
    """Records, and queries whose right answers are known.

    n records, m queries, d = 96 wide. Keys and query keys have length 1, so their dot product is their cosine.
    """

    ids: list[str]  # n WordNet synset names such as "noun.02503517"
    keys: Floats  # (n, d) the embedded glosses
    payloads: list[dict[str, Any]]  # n of {"word", "lemmas", "pos", "gloss"}
    query_texts: list[str]  # m dictionary words
    query_keys: Floats  # (m, d) the embedded words
    answers: list[list[int]]  # m lists of positions in `ids`: every record that has the word among its lemmas
    held_out: NDArray[np.bool_]  # (m,) True = not for training; such queries share no answer with training queries
    projection: Floats  # (384, d) maps embeddings by all-MiniLM-L6-v2 to the space of the keys


def load_wordnet() -> DemoData:
    """Load the WordNet demonstration data: 19,988 records and 9,983 queries, in a fraction of a second.

    Example:
        >>> data = load_wordnet()
        >>> data.keys.shape, data.query_keys.shape
        ((19988, 96), (9983, 96))
        >>> data.payloads[data.ids.index("noun.02503517")]["word"]
        'elephant'
    """
    records = _read_lines("records.jsonl.gz")
    queries = _read_lines("queries.jsonl.gz")
    scale = _read_array("scale.npy")  # (d,) value of one step of the stored integers, for each dimension
    ids = [record.pop("id") for record in records]
    position = {name: i for i, name in enumerate(ids)}
    return DemoData(
        ids=ids,
        keys=unit(_read_array("keys.npy") * scale),
        payloads=[{"word": record["lemmas"][0], **record} for record in records],
        query_texts=[query["word"] for query in queries],
        query_keys=unit(_read_array("queries.npy") * scale),
        answers=[[position[name] for name in query["answers"]] for query in queries],
        held_out=np.array([query["held_out"] for query in queries], dtype=np.bool_),
        projection=_read_array("projection.npy"),
    )


def _read(name: str) -> bytes:
    return (files(__name__) / "wordnet" / name).read_bytes()


def _read_lines(name: str) -> list[dict[str, Any]]:
    text = gzip.decompress(_read(name)).decode()
    # one call of the parser for all lines is several times faster than a call for each
    return list(json.loads("[" + ",".join(text.splitlines()) + "]"))


def _read_array(name: str) -> NDArray[Any]:
    return np.asarray(np.load(io.BytesIO(_read(name)), allow_pickle=False))
