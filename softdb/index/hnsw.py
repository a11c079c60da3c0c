"""HNSW: a graph of neighbours over 8-bit scalar-quantised keys. Malkov and Yashunin 2018, arXiv 1603.09320."""

from __future__ import annotations

from typing import Any, ClassVar

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module, measure_of
from softdb.index.lists import JUMP
from softdb.index.sketches import Sketches

LINKS = 32  # links of a record to its neighbours, twice as many on the lowest level
CONSTRUCTION = 100  # efConstruction: length of the candidate list when a record is added


class HNSW(Index):
    """A navigable graph with d bytes and 64 links for each record. A search costs about effort · links · d."""

    kind: ClassVar[str] = "hnsw"
    effort_name: ClassVar[str] = "efSearch"
    effort_most = 4096

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes of a record: one for each number, four for each link on about 1.5 levels, and its sketch."""
        return dim + 4 * (2 * LINKS + 1) + 16 + Sketches.record_bytes(dim, "")

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Return an empty graph whose scalar quantiser has learned the range of each number from the sample."""
        faiss = faiss_module()
        graph = faiss.IndexHNSWSQ(sample.shape[1], faiss.ScalarQuantizer.QT_8bit, LINKS, measure_of(metric))
        graph.hnsw.efConstruction = CONSTRUCTION
        graph.train(sample)
        inner = faiss.IndexIDMap(graph)
        graph.this.disown()  # the map owns it
        inner.own_fields = True
        return cls(metric, inner)

    def cost(self, queries: Floats, k: int, effort: int) -> float:
        """Return the cost of a query in bytes, as `Lists` does: codes of neighbours, and keys of candidates."""
        return float(JUMP * queries.shape[1] * (effort * LINKS + 4 * self.candidates_for(k)))

    def parameters(self, effort: int, selector: Any) -> Any:
        """Return FAISS search parameters. The effort is efSearch, the size of the search's candidate list."""
        return faiss_module().SearchParametersHNSW(efSearch=effort, **({} if selector is None else {"sel": selector}))
