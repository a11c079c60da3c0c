"""A memory whose parameters are the stored keys and values of a database: trained in place, committed durably."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from softdb import check
from softdb.answers import Pooled
from softdb.attend import Request, nearest
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput, StaleRead
from softdb.nn.origin import DIGEST, Followed, Origin
from softdb.nn.parameters import Parameters
from softdb.nn.policies import Policy
from softdb.nn.trained_keys import ASKED, TrainedKeys
from softdb.reports import MemoryReport
from softdb.scores import score_of

__all__ = ["Memory"]

Column = Callable[[NDArray[np.int64]], Tensor]  # parameters -> what is stored of them
OUTDATED = 0.5  # share of the records that were written since the index was built, from which on it is built anew
TOLD = "records"  # in the state_dict: whose parameters these are
SPARSE = "torch.optim.SparseAdam, Adagrad without weight_decay, or SGD without momentum and weight_decay"


class Memory(TrainedKeys):
    """The stored keys and values of a database as parameters, with gradients of the records found and no others.

    With (k_i, v_i) the parameters, s the score of the database's metric and I the k nearest records:

        w_i = exp(s(q, k_i) / T) / Σ_I exp(s(q, k_j) / T),  output = Σ_I w_i v_i,  lse = log Σ_I exp(s(q, k_j) / T)

    differentiable in queries, keys and values. A parameter's gradient is a sparse tensor of the rows in I: a dense
    (n, d) one is never made, and a step takes about as long and as much memory however many records there are. Train
    with torch.optim.SparseAdam, Adagrad or SGD (`check` tells which optimiser can), then `commit()`.

    Candidates are found among the keys as they were, `overfetch` times as many as are kept, and scored as they are:
    one that moved far may be missed, none is scored wrongly. They come from the database's own index, which knows the
    keys of the last commit, until `reindex` makes a copy of the keys as they are and indexes that; without an index, or
    below 10,000 records, every key is compared as it is and nothing is ever stale.

    The memory holds the records that were there when it was made. One that is deleted or replaced since, by others, is
    not found any more; one that was inserted is not yet: `reload` takes both in. Copies share the handle and follow
    each other's commits, of which the last stands, until one of them reloads: from then on each is one of the others.
    A database that is open for reading only may be trained, too, but not committed. `state_dict` holds the parameters
    and, as "records", digests of the ids they belong to: it is loaded by id, whatever the order, and BadInput is raised
    before anything of this memory changes where its records are not the same. After loading one, `reindex()`.

    Parameters live in the RAM, in float32 (or float64, for checks: then every key is compared); queries may come from a
    GPU. Memory: n (d + v) numbers, of what is trained. Cost: a search for `overfetch` k records, then q k (d + v).
    Sources: Lample et al. 2019 (arXiv 1907.05242) for sparse training of a memory, Guu et al. 2020 (REALM, section 3.3)
    for finding among stale keys.

    Args:
        db: the database.
        keys: whether keys are trained; if not they are read where they are stored.
        values: whether values are trained; None: where there are vectors to train. Labels cannot be trained. Where
            the key serves as the value, the trained key does.
        k: records pooled for each query; with fewer, all of them.
        temperature: divides the scores.
        reindex: a policy, `EverySteps(n)` (or n), `OnRecall(target)`, `InBackground(n)`, or None = `Never()`; call
            `step()` after each step of the optimiser.
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
        self._follow(Origin.newest(db), k, overfetch, reindex)
        trained, every = self._trained(keys, values), np.arange(len(self))
        for (name, column), train in zip(self._columns(self._origin), trained, strict=True):
            self.register_parameter(name, torch.nn.Parameter(column(every).float()) if train else None)
        self._touched = np.zeros(len(self._origin.rows), np.bool_)  # had a gradient since the last commit
        self._moved = 0  # records written since the database's index was built
        self._listening: list[RemovableHandle] = []
        self._watch()

    def extra_repr(self) -> str:
        """The database and what is trained."""
        trained = " and ".join(name for name, _ in self.named_parameters())
        return f"{self.db!r}, trains {trained}, k={self.k}, temperature={self.temperature}"

    # -- asking --------------------------------------------------------------------------------------------------------

    def forward(
        self,
        queries: Any,  # (q, d) numbers, or a tensor with its graph
    ) -> Pooled:
        """The soft query over the k nearest records, by keys and values as they are.

        `exact` is True where there are no more than k records; else `missed_mass` is unknown, NaN. `hits` are the
        records, whose ids and payloads are the database's; `finder` says where candidates came from: "flat" (every key
        was compared), "stale index" (the last reindexing), or the name of the database's index.

        Raises BadInput for queries that do not fit and for scores that are NaN or infinite, and Closed. A key that
        training has made NaN is not always noticed here, as it is near to nothing; `commit` refuses it.
        """
        asked = check.queries(queries, self.db.schema.dim)
        pooled = nearest(*self.request(asked))
        return pooled if asked.device.type == "cpu" else _on(pooled, asked.device)

    def request(self, queries: Any, temperature: float | None = None) -> tuple[Request, Parameters]:
        """What is asked, checked, on the CPU, and the parameters that it is asked of; temperature None: its own."""
        asked, source = check.queries(queries, self.db.schema.dim), self.source()
        heat = self.temperature if temperature is None else check.positive(temperature, "temperature")
        request = Request.of(asked.cpu(), score_of(self.db.schema.metric), "softmax", heat, k=self.k)
        self._asked = request.queries.detach()[:ASKED].clone()
        return request, source

    # -- training ------------------------------------------------------------------------------------------------------

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises BadInput for an optimiser that cannot take sparse gradients, or that moves records without one.

        Or that holds none of this memory's parameters, as one that was made before `reload`.
        """
        mine = {id(one) for one in self.parameters()}
        groups = [group for group in optimizer.param_groups if any(id(one) in mine for one in group["params"])]
        name = type(optimizer).__name__
        if not groups:
            raise BadInput(f"this {name} holds no parameter of the memory; make one with memory.parameters()")
        if not isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad | torch.optim.SGD):
            raise BadInput(f"{name} takes no sparse gradients; use {SPARSE} for the memory's parameters")
        for group, word in itertools.product(groups, ("momentum", "weight_decay")):
            if group.get(word):
                raise BadInput(f"this {name} has {word}={group[word]}, which reaches every record; use {SPARSE}")

    def report(self) -> MemoryReport:
        """As of every module that trains keys, and how many records had a gradient since the last commit."""
        return dataclasses.replace(super().report(), uncommitted=int(np.count_nonzero(self._touched)))

    # -- the database --------------------------------------------------------------------------------------------------

    def commit(self, *, everything: bool = False, reindex: bool | None = None) -> int:
        """Write the records that training has changed to the database, all or none, and return how many.

        Durable when this returns; a crash loses at most what was trained since. Those are written that had a gradient
        since the last commit and differ from what is stored, to the last bit of its dtype. They keep their ids and
        payloads and get new rows, as with `db.update`. The index takes them in as it does new records; once half of
        all were written since it was built, it is built anew, with the same recall. From then on candidates come from
        the database's index, if it has one. Cost: the records that had a gradient are read, the changed ones written.

        Args:
            everything: compare every record, also those that were changed otherwise than through a gradient, such as
                by hand or by momentum.
            reindex: True: build the index anew, whatever was written; False: don't; None: once it is due, and no other
                build is under way.

        Raises:
            StaleRead: others have deleted or replaced a record that was trained; nothing was written. `reload` lets it
                go, and keeps what else was learnt.
            ReadOnly: the database is open for reading; open it with mode="rw", make a memory and load the state_dict.
            BadInput: training has made a parameter NaN, infinite, or too large for float16, or with reindex=True
                another build is under way; nothing was written.
            Closed, WriteFailed: as with `db.update`.
            What `db.build_index` raises: everything was written, and the old index serves on.
        """
        self._may_commit(everything, reindex)
        origin = self._at_newest()
        lost = int(np.count_nonzero(self._touched & ~origin.present))
        if lost:
            raise StaleRead(
                f"commit: {lost} of {np.count_nonzero(self._touched)} trained records were deleted or replaced since; "
                "reload() lets them go and keeps what else was learnt, then commit again"
            )
        which = np.flatnonzero(origin.present & (self._touched | everything))
        changed = origin.changed(which, self.keys, self.values)
        if len(changed):
            keys, values = (None if one is None else one.detach()[changed] for one in (self.keys, self.values))
            self._followed.origin = origin.written(changed, keys, values)
            self._moved += len(changed)
        self._touched[:] = False
        for parameter in self.parameters():  # what has a gradient still changes with the next step
            self._mark(parameter)
        if len(changed) or reindex:
            self._reindex(reindex)
        return len(changed)

    def _may_commit(self, everything: object, reindex: object) -> None:
        if not isinstance(everything, bool) or not (reindex is None or isinstance(reindex, bool)):
            raise BadInput(f"everything is {shown(everything)} and reindex {shown(reindex)}; expected True or False")
        self.db.require_writable()
        if reindex and self._building:
            raise BadInput("reindex=True while an index is being built; wait for that build, then commit")

    @property
    def _building(self) -> bool:
        """Whether the database's index is being built."""
        return self.db.finder.building

    def reload(self) -> int:
        """Take in what others have inserted, deleted and replaced, and return how many records there are now.

        What was learnt of the other records stays, committed or not, and they keep their order; new ones stand at the
        end. Where anything changed `keys` and `values` are new parameters: make the optimiser anew. Candidates are
        indexed anew where they had been: then BadInput is raised, before anything changes, for keys that are NaN,
        infinite or too large for that.
        """
        self.db.refresh()
        origin = self._at_newest()
        kept = np.flatnonzero(origin.present)
        fresh = np.setdiff1d(origin.snapshot.rows(np.flatnonzero(origin.snapshot.live)), origin.rows)
        if len(kept) == len(self) and not len(fresh):
            return len(self)
        self._require_kept(kept)
        self._followed = Followed.of(origin.of(np.concatenate([origin.rows[kept], fresh])))
        new = np.arange(len(kept), len(self))
        for name, column in self._columns(self._origin):
            old: torch.nn.Parameter | None = getattr(self, name)
            if old is not None:
                data = torch.cat([old.detach()[kept], column(new).to(old)])
                setattr(self, name, torch.nn.Parameter(data, old.requires_grad))
        self._touched = np.concatenate([self._touched[kept], np.zeros(len(fresh), np.bool_)])
        self._watch()
        had = self._stale.version
        self._forget()
        if had:
            self.reindex()
        return len(self)

    def _require_kept(self, kept: NDArray[np.int64]) -> None:
        """Raises BadInput for keys that a copy of them cannot hold, if there is a copy."""
        if self.keys is None or not self._stale.version:
            return
        largest = torch.finfo(torch.float16 if self.db.schema.dtype == np.float16 else torch.float32).max
        if not bool((self.keys.detach()[kept].abs() <= largest).all()):
            raise BadInput(
                "keys are NaN, infinite or too large: training has moved them too far; begin again from the last "
                "commit with smaller steps"
            )

    def _reindex(self, asked: bool | None) -> None:
        """Take note that what is stored is what is trained, and build the index anew where that is due."""
        report = self.db.finder.report()
        if report is None or report.kind == "flat":
            self._moved = 0
            if not self._stale.version:  # an index that is built now knows these keys
                self._since = self.steps
            return
        self._forget()
        self._since = self.steps
        if asked or (asked is None and self._moved >= OUTDATED * len(self) and not self._building):
            self.db.build_index(report.kind, recall=report.target, k=report.k)
            self._moved = 0

    # -- its parts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _columns(origin: Origin) -> tuple[tuple[str, Column], tuple[str, Column]]:
        """The parameters' names, and what is stored of them."""
        return ("keys", origin.keys), ("values", origin.values)

    def _trained(self, keys: object, values: object) -> tuple[bool, bool]:
        """Whether keys and values are trained."""
        if not isinstance(keys, bool) or not (values is None or isinstance(values, bool)):
            raise BadInput(f"keys is {shown(keys)} and values {shown(values)}; expected True or False")
        schema = self.db.schema
        if values and schema.value_dim is None:
            what = "labels, which cannot be trained" if schema.has_values else "none: the key serves, and is trained"
            raise BadInput(f"values=True, but this database's values are {what}; leave values out")
        trained = keys, schema.value_dim is not None if values is None else values
        if not any(trained):
            raise BadInput("neither keys nor values would be trained; db.attend asks without training")
        return trained

    def _watch(self) -> None:
        """Note which rows get a gradient."""
        for handle in self._listening:
            handle.remove()
        self._listening = []
        for parameter in self.parameters():
            wants, parameter.requires_grad = parameter.requires_grad, True
            self._listening.append(parameter.register_post_accumulate_grad_hook(self._mark))  # type: ignore[no-untyped-call]
            parameter.requires_grad = wants

    def _mark(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            self._touched[parameter.grad._indices()[0].numpy()] = True
        else:  # a loss that looks at the parameter itself
            self._touched[:] = True

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.db.closed:
            self._at_newest()
        destination[prefix + TOLD] = self._followed.told()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = {name: one for name, one in state_dict.items() if name != prefix + TOLD}
        mine = {prefix + name: one for name, one in self.named_parameters() if prefix + name in given}
        if mine:
            told = state_dict.get(prefix + TOLD)
            places = self._places(told, [given[name] for name in mine])
            given.update({name: _in_order(given[name], places, one.detach()) for name, one in mine.items()})
        super()._load_from_state_dict(given, prefix, *args)
        if mine:
            self._touched[:] = True
            self._watch()  # it may have put other tensors in place

    def _places(self, told: object, columns: list[Tensor]) -> NDArray[np.int64]:
        """Where the state has each record. Raises BadInput for a state that does not tell, or of other records."""
        if not isinstance(told, Tensor) or told.ndim != 2 or told.shape[1] != DIGEST:
            raise BadInput(
                f"the state's {TOLD!r} are {shown(told)}; expected what a memory's state_dict() says of whose "
                "parameters these are"
            )
        if any(len(one) != len(told) for one in columns):
            raise BadInput(f"the state has {len(told)} records and columns of {[len(one) for one in columns]} rows")
        if not self.db.closed:
            self._at_newest()
        return self._followed.places(told)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_listening": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()  # copies of a parameter have no hooks


def _on(pooled: Pooled, device: torch.device) -> Pooled:
    """The answer on another device."""
    assert pooled.hits is not None
    hits = dataclasses.replace(pooled.hits, rows=pooled.hits.rows.to(device), scores=pooled.hits.scores.to(device))
    columns: dict[str, Any] = {name: one.to(device) for name, one in vars(pooled).items() if isinstance(one, Tensor)}
    return dataclasses.replace(pooled, hits=hits, **columns)


def _in_order(
    column: Tensor,  # (m, …) of a state
    places: NDArray[np.int64],  # (n,) of this memory's records in it, -1 = not there
    now: Tensor,  # (n, …)
) -> Tensor:  # (n, …)
    """The column as this memory orders it; what the state does not have stays as it is."""
    if np.array_equal(places, np.arange(len(column))):
        return column
    taken = column.detach()[places] if len(column) else now.to(column).clone()
    taken[places < 0] = now.to(taken)[places < 0]
    return taken
