"""Torch module whose parameters are the stored keys and values of a database; `commit` writes them back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.answers import Pooled, shaped
from softdb.attend import Request
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput, Cancelled, StaleRead
from softdb.index.choose import Progress
from softdb.nn.eager import eager
from softdb.nn.origin import RECORDS, Followed, Origin, in_order
from softdb.nn.parameters import Parameters, chosen, on
from softdb.nn.reindexed import Policy, Reindexed, Work
from softdb.nn.sparse_rows import SPARSE, SparseRows
from softdb.nn.stale_index import FEWEST, StaleIndex
from softdb.reports import MemoryReport, ReindexReport
from softdb.scoring import score_of
from softdb.typing import Numbers, Vectors

BLOCK = 1 << 14  # number of keys copied at once
RECENT_QUERIES = 64  # number of latest queries kept to measure recall on
DROPPED = "commit(), reload() or to() has dropped the stale index"  # reason to cancel a build of its next version
REBUILD_SHARE = 0.5  # `commit` rebuilds the index once this share of all records was written since its last build


class Memory(Reindexed, SparseRows):
    """The stored keys and values of a database as parameters. Only the records that a query finds get gradients.

    With (k_i, v_i) the parameters, s the score of the database's metric and I the k nearest records:

        w_i = exp(s(q, k_i) / T) / Σ_I exp(s(q, k_j) / T),  output = Σ_I w_i v_i,  lse = log Σ_I exp(s(q, k_j) / T)

    differentiable in queries, keys and values. A parameter's gradient is a sparse tensor of the rows in I, never a
    dense (n, d) one, so time and memory of a step hardly depend on the number of records. Train with
    torch.optim.SparseAdam, Adagrad or SGD (`check` refuses other optimisers), then `commit()`.

    `overfetch` k candidates come from an index of earlier keys, and are scored by the current keys: a key that moved
    far may be missed, but no score is wrong. At first the index is the database's, which holds the keys of the last
    commit; `reindex` replaces it by an index of a copy of the current keys. Without an index, or below 10,000 records,
    every current key is compared, and candidates are never stale.

    The memory holds the records that existed when it was made. Records that others delete or replace are no longer
    found; records that others insert are not found before `reload`. Copies of a memory share the handle and follow each
    other's commits (the last commit wins) until one of them reloads; then they treat each other's commits as changes by
    others. A database open for reading only may be trained, not committed. `state_dict` holds the parameters and, as
    "records", digests of their ids. Loading matches records by id, in any order, and raises BadInput before any change
    if the records differ. After loading call `reindex()`.

    Parameters are float32 whatever the database stores (or float64 for checks, which compares every key). They start in
    RAM and move with `memory.to(device)`; answers are on the device of the queries. On a GPU every current key is
    compared, so candidates are never stale; `commit` writes the GPU's parameters in the stored dtype. Memory:
    n (d + v) trained numbers. Cost: a search for `overfetch` k records (on a GPU q n d), then q k (d + v).
    Sources: Lample et al. 2019 (arXiv 1907.05242) for sparse training, Guu et al. 2020 (REALM, section 3.3) for
    candidates from stale keys.

    Args:
        db: the database.
        keys: True: train the keys; False: read them from the database.
        values: True: train the values; None: train the values if they are vectors. Without values, keys are pooled.
        k: number of records pooled for each query; if the memory has fewer, all of them.
        temperature: divides the scores; a number, or an nn.Parameter () that becomes a parameter of the memory. Its
            gradient is dense, so give it to an optimiser of its own: SparseAdam refuses it.
        reindex: policy that says when to reindex, as for a `View`; call `step()` after each step of the optimiser.
        overfetch: number of candidates to score, as a multiple of k.

    Raises BadInput if the database lacks the columns to be trained, and Closed for a closed database.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, value_dim=2)
    >>> ids = db.insert(["a", "b"], [[1, 0, 0], [0, 1, 0]], [[1, 0], [0, 1]])
    >>> memory = Memory(db, k=2)
    >>> optimizer = torch.optim.SparseAdam(list(memory.parameters()), lr=0.1)  # or Adagrad, SGD; Adam is refused
    >>> memory(torch.ones(5, 3)).output[:, 0].sum().backward()
    >>> optimizer.step()
    >>> memory.commit()
    2
    """

    keys: torch.nn.Parameter | None  # (n, d), None: not trained
    values: torch.nn.Parameter | None  # (n, v), None: not trained

    def __init__(
        self,
        db: SoftDB,
        *,
        keys: bool = True,
        values: bool | None = None,
        k: int = 32,
        temperature: float | torch.nn.Parameter = 1.0,
        reindex: Policy | int | None = None,
        overfetch: int = 2,
    ) -> None:
        super().__init__()
        if not isinstance(db, SoftDB):
            raise BadInput(f"db is {shown(db)}; expected an open softdb database")
        db.core.require_width()
        self.learnt = torch.nn.ParameterDict()  # apart from the rows, whose gradients are sparse
        if isinstance(temperature, torch.nn.Parameter):
            check.temperature(temperature)
            self.learnt["temperature"] = temperature
        else:
            advice = "a memory trains only an nn.Parameter; pass one, or its item()"
            self._heat = check.number(temperature, "temperature", "a finite number above 0", lambda x: x > 0, advice)
        origin = Origin.newest(db)
        self.k, self.overfetch = check.integer(k, "k"), check.integer(overfetch, "overfetch")
        self._followed = Followed(origin, origin.names())
        dtype = "float16" if db.core.schema.dtype == np.float16 else "float32"
        self._begin(reindex, StaleIndex(db.core.schema.metric, dtype=dtype))
        trained, every = chosen(db.core.schema, keys, values), np.arange(len(self))
        for name, train, stored in zip(("keys", "values"), trained, (origin.keys, origin.values), strict=True):
            self.register_parameter(name, torch.nn.Parameter(stored(every).float()) if train else None)
        self._touched = torch.zeros(len(self), dtype=torch.bool)  # (n,) True: had a gradient since the last commit
        self._moved = 0  # records written since the database's index was built
        self._watch()

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._followed.origin.db

    @property
    def device(self) -> torch.device:
        """Device of the parameters. Raises BadInput if keys and values are on different devices."""
        devices = {parameter.device for parameter in self.columns.values()}
        if len(devices) > 1:
            placed = " and ".join(f"{name} on {parameter.device}" for name, parameter in self.columns.items())
            raise BadInput(f"the memory has {placed}; move both with memory.to(device)")
        return devices.pop()

    @property
    def temperature(self) -> float | Tensor:
        """The temperature, a number or a parameter."""
        learnt: Tensor | None = self.learnt.get("temperature")
        return self._heat if learnt is None else learnt

    def __len__(self) -> int:
        """Return the number of records in this memory."""
        return len(self._followed.origin.rows)

    def extra_repr(self) -> str:
        """Return the database, the trained columns and the settings."""
        trained, heat = " and ".join(self.columns), self.temperature
        heat = heat.item() if isinstance(heat, Tensor) else heat
        return f"{self.db!r}, trains {trained}, k={self.k}, temperature={heat}"

    __call__: Callable[..., Pooled]

    @eager
    @shaped
    def forward(self, queries: Numbers) -> Pooled:  # type: ignore[override]  # (q, d) or (…, d), with its graph
        """Answer the soft query over the k nearest records, by the current keys and values.

        `exact` is True with at most k records; else `missed_mass` is unknown, NaN. `finder` names the origin of the
        candidates: "flat" (every key was compared), "stale index" (the last reindexing), or the name of the database's
        index.

        Raises BadInput for queries that do not fit and for scores that are NaN or infinite, and Closed. A NaN key is
        near to no query, so it may go unnoticed here; `commit` refuses it.
        """
        request, source = self.request(queries)
        pooled = source.nearest(request)
        device = pooled.output.device
        return pooled if not isinstance(queries, Tensor) or queries.device == device else on(pooled, queries.device)

    def source(self) -> Parameters:
        """Return the records with their current keys and values, as the source of a request. Raises Closed."""
        return Parameters(self._at_newest(), self.keys, self.values, self._stale.now, self.overfetch)

    def request(self, queries: Vectors, temperature: float | Tensor | None = None) -> tuple[Request, Parameters]:
        """Check queries; return a request on the parameters' device, and its source. temperature=None: the memory's."""
        vectors, source = check.queries(queries, self.db.core.schema.dim, self.device), self.source()
        temperature = self.temperature if temperature is None else temperature
        heat = check.temperature(temperature, check.leading(queries, len(vectors)))
        request = Request.of(vectors.to(self.device), score_of(self.db.core.schema.metric), "softmax", heat).top(self.k)
        self._last_queries = request.vectors.detach()[:RECENT_QUERIES].clone()
        return request, source

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise BadInput for an optimiser that lacks these parameters, refuses sparse gradients, or moves every row."""
        own = {id(parameter) for parameter in self.columns.values()}
        groups = [group for group in optimizer.param_groups if any(id(item) in own for item in group["params"])]
        name = type(optimizer).__name__
        if not groups:
            raise BadInput(f"this {name} holds no parameter of the memory; make one with memory.parameters()")
        if not isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad | torch.optim.SGD):
            raise BadInput(f"{name} takes no sparse gradients; use {SPARSE} for the memory's parameters")
        for group, option in itertools.product(groups, ("momentum", "weight_decay")):
            if group.get(option):
                raise BadInput(f"this {name} has {option}={group[option]}, which changes every record; use {SPARSE}")

    def measure(self, k: int = 10, sample: int = 64) -> float:
        """Measure the share of the k nearest, by the current keys, that are among the overfetch · self.k candidates.

        Uses the latest queries, at most `sample` (64 are kept); before the first query, 64 keys. Cost 64 n d.
        """
        source = self.source()
        k = min(check.integer(k, "k"), source.count)
        check.integer(sample, "sample")
        if self.keys is None or not k or not source.stale:
            return 1.0
        queries = (self.keys.detach()[:RECENT_QUERIES] if self._last_queries is None else self._last_queries)[:sample]
        request = Request.of(queries, score_of(self.db.core.schema.metric))
        # all overfetch · k candidates, before the best k of them are chosen
        count = min(max(self.k, k) * self.overfetch, source.count)
        candidates = dataclasses.replace(source, overfetch=1).find(request.top(count)).positions
        true = source.find(request.top(k, exact=True)).positions
        self._recall = float((true[:, :, None] == candidates[:, None, :]).any(2).mean())
        return self._recall

    def report(self) -> MemoryReport:
        """Report the stale index's age and build time, and how many records had gradients since the last commit."""
        seconds, touched = self._stale.now.seconds, int(self._touched.sum())
        counts = len(self), self.steps, self.age, self._recall, self.reindexing, self._reindexes
        return MemoryReport(*counts, seconds, self._seconds, touched)

    def commit(self, *, everything: bool = False, reindex: bool | None = None) -> int:
        """Write the records that training has changed to the database, all or none, and return their number.

        Durable when this returns. Writes the records that had a gradient since the last commit and differ from the
        stored ones in any bit of the stored dtype. They keep ids and payloads and get new rows, as with `db.update`.
        Rows changed by hand (`memory.keys[0] += 5` under torch.no_grad()) had none: pass everything=True. The index
        treats written records as new; once half of all records were written since the index was built, it is
        rebuilt with the same target recall. After a commit candidates come from the database's index, if there is one.
        Cost: reads the records that had a gradient, writes the changed ones.

        Args:
            everything: compare every record, also those changed without a gradient.
            reindex: True: rebuild the index in any case; False: never; None: once half of the records were written, and
                no other build is running.

        Raises:
            StaleRead: another writer deleted or replaced a trained record, and nothing was written; call `reload`.
            ReadOnly: the database is open for reading; open it with mode="rw", make a memory and load the state_dict.
            BadInput: training has made a parameter NaN, infinite, or too large for float16, or with reindex=True
                another build is running; nothing was written.
            Closed, WriteFailed: as with `db.update`.
            Errors of `db.build_index`: everything was written, and the old index stays in use.
        """
        if not isinstance(everything, bool) or not (reindex is None or isinstance(reindex, bool)):
            raise BadInput(f"everything is {shown(everything)} and reindex {shown(reindex)}; expected True or False")
        self.db.core.store.require_writable()
        if reindex and self.db.core.finder.building:
            raise BadInput("reindex=True while an index is being built; wait for that build, then commit")
        origin = self._at_newest()
        touched = self._touched.cpu().numpy()
        if lost := int(np.count_nonzero(touched & ~origin.present)):
            raise StaleRead(
                f"commit: {lost} of {np.count_nonzero(touched)} trained records were deleted or replaced since; "
                "call reload(), which drops only these, then commit again"
            )
        compared = np.flatnonzero(origin.present & (touched | everything))
        changed = origin.changed(compared, self.keys, self.values)
        if len(changed):
            self._followed.origin = origin.written(changed, self.keys, self.values)
            self._moved += len(changed)
        self._touched[:] = False
        for parameter in self.columns.values():  # a gradient that is still set changes records at the next step
            self._mark(parameter)
        if len(changed) or reindex:
            self._committed(reindex)
        return len(changed)

    def reload(self) -> int:
        """Drop deleted and replaced records, append inserted ones, and return the number of records.

        The other records keep their parameters, committed or not, and their order. If anything changed, `keys` and
        `values` are new parameters: make a new optimiser. If the memory has a stale index, `reload` reindexes, and
        raises BadInput before any change for keys that are NaN, infinite or too large.
        """
        self.db.refresh()
        origin = self._at_newest()
        present = np.flatnonzero(origin.present)
        inserted = np.setdiff1d(origin.snapshot.rows(np.flatnonzero(origin.snapshot.live)), origin.rows)
        if len(present) == len(self) and not len(inserted):
            return len(self)
        indexed = self._stale.now.number > 0
        if indexed and self.keys is not None:
            largest = float(np.finfo(self._stale.dtype).max)
            if not bool((self.keys.detach()[present].abs() <= largest).all()):
                raise BadInput(
                    "keys are NaN, infinite or too large: training has moved them too far; begin again from the last "
                    "commit with smaller steps"
                )
        origin = Origin(origin.db, np.concatenate([origin.rows[present], inserted]), origin.snapshot)
        self._followed = Followed(origin, origin.names())
        new = np.arange(len(present), len(self))
        for name, stored in (("keys", origin.keys), ("values", origin.values)):
            old: torch.nn.Parameter | None = getattr(self, name)
            if old is not None:
                data = torch.cat([old.detach()[present], stored(new).to(old)])
                setattr(self, name, torch.nn.Parameter(data, old.requires_grad))
        self._touched = torch.cat([self._touched[present], self._touched.new_zeros(len(inserted))])
        self._watch()
        self._forget()
        if indexed:
            self.reindex()
        return len(self)

    def _committed(self, reindex: bool | None) -> None:
        """Reset the age of the candidates after a commit, and rebuild the database's index if that is due."""
        report = self.db.core.finder.report()
        if report is None or report.kind == "flat":
            self._moved = 0
            if not self._stale.now.number:  # an index built from now on holds these keys
                self._since = self.steps
            return
        self._forget()
        self._since = self.steps
        due = self._moved >= REBUILD_SHARE * len(self) and not self.db.core.finder.building
        if reindex or (reindex is None and due):
            self.db.build_index(report.kind, recall=report.target, k=report.k)
            self._moved = 0

    def _at_newest(self) -> Origin:
        self._followed.origin = self._followed.origin.now()
        return self._followed.origin

    def _lags(self) -> bool:
        return Parameters(self._followed.origin, self.keys, None, self._stale.now, 1).stale

    def _work(self, background: bool) -> Work | None:
        if self.keys is None or len(self) < FEWEST:
            return None
        keys = self.keys.detach().clone() if background else self.keys.detach()
        return functools.partial(self._copied, self._stale, keys, self.steps)

    def _copied(self, stale: StaleIndex, keys: Tensor, step: int, progress: Progress) -> ReindexReport:
        """Make the next version of the stale index from the keys of a training step."""

        def block(low: int) -> Tensor:
            progress("copying", low, len(keys))
            return keys[low : low + BLOCK]

        report = stale.replace(np.arange(len(keys)), map(block, range(0, len(keys), BLOCK)), step)
        if stale is not self._stale:
            raise Cancelled(DROPPED)
        return self._counted(report)

    def _forget(self) -> None:
        """Drop the stale index, and cancel a running build of its next version, without waiting for its end."""
        self._stale = self._stale.emptied()
        self._stop(DROPPED, wait=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Memory:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.device != self._touched.device:
            self._touched, self._last_queries = self._touched.to(self.device), None
            self._forget()  # its copy of the keys is on the old device
        self._watch()  # the parameters may be new tensors
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.db.closed:
            self._at_newest()
        destination[prefix + RECORDS] = self._followed.digests()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state = {name: tensor for name, tensor in state_dict.items() if name != prefix + RECORDS}
        own = {prefix + name: tensor for name, tensor in self.columns.items() if prefix + name in state}
        if own:
            if not self.db.closed:
                self._at_newest()
            places = self._followed.places(state_dict.get(prefix + RECORDS), [state[name] for name in own])
            state.update({name: in_order(state[name], places, tensor.detach()) for name, tensor in own.items()})
        super()._load_from_state_dict(state, prefix, *args)
        if own:
            self._touched[:] = True
            self._watch()  # the parameters may be new tensors

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_build": None, "_gradient_hooks": []}  # a running build belongs to the original alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()  # copies of a parameter have no hooks
