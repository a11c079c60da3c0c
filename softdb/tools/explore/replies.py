"""The page's questions, answered: the nearest records, how a soft query weighs them, the map, the facts."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from softdb import __version__, check
from softdb.answers import Hits, Pooled
from softdb.answers.records import parsed
from softdb.database import SoftDB
from softdb.errors import BadInput, SoftDBError
from softdb.scoring import score_of
from softdb.tools.cli.arguments import meant_ids
from softdb.tools.cli.served import Served
from softdb.tools.explore.display import fields_of, named_id, record, title
from softdb.tools.explore.plane import Plane
from softdb.tools.explore.questions import Question, Weighing

KEPT = 32  # questions whose records are remembered, so that another temperature finds nothing anew
NUMBERS, CLASSES = 12, 8  # of an output that are shown
EXACT = 1 << 28  # numbers of keys up to which all records are weighed where nothing else is asked for
COLD = 1e5  # of scores / T, where float32 rounds by 0.01: so much may a weight be off
Wanted = Callable[[], None]  # raises where nobody waits for the answer any more


@dataclass(frozen=True)
class Findings:
    """The part of a reply that no temperature changes."""

    generation: int
    query: Tensor | None  # (1, d); None: by words alone, which a soft query cannot weigh
    hits: list[dict[str, Any]]
    scores: list[float | None]  # of the hits, as a soft query scores them; None without a key
    names: list[str | int]
    name: str | int | None  # of the record that is asked by
    plane: Plane
    places: list[list[float] | None]  # of the hits on the map
    lights: list[float | None]  # scores of the map's records; None where the filter leaves them out
    milliseconds: float
    notes: list[str]


_WARNINGS: list[str] = []  # since the last answer: they may come from any thread
MOST = 20  # that wait


def note_warnings() -> None:
    """From now on warnings of this process go to the next answer."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and len(_WARNINGS) < MOST:
            _WARNINGS.append(" ".join(str(message).split()))

    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = show


