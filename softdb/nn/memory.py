"""A memory whose parameters are the stored keys and values of a database: trained in place, committed durably."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from softdb import check
from softdb.answers import Pooled
from softdb.attend import Request
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.index.choose import Progress
from softdb.nn.eager import eager
from softdb.nn.origin import TOLD, Followed, Origin, in_order
from softdb.nn.parameters import Parameters, chosen, on
from softdb.nn.reindexed import Policy, Reindexed, Work
from softdb.nn.stale_index import FEWEST, StaleIndex
from softdb.reports import MemoryReport, ReindexReport
from softdb.scoring import score_of
from softdb.typing import Numbers, Vectors

BLOCK = 1 << 14  # keys copied at once
ASKED = 64  # of the last queries, kept to measure recall with
OUTDATED = 0.5  # share of the records that were written since the index was built, from which on it is built anew
SPARSE = "torch.optim.SparseAdam, Adagrad without weight_decay, or SGD without momentum and weight_decay"


class Memory(Reindexed):
    """The stored keys and values of a database as parameters, with gradients of the records found and no others.

    With (k_i, v_i) the parameters, s the score of the database's metric and I the k nearest records:

        w_i = exp(s(q, k_i) / T) / Σ_I exp(s(q, k_j) / T),  output = Σ_I w_i v_i,  lse = log Σ_I exp(s(q, k_j) / T)

    differentiable in queries, keys and values. A parameter's gradient is a sparse tensor of the rows in I, never a
    dense (n, d) one: a step takes about as long and as much memory however many records there are. Train with
    torch.optim.SparseAdam, Adagrad or SGD (`check` tells which optimiser can), then `commit()`.

    Candidates are found among the keys as they were, `overfetch` times as many as are kept, and scored as they are:
    one that moved far may be missed, none is scored wrongly. They come from the database's index, which knows the keys
    of the last commit, until `reindex` copies the keys as they are and indexes the copy. Without an index, or below
    10,000 records, every key is compared as it is and nothing is ever stale.

    The memory holds the records that were there when it was made. One that others delete or replace is not found any
    more, one that they insert not yet: `reload` takes both in. Copies share the handle and follow each other's commits,
    of which the last stands, until one of them reloads: from then on each is one of the others. A database open for
    reading only may be trained, not committed. `state_dict` holds the parameters and, as "records", digests of their
    ids: it is loaded by id, in any order, and raises BadInput, before anything changes, where the records are not the
    same. After loading one, `reindex()`.

    Parameters are float32 (or float64, for checks: then every key is compared), whatever the database stores, and lie
    where `memory.to(device)` puts them, at first in the RAM; queries are answered on their own device. On a GPU every
    key is compared as it is, in one pass, and nothing is ever stale; `commit` writes what the GPU holds, in the dtype
    that is stored. Memory: n (d + v) numbers, of what is trained. Cost: a search for `overfetch` k records (on a
    GPU q n d), then q k (d + v).
    Sources: Lample et al. 2019 (arXiv 1907.05242) for sparse training, Guu et al. 2020 (REALM, section 3.3) for finding
    among stale keys.

    Args:
        db: the database.
        keys: whether keys are trained; if not they are read where they are stored.
        values: whether values are trained; None: if they are vectors. Where the key serves, the trained key does.
        k: records pooled for each query; with fewer, all of them.
        temperature: divides the scores.
        reindex: a policy, as of a `View`; call `step()` after each step of the optimiser.
        overfetch: how many candidates are looked at for each of the k.

    Raises BadInput for a database without such columns, and Closed for one that was closed.

    >>> import softdb
    >>> db = softdb.open(None, dim=3, value_dim=2)
    >>> db.insert(["a", "b"], [[1, 0, 0], [0, 1, 0]], [[1, 0], [0, 1]])
    >>> memory = Memory(db, k=2)
    >>> optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)
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
        temperature: float = 1.0,
        reindex: Policy | int | None = None,
        overfetch: int = 2,
    ) -> None:
        super().__init__()
        if not isinstance(db, SoftDB):
            raise BadInput(f"db is {shown(db)}; expected an open softdb database")
        self.temperature = check.positive(temperature, "temperature")
        origin = Origin.newest(db)
        self.k, self.overfetch = check.integer(k, "k"), check.integer(overfetch, "overfetch")
        self._followed = Followed.of(origin)
        dtype = "float16" if db.core.schema.dtype == np.float16 else "float32"
        self._begin(reindex, StaleIndex(db.core.schema.metric, dtype=dtype))
        trained, every = chosen(db.core.schema, keys, values), np.arange(len(self))
        for name, train, stored in zip(("keys", "values"), trained, (origin.keys, origin.values), strict=True):
            self.register_parameter(name, torch.nn.Parameter(stored(every).float()) if train else None)
        self._touched = torch.zeros(len(self), dtype=torch.bool)  # had a gradient since the last commit
        self._moved = 0  # records written since the database's index was built
        self._listening: list[RemovableHandle] = []
        self._watch()

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._followed.origin.db

    @property
    def device(self) -> torch.device:
        """Device of the parameters. Raises BadInput where keys and values lie apart."""
        devices = {parameter.device for parameter in self.parameters()}
        if len(devices) > 1:
            where = " and ".join(f"{name} on {one.device}" for name, one in self.named_parameters())
            raise BadInput(f"the memory has {where}; move it as a whole, memory.to(device)")
        return devices.pop()

    def __len__(self) -> int:
        """Number of records held."""
        return len(self._followed.origin.rows)

    def extra_repr(self) -> str:
        """The database and what is trained."""
        trained = " and ".join(name for name, _ in self.named_parameters())
        return f"{self.db!r}, trains {trained}, k={self.k}, temperature={self.temperature}"

    __call__: Callable[..., Pooled]

    @eager
    def forward(self, queries: Numbers) -> Pooled:  # queries (q, d), a tensor with its graph
        """The soft query over the k nearest records, by keys and values as they are.

        `exact` is True where there are no more than k records; else `missed_mass` is unknown, NaN. `finder` says where
        candidates came from: "flat" (every key was compared), "stale index" (the last reindexing), or the name of the
        database's index.

        Raises BadInput for queries that do not fit and for scores that are NaN or infinite, and Closed. A key that
        training has made NaN is not always noticed here, as it is near to nothing; `commit` refuses it.
        """
        request, source = self.request(queries)
        pooled = source.nearest(request)
        there = pooled.output.device
        return pooled if not isinstance(queries, Tensor) or queries.device == there else on(pooled, queries.device)

    def source(self) -> Parameters:
        """The records, by keys and values as they are now. Raises Closed."""
        return Parameters(self._at_newest(), self.keys, self.values, self._stale.now, self.overfetch)

    def request(self, queries: Vectors, temperature: float | None = None) -> tuple[Request, Parameters]:
        """Return a checked request on the parameters' device, and its source; temperature None: its own."""
        device = self.device
        asked, source = check.queries(queries, self.db.core.schema.dim, device), self.source()
        heat = self.temperature if temperature is None else check.positive(temperature, "temperature")
        request = Request.of(asked.to(device), score_of(self.db.core.schema.metric), "softmax", heat).top(self.k)
        self._asked = request.queries.detach()[:ASKED].clone()
        return request, source

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """BadInput for one that takes no sparse gradients, moves records without one, or is not of these parameters."""
        mine = {id(parameter) for parameter in self.parameters()}
        groups = [group for group in optimizer.param_groups if any(id(one) in mine for one in group["params"])]
        name = type(optimizer).__name__
        if not groups:
            raise BadInput(f"this {name} holds no parameter of the memory; make one with memory.parameters()")
        if not isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad | torch.optim.SGD):
            raise BadInput(f"{name} takes no sparse gradients; use {SPARSE} for the memory's parameters")
        for group, word in itertools.product(groups, ("momentum", "weight_decay")):
            if group.get(word):
                raise BadInput(f"this {name} has {word}={group[word]}, which reaches every record; use {SPARSE}")

    def measure(self, k: int = 10, sample: int = 64) -> float:
        """The share of the k nearest, by the keys as they are, that are among the overfetch · self.k candidates.

        For the last queries asked, at most `sample` of them (64 are kept; before any, keys). Cost 64 n d.
        """
        source = self.source()
        k = min(check.integer(k, "k"), source.count)
        check.integer(sample, "sample")
        if self.keys is None or not k or not source.stale:
            return 1.0
        asked = (self.keys.detach()[:ASKED] if self._asked is None else self._asked)[:sample]
        request = Request.of(asked, score_of(self.db.core.schema.metric))
        # the candidates themselves: as many as are looked at, of which all are kept
        count = min(max(self.k, k) * self.overfetch, source.count)
        found = dataclasses.replace(source, overfetch=1).find(request.top(count)).positions
        true = source.find(request.top(k, exact=True)).positions
        self._recall = float((true[:, :, None] == found[:, None, :]).any(2).mean())
        return self._recall

    def report(self) -> MemoryReport:
        """Return the age of the candidates, the cost of renewing them, and the records touched since a commit."""
        seconds, touched = self._stale.now.seconds, int(self._touched.sum())
        counts = len(self), self.steps, self.age, self._recall, self.reindexing, self._reindexes
        return MemoryReport(*counts, seconds, self._seconds, touched)

    def commit(self, *, everything: bool = False, reindex: bool | None = None) -> int:
        """Write the records that training has changed to the database, all or none, and return how many.

        Durable when this returns. Those are written that had a gradient since the last commit and differ from what is
        stored, to the last bit of its dtype. They keep ids and payloads and get new rows, as with `db.update`. The
        index takes them in as new records; once half of all were written since it was built, it is built anew, with the
        same recall. From then on candidates come from the database's index, if it has one. Cost: the records that had
        a gradient are read, the changed ones written.

        Args:
            everything: compare every record, also those changed without a gradient, as by hand or by momentum.
            reindex: build the index anew: True: whatever was written; False: never; None: once it is due, and no other
                build is under way.

        Raises:
            StaleRead: others have deleted or replaced a trained record; nothing was written. `reload` lets it go.
            ReadOnly: the database is open for reading; open it with mode="rw", make a memory and load the state_dict.
            BadInput: training has made a parameter NaN, infinite, or too large for float16, or with reindex=True
                another build is under way; nothing was written.
            Closed, WriteFailed: as with `db.update`.
            What `db.build_index` raises: everything was written, and the old index serves on.
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
                "reload() lets them go and keeps what else was learnt, then commit again"
            )
        which = np.flatnonzero(origin.present & (touched | everything))
        changed = origin.changed(which, self.keys, self.values)
        if len(changed):
            self._followed.origin = origin.written(changed, self.keys, self.values)
            self._moved += len(changed)
        self._touched[:] = False
        for parameter in self.parameters():  # what has a gradient still changes with the next step
            self._mark(parameter)
        if len(changed) or reindex:
            self._committed(reindex)
        return len(changed)

    def reload(self) -> int:
        """Take in what others have inserted, deleted and replaced, and return how many records there are now.

        What was learnt of the other records stays, committed or not, in their order; new ones stand at the end. Where
        anything changed `keys` and `values` are new parameters: make the optimiser anew. Candidates are indexed anew
        where they had been; then BadInput, before anything changes, for keys that are NaN, infinite or too large.
        """
        self.db.refresh()
        origin = self._at_newest()
        kept = np.flatnonzero(origin.present)
        fresh = np.setdiff1d(origin.snapshot.rows(np.flatnonzero(origin.snapshot.live)), origin.rows)
        if len(kept) == len(self) and not len(fresh):
            return len(self)
        indexed = self._stale.now.number > 0
        if indexed and self.keys is not None:
            largest = float(np.finfo(self._stale.dtype).max)
            if not bool((self.keys.detach()[kept].abs() <= largest).all()):
                raise BadInput(
                    "keys are NaN, infinite or too large: training has moved them too far; begin again from the last "
                    "commit with smaller steps"
                )
        origin = Origin(origin.db, np.concatenate([origin.rows[kept], fresh]), origin.snapshot)
        self._followed = Followed.of(origin)
        new = np.arange(len(kept), len(self))
        for name, stored in (("keys", origin.keys), ("values", origin.values)):
            old: torch.nn.Parameter | None = getattr(self, name)
            if old is not None:
                data = torch.cat([old.detach()[kept], stored(new).to(old)])
                setattr(self, name, torch.nn.Parameter(data, old.requires_grad))
        self._touched = torch.cat([self._touched[kept], self._touched.new_zeros(len(fresh))])
        self._watch()
        self._forget()
        if indexed:
            self.reindex()
        return len(self)

    def _committed(self, asked: bool | None) -> None:
        """Take note that what is stored is what is trained, and build the index anew where that is due."""
        report = self.db.core.finder.report()
        if report is None or report.kind == "flat":
            self._moved = 0
            if not self._stale.now.number:  # an index that is built now knows these keys
                self._since = self.steps
            return
        self._forget()
        self._since = self.steps
        if asked or (asked is None and self._moved >= OUTDATED * len(self) and not self.db.core.finder.building):
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

    def _copied(self, stale: StaleIndex, keys: Tensor, step: int, say: Progress) -> ReindexReport:
        """The keys as they were at a step, indexed."""

        def block(low: int) -> Tensor:
            say("copying", low, len(keys))
            return keys[low : low + BLOCK]

        return self._counted(stale.replace(np.arange(len(keys)), map(block, range(0, len(keys), BLOCK)), step))

    def _forget(self) -> None:
        """Release the copy of the keys, and one that is being made."""
        old, self._build = self._stale, None
        self._stale = old.anew()
        old.close()  # last: another thread that asks meets an open one

    def _watch(self) -> None:
        """Note which rows get a gradient."""
        while self._listening:
            self._listening.pop().remove()
        for parameter in self.parameters():
            wants, parameter.requires_grad = parameter.requires_grad, True
            self._listening.append(parameter.register_post_accumulate_grad_hook(self._mark))  # type: ignore[no-untyped-call]
            parameter.requires_grad = wants

    def _mark(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            self._touched.index_fill_(0, parameter.grad._indices()[0], True)
        else:  # a loss that looks at the parameter itself
            self._touched[:] = True

    def _apply(self, *args: Any, **kwargs: Any) -> Memory:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.device != self._touched.device:
            self._touched, self._asked = self._touched.to(self.device), None
            self._forget()  # a copy of the keys in the RAM
        self._watch()  # other tensors may be in place
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.db.closed:
            self._at_newest()
        destination[prefix + TOLD] = self._followed.told()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {name: one for name, one in state_dict.items() if name != prefix + TOLD}
        mine = {prefix + name: one for name, one in self.named_parameters() if prefix + name in given}
        if mine:
            if not self.db.closed:
                self._at_newest()
            places = self._followed.places(state_dict.get(prefix + TOLD), [given[name] for name in mine])
            given.update({name: in_order(given[name], places, one.detach()) for name, one in mine.items()})
        super()._load_from_state_dict(given, prefix, *args)
        if mine:
            self._touched[:] = True
            self._watch()  # it may have put other tensors in place

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_build": None, "_listening": []}  # a build goes on for this one alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()  # copies of a parameter have no hooks
