"""Suggest questions: a few examples to begin with, and completions of what is typed."""

from __future__ import annotations

import bisect
import difflib

from softdb.data.encoder import KnownWords
from softdb.database import SoftDB
from softdb.tools.explore.plane import Plane

WORDS = ("violin", "thief", "wedding", "winter", "poison", "kettle")  # the demo's examples
EXAMPLES, COMPLETIONS = 5, 8  # largest numbers of example questions, and of completions
ALIKE = 0.7  # least similarity of a suggested word to a misspelt one, as difflib measures it


def known_words(db: SoftDB) -> list[str]:
    """Return the sorted words with vectors, if the database's encoder encodes known words alone."""
    encoder = db.core.encoder()
    return encoder.words if isinstance(encoder, KnownWords) else []


def examples(db: SoftDB, plane: Plane, takes_text: bool) -> list[list[str]]:
    """Return a few questions, each as its kind ("text" or "id"), its text, and a label."""
    known = set(known_words(db))
    if known:
        return [["text", word, word] for word in WORDS if word in known]
    names = plane.names[:: max(1, len(plane.names) // EXAMPLES)][:EXAMPLES]
    return [["text", title, title] if takes_text and title else ["id", id_, title or id_] for id_, title in names]


def completions(db: SoftDB, plane: Plane, kind: str, typed: str) -> list[list[str]]:
    """Return known texts or, of kind "id", ids with titles that begin as typed; or else known words that are alike."""
    words = known_words(db) if kind == "text" and typed else []
    if words:
        low = bisect.bisect_left(words, typed)
        matches = [word for word in words[low : low + COMPLETIONS] if word.startswith(typed)]
        if not matches:
            alike = [word for word in words if word[0] == typed[0]]
            begun = [word for word in alike if len(word) > 2 and typed.startswith(word)]
            matches = [*difflib.get_close_matches(typed, alike, COMPLETIONS, ALIKE), *reversed(begun)]
        return [[word, ""] for word in dict.fromkeys(matches)][:COMPLETIONS]
    names = [[id_, title] for id_, title in plane.names if typed in title.lower() or id_.lower().startswith(typed)]
    if kind == "text":
        names = [[title, ""] for title in dict.fromkeys(title for _, title in names if title)]
    return names[:COMPLETIONS]
