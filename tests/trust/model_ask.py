"""The state machine of the model test, its questions: every answer beside numpy's, and those that outlive a change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from model_machine import COUNTS, SEEDS, DatabaseMachine, holding
from model_oracle import Records
from model_soft import attended, partition, radius_hits, sampled
from model_world import Draw, Id

import softdb


class Scanning:
    """A scan on its way."""

    def __init__(self, parts: Iterator[softdb.Records], batch: int, left: list[tuple[Id, int]]) -> None:
        self.parts, self.batch, self.left = parts, batch, left

    def following(self, model: Records) -> list[Id]:
        """The ids of its next part; none at its end."""
        while self.left:
            part, self.left = self.left[: self.batch], self.left[self.batch :]
            kept = [one for one, row in part if one in model.records and model.records[one].row == row]
            if kept:
                return kept
        return []


class AskedMachine(DatabaseMachine):
    """A database under changes and questions."""

    scanning: Scanning | None = None
    held: tuple[softdb.Hits, Records] | None = None

    def release(self) -> None:
        super().release()
        self.scanning = self.held = None

    # -- reading -------------------------------------------------------------------------------------------------------

    @rule(seed=SEEDS, n=COUNTS)
    def get(self, seed: int, n: int) -> None:
        draw = Draw(seed)
        ids = draw.some(n, self.model.records)
        self.model.same(self.db.get(ids + ids[:1]), ids + ids[:1])
        for one in ids:
            record, stored = self.db[one], self.model.records[one]
            assert record.id == one
            assert (record.key is None) == (stored.key is None)
            assert stored.key is None or np.asarray(record.key).tobytes() == stored.key.tobytes()
            assert np.array_equal(np.asarray(record.value), np.asarray(stored.value))
            assert record.text == stored.text
            assert one in self.db
        for one in draw.fresh(n, self.model.records):
            assert one not in self.db
            with pytest.raises(softdb.UnknownId, match="is not stored"):
                self.db.get([*ids, one])

    @rule(seed=SEEDS, batch=st.integers(1, 70))
    def ask(self, seed: int, batch: int) -> None:
        """count and scan, by filter."""
        where = self.where(Draw(seed))
        ids = self.model.matching(where)
        found = list(self.db.scan(batch, where))
        assert [one for part in found for one in part.ids] == ids, f"where={where!r}"
        assert self.db.count(where) == len(ids)
        for part in found:
            self.model.same(part, part.ids)

    @rule(batch=st.integers(1, 300))
    def everything(self, batch: int) -> None:
        self.model.holds(self.db, batch)

    @rule(seed=SEEDS, k=st.integers(1, 30), filtered=st.booleans(), left_out=st.integers(0, 3))
    def search(self, seed: int, k: int, filtered: bool, left_out: int) -> None:
        draw = Draw(seed)
        where = self.where(draw) if filtered else None
        ids, queries = self.model.compared(where), self.queries(draw)
        out = draw.some(left_out, self.model.records) + draw.fresh(1, self.model.records)
        hits = self.db.search(queries, k=k, where=where, exclude_ids=out if left_out else None)
        candidates = [one for one in ids if one not in out] if left_out else ids
        self.model.best(hits, queries, k, candidates, exact=not self.indexed)
        if self.indexed:
            self.model.best(self.db.search(queries, k=k, where=where, exact=True), queries, k, ids)
        payloads = [[self.model.records[one].payload for one in line] for line in hits.ids]
        assert hits.payloads == payloads

    @precondition(lambda self: self.model.tokenizer is not None)
    @rule(seed=SEEDS, k=st.integers(1, 30), filtered=st.booleans(), left_out=st.integers(0, 3))
    def search_texts(self, seed: int, k: int, filtered: bool, left_out: int) -> None:
        draw = Draw(seed)
        where, words = self.where(draw) if filtered else None, draw.text(4)
        out = draw.some(left_out, self.model.records) + draw.fresh(1, self.model.records)
        hits = self.db.search(texts=words, mode="text", k=k, where=where, exclude_ids=out)
        self.model.best_texts(hits, words, k, [one for one in self.model.matching(where) if one not in out])

    @rule(seed=SEEDS, filtered=st.booleans(), share=st.floats(0, 1))
    def search_within(self, seed: int, filtered: bool, share: float) -> None:
        draw = Draw(seed)
        radius_hits(self.db, self.model, self.queries(draw), self.where(draw) if filtered else None, share)

    @rule(seed=SEEDS, filtered=st.booleans(), masked=st.booleans())
    def attend(self, seed: int, filtered: bool, masked: bool) -> None:
        draw = Draw(seed)
        where, queries = self.where(draw) if filtered else None, self.queries(draw)
        mask = draw.numbers.random((len(queries), len(self.model.compared(None)))) < 0.5 if masked else None
        attended(self.db, self.model, queries, where, mask)

    @rule(seed=SEEDS, filtered=st.booleans())
    def draw_samples(self, seed: int, filtered: bool) -> None:
        draw = Draw(seed)
        sampled(self.db, self.model, self.queries(draw), self.where(draw) if filtered else None, seed)

    @rule(seed=SEEDS, filtered=st.booleans())
    def log_partition(self, seed: int, filtered: bool) -> None:
        draw = Draw(seed)
        partition(self.db, self.model, self.queries(draw), self.where(draw) if filtered else None)

    # -- answers that outlive a change ---------------------------------------------------------------------------------

    @rule(seed=SEEDS, batch=st.integers(1, 40), filtered=st.booleans())
    def begin_scan(self, seed: int, batch: int, filtered: bool) -> None:
        where = self.where(Draw(seed)) if filtered else None
        left = [(one, self.model.records[one].row) for one in self.model.matching(where)]
        self.scanning = Scanning(self.db.scan(batch, where), batch, left)

    @precondition(lambda self: self.scanning is not None)
    @rule()
    def go_on_scanning(self) -> None:
        """The records from when it began, less those that are gone or replaced."""
        assert self.scanning is not None
        expected = self.scanning.following(self.model)
        actual = next(self.scanning.parts, None)
        if expected:
            assert actual is not None
            self.model.same(actual, expected)
        else:
            assert actual is None
            self.scanning = None

    @invariant()
    def scans_go_on(self) -> None:
        """Now and then: so most changes happen between two parts of a scan."""
        if self.steps % 6 == 3 and self.scanning is not None:
            self.go_on_scanning()
        elif self.steps % 6 == 0 and self.scanning is None:
            self.begin_scan(self.steps, 1 + self.steps % 23, False)

    @holding
    @rule(seed=SEEDS, k=st.integers(1, 5))
    def hold_hits(self, seed: int, k: int) -> None:
        self.held = self.db.search(self.queries(Draw(seed)), k=k), self.model.copy()

    @precondition(lambda self: self.held is not None)
    @rule()
    def resolve_hits(self) -> None:
        """Ids and payloads of hits from before: those of the same records, or an error where one is gone."""
        assert self.held is not None
        (hits, before), self.held = self.held, None
        now = {stored.row: one for one, stored in self.model.records.items()}
        was = {stored.row: one for one, stored in before.records.items()}
        rows = np.asarray(hits.rows)
        if all(row in now for row in rows.flat if row >= 0):
            assert hits.ids == [[was[row] for row in line if row >= 0] for line in rows.tolist()]
        else:
            with pytest.raises(softdb.StaleRead, match="gone or replaced"):
                _ = hits.ids
