"""HNSW: a graph of neighbours over 8-bit scalar-quantised keys. Malkov and Yashunin 2018, arXiv 1603.09320."""

from __future__ import annotations

from typing import Any, ClassVar

from softdb.check import Metric
from softdb.index.contract import Floats, Index, faiss_module, measure_of
from softdb.index.sketches import Sketches

LINKS = 32  # neighbours a record, twice as many on the lowest level
CONSTRUCTION = 100  # records visited for each that is added


class HNSW(Index):
    """A navigable graph: d bytes and 64 links a record. Search cost: about effort · links · d, whatever n."""

    kind: ClassVar[str] = "hnsw"
    effort_name: ClassVar[str] = "efSearch"
    effort_most = 4096

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A byte a number."""
        return ("SQ8",)

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """A byte a number; links of four bytes each, with half a level above the lowest on average; and sketches."""
        return dim + 4 * (2 * LINKS + 1) + 16 + Sketches.record_bytes(dim, "")

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """The ranges of the scalar quantiser."""
        faiss = faiss_module()
        graph = faiss.IndexHNSWSQ(sample.shape[1], faiss.ScalarQuantizer.QT_8bit, LINKS, measure_of(metric))
        graph.hnsw.efConstruction = CONSTRUCTION
        graph.train(sample)
        inner = faiss.IndexIDMap(graph)
        graph.this.disown()  # the map owns it
        inner.own_fields = True
        return cls(metric, inner)

    def parameters(self, effort: int, selector: Any) -> Any:
        """Search parameters; the effort is efSearch, the size of the search's candidate list."""
        return faiss_module().SearchParametersHNSW(efSearch=effort, **({} if selector is None else {"sel": selector}))