class Answers:
    """Answers over one database, as JSON; safe to ask from several threads."""

    def __init__(self, served: Served, first: str | None = None) -> None:
        self._served, self._lock, self._first = served, threading.Lock(), first
        self._plane: Plane | None = None
        self._notes: OrderedDict[str, list[str]] = OrderedDict()
        self._kept: OrderedDict[tuple[Question, int, int], Findings] = OrderedDict()

    def about(self) -> dict[str, Any]:
        """Facts of the database, and the questions that it can answer."""
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
            "examples": [
                [named_id(one.id), title(payload, one.text)]
                for one, payload in zip(plane.entries[:200], payloads, strict=False)
            ],
            "temperatures": vars(plane.temperatures), "first": self._first,
            "way": "exact" if len(db) * db.dim <= EXACT or index is None else "estimate",
            "values": "classes" if db.num_classes is not None else "keys" if db.value_dim is None else "numbers",
        }  # fmt: skip

    def map(self) -> dict[str, Any]:
        """A sample of the records on a plane."""
        db = self._served.newest()
        plane = self._plane_of(db)
        payloads = parsed([entry.payload for entry in plane.entries])
        return {
            "generation": plane.generation, "of": db.core.keyed, "share": plane.share,
            "points": [[round(x, 5), round(y, 5)] for x, y in plane.at(plane.keys).tolist()],
            "records": [
                [named_id(one.id), title(payload, one.text)]
                for one, payload in zip(plane.entries, payloads, strict=True)
            ],
        }  # fmt: skip

    def ask(self, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """The nearest records, and how a soft query weighs them."""
        reply, found = self._weigh(question, weighing, wanted)
        at = None if found.query is None else found.plane.query_at(found.query[0]).tolist()
        return {
            **reply, "hits": found.hits, "scores": found.scores, "places": found.places, "lights": found.lights,
            "at": at, "milliseconds": found.milliseconds,
        }  # fmt: skip

    def weigh(self, question: Question, weighing: Weighing, wanted: Wanted) -> dict[str, Any]:
        """The same question at another temperature, without what stays."""
        return self._weigh(question, weighing, wanted)[0]

    def _weigh(self, question: Question, weighing: Weighing, wanted: Wanted) -> tuple[dict[str, Any], Findings]:
        db = self._served.newest()
        found = self._found(db, question, wanted)
        reply = {
            "generation": found.generation, "map": found.plane.generation,
            "soft": self._weighed(db, question, found, weighing, wanted),
            "python": _python(question, weighing, found), "notes": found.notes,
        }  # fmt: skip
        return reply, found

    def compare(self, question: Question, wanted: Wanted) -> dict[str, Any]:
        """The recall of one answer: the same question, every record compared."""
        db = self._served.newest()
        found = self._found(db, question, wanted)
        if found.query is None or question.ranking != "vector":
            raise BadInput("recall is of a ranking by vector; choose that, and ask with a vector or a record")
        begin = time.perf_counter()
        (ids,) = db.search(found.query, question.shown, where=question.filter, exact=True).ids
        missed = [named_id(one) for one in ids if one not in found.names]
        return {
            "recall": 1 - len(missed) / len(ids) if ids else 1.0, "missed": missed, "of": len(ids),
            "milliseconds": _since(begin), "indexed": found.milliseconds,
        }  # fmt: skip

    def _plane_of(self, db: SoftDB) -> Plane:
        """The map of the generation that a handle sees."""
        with self._lock:
            plane = self._plane
            if plane is None or plane.generation != db.generation or plane.keys.shape[1] != db.dim:
                db.order_fields()  # so that no filter waits until half of the records are listed
                plane = self._plane = Plane.of(db, plane)
            return plane

    def _found(self, db: SoftDB, question: Question, wanted: Wanted) -> Findings:
        plane = self._plane
        if plane is None or plane.made != db.core.reembedded or plane.keys.shape[1] != db.dim:
            plane = self._plane_of(db)  # else the last one serves: the page fetches another when it is out of date
        key = (question, db.generation, plane.generation)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = self._asked(db, question, plane, wanted)
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return found

    def _asked(self, db: SoftDB, question: Question, plane: Plane, wanted: Wanted) -> Findings:
        begin = time.perf_counter()
        name = None if question.id is None else meant_ids(db, [question.id])[0]
        query, generation = self._query(db, question, name), db.generation
        wanted()
        hits = self._hits(db, question, query)
        names, spent = hits.ids[0], _since(begin)
        wanted()
        scores: list[float | None] = [None] * len(names)
        places: list[list[float] | None] = []
        if names:
            records = db.get(names)
            keyed = records.keyed.tolist()
            places = [
                spot if own else None for spot, own in zip(plane.at(records.keys.double()).tolist(), keyed, strict=True)
            ]
            if query is not None:
                score = score_of(db.core.schema.metric)(query, records.keys.float())[0].tolist()
                score = hits.scores[0, : len(names)].tolist() if question.ranking == "vector" else score
                scores = [number if own else None for number, own in zip(score, keyed, strict=True)]
        shown = [record(*parts) for parts in zip(names, hits.payloads[0], hits.texts[0], strict=True)]
        lights = plane.lights(db, query, question.filter)
        return Findings(
            generation, query, shown, scores, names, name, plane, places, lights, spent, self._notes_of(question)
        )

    def _notes_of(self, question: Question) -> list[str]:
        """Warnings of this question, or of the first with the same filter: a handle warns once."""
        with self._lock:
            if _WARNINGS:
                self._notes[question.where] = list(dict.fromkeys(_WARNINGS))
                _WARNINGS.clear()
            while len(self._notes) > KEPT:
                self._notes.popitem(last=False)
            return self._notes.get(question.where, [])

    def _query(self, db: SoftDB, question: Question, name: str | int | None) -> Tensor | None:
        """The query as numbers, (1, d) float32."""
        if question.vector is not None:
            return db.core.as_queries([question.vector])
        if question.text is not None:
            with contextlib.nullcontext() if question.ranking != "text" else contextlib.suppress(SoftDBError):
                if self._served.takes_text:
                    return db.core.as_queries([question.text])
            if question.ranking == "text":
                return None  # words alone find records, too
            raise BadInput(
                "this database cannot turn text into a vector: it remembers no encoder, or a model that you must name: "
                "softdb explore PATH --encoder MODEL. Rank by words, or ask by a record or a vector"
            )
        if name is None:
            return None
        one = db[name]
        if one.key is None:
            raise BadInput(f"record {check.shown(name)} has no key, so nothing is near to it; ask by another")
        return db.core.as_queries(one.key[None].float())

    def _weighed(
        self, db: SoftDB, question: Question, found: Findings, weighing: Weighing, wanted: Wanted
    ) -> dict[str, Any] | None:
        """Weights of the records at a temperature; None where there is no vector."""
        if found.query is None:
            return None
        wanted()
        begin, t = time.perf_counter(), weighing.temperature
        pooled = db.attend(found.query, temperature=t, where=question.filter, **weighing.options)
        lse, candidates = pooled.lse[0].item(), int(pooled.n_pooled[0])
        wanted()
        floor = None
        if weighing.way == "nearest" and pooled.hits is not None and candidates:
            floor = pooled.hits.scores[0][pooled.hits.live[0]].min().item()
        best, most, weights = _shares(found.scores if candidates else [], t, lse, floor)
        weights += [0.0] * (len(found.scores) - len(weights))
        effective = 0.0 if not candidates else self._effective(db, question, found.query, weighing, pooled, weights)
        finite = [float(one) if math.isfinite(one) else None for one in (pooled.bar[0], pooled.missed_mass[0])]
        return {
            "temperature": t, "lse": lse if candidates else None, "candidates": candidates,
            "floor": floor, "best": best, "most": most,
            "exact": bool(pooled.exact[0]), "met": bool(pooled.met[0]), "bar": finite[0], "missed": finite[1],
            "finder": pooled.finder, "effective": effective, "weights": weights,
            "rest": max(0.0, 1 - sum(weights)) if candidates else 0.0, "of": db.core.keyed,
            **_output(db, found.plane, pooled.output[0] if candidates else None), "milliseconds": _since(begin),
        }  # fmt: skip

    def _effective(
        self, db: SoftDB, question: Question, query: Tensor, weighing: Weighing, pooled: Pooled, weights: list[float]
    ) -> float:
        """1 / Σ w²: among how many records equal weights would be as spread out."""
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
        """The nearest records, as `search` finds them."""
        k, where = question.shown, question.filter
        if query is None or question.ranking == "text":
            return db.search(texts=[question.asked_words], mode="text", k=k, where=where)
        if question.ranking == "hybrid":
            return db.search(query, texts=[question.asked_words], mode="hybrid", k=k, where=where)
        return db.search(query, k, where=where)


def _is_cold(lse: float) -> bool:
    """Return True where float32 cannot tell the differences of scores / T: then the nearest is all."""
    return not abs(lse) < COLD


def _shares(
    scores: list[float | None], t: float, lse: float, floor: float | None
) -> tuple[float | None, float, list[float]]:
    """The best score, its weight, and all weights: w_i = exp((s_i - s_best) / T) w_best; 0 without a key or below k."""
    known = [score for score in scores if score is not None and (floor is None or score >= floor)]
    if not known:
        return None, 0.0, []
    best = max(known)
    most = 1 / sum(math.exp((one - best) / t) for one in known) if _is_cold(lse) else math.exp(min(0.0, best / t - lse))
    within = [score is not None and (floor is None or score >= floor) for score in scores]
    pairs = zip(scores, within, strict=True)
    return best, most, [most * math.exp((one - best) / t) if own and one is not None else 0.0 for one, own in pairs]


def _output(db: SoftDB, plane: Plane, output: Tensor | None) -> dict[str, Any]:
    """The pooled value: the likeliest classes, or the first numbers; and where it lies, if values are keys."""
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


def _python(question: Question, weighing: Weighing, found: Findings) -> str:
    """The reply as Python code."""
    where = f", where={question.filter!r}" if question.where else ""
    words = f"texts={[question.words or question.text]!r}, mode={question.ranking!r}, "
    lines = []
    if question.text is not None:
        lines = [f"query = {[question.text]!r}"]
    elif found.name is not None:
        lines = [f"query = db.get({[found.name]!r}).keys"]
    elif question.vector is not None:
        numbers = ", ".join(f"{one:g}" for one in question.vector[:NUMBERS])
        lines = [f"query = [[{numbers}{', …' if len(question.vector) > NUMBERS else ''}]]"]
    first = "" if question.ranking == "text" else "query, "
    lines.append(f"hits = db.search({first}{words if question.ranking != 'vector' else ''}k={question.shown}{where})")
    if found.query is not None:
        more = "".join(f", {one}={value!r}" for one, value in weighing.options.items())
        lines.append(f"answer = db.attend(query, temperature={weighing.temperature:g}{more}{where})")
    return "\n".join(lines if first or found.query is not None else lines[-1:])


def _since(begin: float) -> float:
    return round((time.perf_counter() - begin) * 1e3, 2)
