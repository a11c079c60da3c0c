"""The index, a cache: built, tuned and watched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Literal, overload

import torch

from softdb import check
from softdb.database.handle import Handle, verb
from softdb.errors import BadInput, ReadOnly, WriteFailed
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.reports import IndexReport
from softdb.typing import Device, Vectors

__all__ = ["IndexVerbs"]


class IndexVerbs(Handle):
    """How a database finds candidates."""

    @overload
    def build_index(
        self, /, kind: str = "auto", *, recall: float = 0.95, k: int = 10, queries: Vectors | None = None,
        memory: int | str | None = None, progress: Progress | None = None, background: Literal[False] = False,
        device: Device | None = None,
    ) -> IndexReport: ...  # fmt: skip

    @overload
    def build_index(
        self, /, kind: str = "auto", *, recall: float = 0.95, k: int = 10, queries: Vectors | None = None,
        memory: int | str | None = None, progress: Progress | None = None, background: Literal[True],
        device: Device | None = None,
    ) -> Build[IndexReport]: ...  # fmt: skip

    @verb
    def build_index(
        self,
        kind: str = "auto",
        *,
        recall: float = 0.95,
        k: int = 10,
        queries: Vectors | None = None,
        memory: int | str | None = None,
        progress: Progress | None = None,
        background: bool = False,
        device: Device | None = None,
    ) -> IndexReport | Build[IndexReport]:
        """Build the approximate index anew, measure its recall, keep it as a cache, and return the report.

        A build that is interrupted, or that fails, leaves the old index in use. Reading and writing may go on meanwhile
        in other threads, and nothing that they change is lost; one build runs at a time.

        Args:
            kind: "auto" (the fastest on a sample), "ivf" (lists with 4-bit codes), "ivf-rabitq" (lists with a bit a
                number), "ivf-sq8" (lists with a byte a number), "hnsw" (a graph over bytes) or "flat" (none).
            recall: the share of the true k nearest that a search shall find; the effort is raised until it is measured.
            k: for which k.
            queries: (q, d) of the kind that will come; without them, stored keys held aside. Half of them are tuned
                on, and the recall that the other half meets is reported.
            memory: what codes and ids may occupy, in bytes or as text such as "200MB".
            progress: called with what is being done, how much of it is done, and the whole.
            background: return at once a `softdb.index.background.Build`: `.done`, `.progress`, `.cancel()`, and
                `.result(timeout)`, the report. Closing the database cancels it. `progress` is called in its thread.
            device: where this handle computes from then on, "cpu", "cuda" or "cuda:1", as `db.device` says; None: as
                before. On a GPU "ivf" has 8-bit codes, "hnsw" and "ivf-rabitq" do not exist, and memory is the GPU's;
                the cache is an index that a CPU reads, too.

        Raises:
            BadInput: no index meets the memory, or none that does reaches the recall; the message says what would do.
                Or another build is going on; or the device is not there, or has no such index.
            MissingDependency: FAISS, or its GPU build, is not installed.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; build the index from the one that writes")
        asked = None if queries is None else self.as_queries(queries).detach()
        if not isinstance(background, bool):
            raise BadInput(f"background is {check.shown(background)}; expected True or False")
        if asked is not None and background:
            asked = asked.clone()  # the caller may go on to change what was given
        where = check.devices(device)
        work = self._finder.builder(kind, recall, check.integer(k, "k"), asked, memory, where)
        build = self._finder.begin(functools.partial(self._build_index, work, where), progress)
        if not background:
            return build.run()
        build.start()
        return build

    @verb
    def _build_index(
        self, work: Callable[[Progress], IndexReport], devices: tuple[torch.device, ...] | None, say: Progress
    ) -> IndexReport:
        with _index_kept():
            report = work(say)
        self._devices = self._devices if devices is None else devices
        return report

    @verb
    def tune(self, recall: float | None = None, *, k: int | None = None, queries: Vectors | None = None) -> IndexReport:
        """Measure the index's recall anew and change how hard it looks, not its codes; returns the report.

        After many changes, or for queries of another kind than it was tuned for. Costs the exact search of 512 queries.

        Args:
            recall: the share of the true k nearest to find; None: as before.
            k: for which k; None: as before.
            queries: (q, d) of the kind that will come; without them, stored keys held aside.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; tune the index from the one that writes")
        asked = None if queries is None else self.as_queries(queries).detach()
        with _index_kept():
            return self._finder.tune(recall, None if k is None else check.integer(k, "k"), asked)

    @verb
    def watch(self, share: float = 0.01, window: int = 500) -> None:
        """How closely this handle watches the recall of its searches by the index; it does so from the beginning.

        Now and then one query of a batch is also searched exactly, after the batch was answered. `stats().index`
        shows the share of the true nearest that such queries were given (`live_recall`) and how many were checked; a
        `RecallWarning` says, once until the index is built or tuned anew, that it is surely below the target.

        Args:
            share: of the time that searches take, how much the checks may take besides; 0: none.
            window: how many checks count, the latest ones.
        """
        self._finder.watch.change(check.share(share, "share"), check.integer(window, "window", 1, 10**6))


@contextlib.contextmanager
def _index_kept() -> Iterator[None]:
    """An index that is in use but could not be written is told as what it is."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            f"the index serves this handle, but the disk refused its file ({error}); the records are safe: make room, "
            "then build it again"
        ) from error
