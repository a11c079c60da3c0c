"""Answers to the page's queries: the nearest records and their weights in a soft query, the map, the description."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from softdb import __version__, check
from softdb.answers import Hits, Pooled
from softdb.answers.records import parsed
from softdb.database import SoftDB
from softdb.errors import BadInput, SoftDBError
from softdb.scoring import score_of
from softdb.tools.cli.arguments import parsed_ids
from softdb.tools.cli.served import Served
from softdb.tools.explore import python_code
from softdb.tools.explore.display import fields_of, named_id, record
from softdb.tools.explore.gradient import Place
from softdb.tools.explore.plane import Plane, SearchResult
from softdb.tools.explore.questions import Question, Weighing
from softdb.tools.explore.regions import colours, region_names, value_at
from softdb.tools.explore.suggestions import completions, examples, known_words
from softdb.tools.explore.training import Trainer
from softdb.visible import visible

CACHED = 32  # number of questions whose hits are cached, for queries at other temperatures
NUMBERS, CLASSES = 12, 8  # largest counts of numbers and of classes that the page shows of an output
EXACT = 1 << 28  # up to this count of numbers in all keys, soft queries weigh all records by default
COLD = 1e5  # |lse| from which float32 rounds lse by 0.01, and so each weight by 1 %
MAX_WARNINGS = 20
NOTED = 60  # largest number of characters of a question in a note
Wanted = Callable[[], None]  # raises if the browser has dropped the request


_WARNINGS: list[str] = []  # warnings of all threads since the last answer


def note_warnings() -> None:
    """From now on, collect every warning of this process, to be sent with the next answer."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and len(_WARNINGS) < MAX_WARNINGS:
            _WARNINGS.append(" ".join(str(message).split()))

    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = show


