"""The data of `softdb explore --demo`: the definitions that ship with softdb, in memory."""

from __future__ import annotations

import softdb
from softdb.data import load_wordnet
from softdb.data.encoder import KnownWords
from softdb.database import SoftDB


def demo_database() -> SoftDB:
    """Return a database in memory with WordNet's definitions, their vectors and texts."""
    data = load_wordnet()
    db = softdb.open(None, dim=data.keys.shape[1], metric="cosine", encoder=KnownWords(data), fields=["pos"])
    db.insert(
        data.ids, data.keys, texts=[payload["gloss"] for payload in data.payloads],
        payloads=[{name: payload[name] for name in ("word", "lemmas", "pos")} for payload in data.payloads],
    )  # fmt: skip
    db.index_text()
    return db