class Answers:
    """Answer the page's requests about one database, as dicts for JSON. Several threads may call the methods."""

    def __init__(self, served: Served) -> None:
        self._served, self._lock = served, threading.Lock()
        self._plane: Plane | None = None
        self._notes: OrderedDict[str, list[str]] = OrderedDict()
        self._cache: OrderedDict[tuple[Question, int, int], SearchResult] = OrderedDict()
        self.trainer = Trainer(served)

    def about(self) -> dict[str, Any]:
        """Return the database's statistics, fields and examples, and the kinds of queries that it answers."""
        db = self._served.newest()
        stats, plane = db.stats(), self._plane_of(db)
        payloads = parsed([entry.payload for entry in plane.entries])
        has_text = any(entry.text is not None for entry in plane.entries)
        facts = stats.asdict()
        index = facts.pop("index")
        return {
            **facts, "name": db.path.name if db.path else "demo", "index": index,
            "takes_text": self._served.takes_text, "text_index": db.text_index, "version": __version__,
            "filters": fields_of(payloads, db.fields, has_text),
            "examples": examples(db, plane, self._served.takes_text),
            "known_words": len(known_words(db)), "temperatures": vars(plane.temperatures),
            "trainable": self.trainer.fits(db),
            "way": "exact" if len(db) * db.core.schema.dim <= EXACT or index is None else "estimate",
            "values": "classes" if db.num_classes is not None else "keys" if db.value_dim is None else "numbers",
        }  # fmt: skip

    def map(self) -> dict[str, Any]:
        """Return a sample of the records with their coordinates on the map."""
        db = self._served.newest()
        plane = self._plane_of(db)
        payloads = parsed([entry.payload for entry in plane.entries])
        places = plane.at(plane.keys)
        return {
            "generation": plane.generation, "of": db.core.keyed, "share": plane.share, "dim": db.dim,
            "points": [[round(x, 5), round(y, 5)] for x, y in places.tolist()],
            "names": region_names(
                places, [line for _, line in plane.names], payloads, [entry.text for entry in plane.entries]
            ),
            "records": plane.names,
        }  # fmt: skip

    def colours(self, field: str) -> dict[str, Any]:
        """Return the values of a payload field for the map's records."""
        plane = self._plane_of(self._served.newest())
        payloads = parsed([entry.payload for entry in plane.entries])
        return {"generation": plane.generation, **colours([value_at(payload, field) for payload in payloads])}

    def gradient(self, right: str, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """Return the loss of a query whose right record has the id `right`, its gradient, and the answer's response."""
        db = self._served.newest()
        (name,), matches = parsed_ids(db, [right]), self._matches(db, question, wanted)
        if matches.query is None:
            raise BadInput("a search without a vector has no gradient; query by a record or a vector")
        place = Place(db, matches.plane, matches.query, weighing, question.filter)
        answer = place.lesson(name, matches.ids)
        wanted()
        return answer | {"generation": matches.generation, "response": place.response()}

    def trail(self, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """Return the answer's places on the map at temperatures over the slider's whole range."""
        db = self._served.newest()
        matches = self._matches(db, question, wanted)
        if matches.query is None:
            return {"trail": []}
        return {"trail": Place(db, matches.plane, matches.query, weighing, question.filter).trail()}

    def complete(self, kind: str, typed: str) -> dict[str, Any]:
        """Return a few known texts, or ids with their titles, that begin as typed."""
        db = self._served.newest()
        return {"completions": completions(db, self._plane_of(db), kind, typed.strip().lower())}

    def ask(self, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """Return the nearest records, and their weights in a soft query."""
        reply, matches = self._weigh(question, weighing, wanted)
        at = None if matches.query is None else matches.plane.query_at(matches.query[0]).tolist()
        return {
            **reply, "hits": matches.hits, "scores": matches.scores, "places": matches.places,
            "lights": matches.lights, "at": at, "milliseconds": matches.milliseconds,
        }  # fmt: skip

    def weigh(self, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """Return the part of an answer that depends on the temperature."""
        return self._weigh(question, weighing, wanted)[0]

    def _weigh(self, question: Question, weighing: Weighing, wanted: Wanted) -> tuple[dict[str, Any], SearchResult]:
        db = self._served.newest()
        matches = self._matches(db, question, wanted)
        reply = {
            "generation": matches.generation, "map": matches.plane.generation,
            "soft": self._weighed(db, question, matches, weighing, wanted),
            "python": python_code.code(db, self._served.encoder, question, weighing, matches),
            "notes": matches.notes,
        }  # fmt: skip
        return reply, matches

    def compare(self, question: Question, wanted: Wanted) -> dict[str, Any]:
        """Measure the recall of an answer: compare it with an exact search."""
        db = self._served.newest()
        matches = self._matches(db, question, wanted)
        if matches.query is None or question.ranking != "vector":
            raise BadInput("only a ranking by vector has a recall; rank by vector, and query by a vector or a record")
        begin = time.perf_counter()
        (ids,) = db.search(matches.query, question.shown, where=question.filter, exact=True).ids
        missed = [named_id(id_) for id_ in ids if id_ not in matches.ids]
        return {
            "recall": 1 - len(missed) / len(ids) if ids else 1.0, "missed": missed, "of": len(ids),
            "milliseconds": _since(begin), "indexed": matches.milliseconds,
        }  # fmt: skip

    def _plane_of(self, db: SoftDB) -> Plane:
        """Return the map of the database at its present generation, made anew if there were writes."""
        with self._lock:
            plane = self._plane
            if plane is None or plane.generation != db.generation or plane.keys.shape[1] != db.core.schema.dim:
                db.order_fields()  # now, so that no filter has to wait for it
                plane = self._plane = Plane.of(db, plane)
            return plane

    def _matches(self, db: SoftDB, question: Question, wanted: Wanted) -> SearchResult:
        plane = self._plane
        if plane is None or plane.reembedded != db.core.reembedded or plane.keys.shape[1] != db.core.schema.dim:
            plane = self._plane_of(db)  # after other writes the older map is used until the page fetches a new one
        key = (question, db.generation, plane.generation)
        with self._lock:
            matches = self._cache.get(key)
        if matches is None:
            matches = self._search(db, question, plane, wanted)
            with self._lock:
                self._cache[key] = matches
                while len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
        return matches

    def _search(self, db: SoftDB, question: Question, plane: Plane, wanted: Wanted) -> SearchResult:
        begin = time.perf_counter()
        query_id = None if question.id is None else parsed_ids(db, [question.id])[0]
        query, generation = self._query(db, question, query_id), db.generation
        if question.trained and question.text and query is not None:
            query = self.trainer.run(db).projected(query, question.trained)
        if question.moves:
            before = self._matches(db, replace(question, moves=question.moves[:-1]), wanted).query
            right, t = question.moves[-1]
            if before is not None:
                place = Place(db, plane, before, Weighing.of({"temperature": repr(t)}), question.filter)
                query = place.moved(parsed_ids(db, [right])[0])
        wanted()
        hits, notes, by_words = self._hits(db, question, query), self._notes_of(question), query is None
        ids, spent = hits.ids[0], _since(begin)
        wanted()
        scores: list[float | None] = [None] * len(ids)
        places: list[list[float] | None] = []
        if ids:
            records = db.get(ids)
            keyed = records.keyed.tolist()
            places = plane.at(records.keys.double()).tolist()
            places = [place if has_key else None for place, has_key in zip(places, keyed, strict=True)]
            if query is None and any(keyed):
                query_id, query = ids[keyed.index(True)], records.keys[keyed.index(True)][None].float()
            if query is not None:
                score = score_of(db.core.schema.metric)(query, records.keys.float())[0].tolist()
                score = hits.scores[0, : len(ids)].tolist() if question.ranking == "vector" and not by_words else score
                scores = [number if has_key else None for number, has_key in zip(score, keyed, strict=True)]
        shown = [record(*fields) for fields in zip(ids, hits.payloads[0], hits.texts[0], strict=True)]
        if by_words:
            words = f"“{visible(question.search_words[:NOTED])}” has no vector here"
            matched = "these records have the word, and weigh by their nearness to the first of them"
            notes = [f"{words}: {matched}." if ids else f"{words}, and no text has it.", *notes]
        lights = plane.lights(db, query, question.filter)
        return SearchResult(
            generation, query, shown, scores, ids, query_id, by_words, plane, places, lights, spent, notes
        )  # fmt: skip

    def _notes_of(self, question: Question) -> list[str]:
        """Return the warnings that this filter has caused, cached because a handle gives each warning only once."""
        with self._lock:
            if _WARNINGS:
                self._notes[question.where] = list(dict.fromkeys(_WARNINGS))
                _WARNINGS.clear()
            while len(self._notes) > CACHED:
                self._notes.popitem(last=False)
            return self._notes.get(question.where, [])

    def _query(self, db: SoftDB, question: Question, query_id: str | int | None) -> Tensor | None:
        """Return the query as numbers, (1, d) float32; None for a search by words alone."""
        if question.vector is not None:
            return db.core.as_queries([question.vector])
        if question.text is not None:
            with contextlib.nullcontext() if db.text_index is None else contextlib.suppress(SoftDBError):
                if self._served.takes_text:
                    return db.core.as_queries([question.text])
            if db.text_index is not None or question.ranking == "text":
                return None  # a search by words needs no vector
            raise BadInput(
                "this database cannot turn text into a vector: its encoder is unknown, or is a model, which must "
                "be named (softdb explore PATH --encoder MODEL). Query by a record or a vector"
            )
        if query_id is None:
            return None
        key = db[query_id].key
        if key is None:
            raise BadInput(f"record {check.shown(query_id)} has no key; query by another record, a text or a vector")
        return db.core.as_queries(key[None].float())

    def _weighed(
        self, db: SoftDB, question: Question, matches: SearchResult, weighing: Weighing, wanted: Wanted
    ) -> dict[str, Any] | None:
        """Answer the soft query, with the weights of the hits; return None if the query is words alone."""
        if matches.query is None:
            return None
        wanted()
        begin, t = time.perf_counter(), weighing.temperature
        pooled = db.attend(matches.query, temperature=t, where=question.filter, **weighing.options)
        lse, candidates = pooled.lse[0].item(), int(pooled.n_pooled[0])
        wanted()
        floor = None
        if weighing.way == "nearest" and pooled.hits is not None and candidates:
            floor = pooled.hits.scores[0][pooled.hits.live[0]].min().item()
        best, most, weights = _shares(matches.scores if candidates else [], t, lse, floor)
        weights += [0.0] * (len(matches.scores) - len(weights))
        effective = 0.0 if not candidates else self._effective(db, question, matches.query, weighing, pooled, weights)
        finite = [float(number) if math.isfinite(number) else None for number in (pooled.bar[0], pooled.missed_mass[0])]
        return {
            "temperature": t, "lse": lse if candidates else None, "candidates": candidates,
            "floor": floor, "best": best, "most": most,
            "exact": bool(pooled.exact[0]), "met": bool(pooled.met[0]), "bar": finite[0], "missed": finite[1],
            "finder": pooled.finder, "effective": effective, "weights": weights,
            "rest": max(0.0, 1 - sum(weights)) if candidates else 0.0, "of": db.core.keyed,
            **_output(db, matches.plane, pooled.output[0] if candidates else None), "milliseconds": _since(begin),
        }  # fmt: skip

    def _effective(
        self, db: SoftDB, question: Question, query: Tensor, weighing: Weighing, pooled: Pooled, weights: list[float]
    ) -> float:
        """Return 1 / Σ w², the effective number of records."""
        lse, t = pooled.lse[0].item(), weighing.temperature
        if weighing.way == "nearest" and pooled.weights is not None:
            weights = pooled.weights[0].tolist()
        elif not _is_cold(2 * lse):
            # Σ w² = exp(lse(T/2) - 2 lse(T))
            half = db.attend(query, temperature=t / 2, where=question.filter, **weighing.options)
            return min(max(1.0, math.exp(2 * lse - half.lse[0].item())), float(db.core.keyed))
        squares = sum(weight * weight for weight in weights)
        return 1 / squares if squares else 0.0

    def _hits(self, db: SoftDB, question: Question, query: Tensor | None) -> Hits:
        """Return the records with the best scores in the question's ranking."""
        k, where = question.shown, question.filter
        if query is None or question.ranking == "text":
            return db.search(texts=[question.search_words], mode="text", k=k, where=where)
        if question.ranking == "hybrid":
            return db.search(query, texts=[question.search_words], mode="hybrid", k=k, where=where)
        return db.search(query, k, where=where)


def _is_cold(lse: float) -> bool:
    """Return True if scores / T are too large for float32 to tell apart; the nearest record then has all the weight."""
    return not abs(lse) < COLD


def _shares(
    scores: list[float | None], t: float, lse: float, floor: float | None
) -> tuple[float | None, float, list[float]]:
    """Return the best score, its weight, and all weights: w_i = exp((s_i - s_best) / T) w_best.

    A record without a key has weight 0, and so has one that scores below `floor`, the k-th nearest's score.
    """
    weighed = [None if score is None or (floor is not None and score < floor) else score for score in scores]
    known = [score for score in weighed if score is not None]
    if not known:
        return None, 0.0, []
    best = max(known)
    most = 1 / sum(math.exp((s - best) / t) for s in known) if _is_cold(lse) else math.exp(min(0.0, best / t - lse))
    return best, most, [0.0 if score is None else most * math.exp((score - best) / t) for score in weighed]


def _output(db: SoftDB, plane: Plane, output: Tensor | None) -> dict[str, Any]:
    """Return the pooled value: its likeliest classes or first numbers, and its place on the map if values are keys."""
    if output is None:
        return {"output": [], "width": 0, "classes": [], "norm": 0.0, "answer": None}
    if db.num_classes is not None:
        shares, labels = output.topk(min(CLASSES, db.num_classes))
        return {
            "output": [], "width": db.num_classes, "classes": list(zip(labels.tolist(), shares.tolist(), strict=True)),
            "norm": output.norm().item(), "answer": None,
        }  # fmt: skip
    answer = plane.at(output.double()).tolist() if db.value_dim is None else None
    numbers, width = output[:NUMBERS].tolist(), len(output)
    return {"output": numbers, "width": width, "classes": [], "norm": output.norm().item(), "answer": answer}


def _since(begin: float) -> float:
    return round((time.perf_counter() - begin) * 1e3, 2)
