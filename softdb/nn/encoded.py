"""Stored keys through an encoder that is trained, and as a source: found as they were, scored as they are."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Pooled, Resolve
from softdb.attend.blocks import scores_of
from softdb.attend.estimate import require_estimator
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.attend.result import Doubt, Estimated, answered
from softdb.attend.rounds import SHOWN
from softdb.attend.scoring import scan
from softdb.attend.stored import OfGeneration
from softdb.check import Metric, shown
from softdb.errors import BadInput, StaleRead
from softdb.index.contract import Floats, prepared
from softdb.index.sampler import Drawing
from softdb.lazy import cached_property
from softdb.nn.stale_index import Version
from softdb.pool import State, merge, pool
from softdb.scoring import softmax
from softdb.scoring.score import alike
from softdb.store import Snapshot
from softdb.store.snapshot import Block

GATHERED = 1 << 24  # numbers of encoded candidates gathered at once: 64 MB

Encode = Callable[[Any], Tensor]  # (m, d), or m texts -> (m, d')


def probed(encoder: Encode, dim: int | None) -> int:
    """d', the width that an encoder gives to keys of zeros, as wide as the database's, or (None) to two texts."""
    if not callable(encoder):
        raise BadInput(f"encoder is {shown(encoder)}; expected an nn.Module or a callable, (m, d) -> (m, d')")
    with torch.no_grad(), evaluating(encoder):
        if dim is None:
            return _shaped(encoder(["one", "two"]), 2, None)
        try:
            found = encoder(_as_input(encoder, torch.zeros(2, dim)))
        except RuntimeError as error:  # so torch says that shapes do not fit
            raise BadInput(
                f"the encoder failed on two keys of zeros, {dim} wide as those of this database: {error}; give one "
                f"that takes (m, {dim})"
            ) from error
    return _shaped(found, 2, None)


@contextlib.contextmanager
def evaluating(encoder: Encode) -> Iterator[None]:
    """The encoder in eval mode; each of its parts returns to its own mode afterwards."""
    parts = list(encoder.modules()) if isinstance(encoder, torch.nn.Module) else []
    training = [part for part in parts if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _casts() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocast that the calling thread is under."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@dataclass(frozen=True)
class Encoding:
    """An encoder of stored keys, whose output is checked.

    It runs under the autocast that it was made under, the only part of a soft query that does: its output is at least
    float32, and what becomes of that is as precise as the queries.
    """

    encoder: Encode
    dim: int  # d'
    size: int  # records encoded at once
    read: Resolve  # rows -> ids, for messages
    lock: Any = field(default_factory=threading.RLock)  # held while it runs: its mode is that of one thread
    casts: tuple[tuple[str, torch.dtype], ...] = field(default_factory=_casts)
    texts: Callable[[NDArray[np.int64]], list[str]] | None = None  # of rows; None: the stored keys are encoded

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a parameter of the encoder is changed in place, or replaced."""
        parameters = self.encoder.parameters() if isinstance(self.encoder, torch.nn.Module) else ()
        return tuple((id(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in parameters)

    def of(self, keys: Tensor, rows: NDArray[np.int64]) -> Tensor:  # (m, d), (m,) -> (m, d')
        """Encoded keys, in the mode that the encoder is in, with gradient; a message names a record by its row.

        Raises BadInput for what cannot be a key.
        """
        if not len(keys):
            return torch.zeros(0, self.dim)
        with self.lock, contextlib.ExitStack() as stack:
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            encoded = self.encoder(_as_input(self.encoder, keys) if self.texts is None else self.texts(rows))
        _shaped(encoded, len(keys), self.dim)
        encoded = encoded.to(torch.promote_types(encoded.dtype, torch.float32))
        plain = encoded.detach()
        # a sum is finite only where every number is, or where it is too large: then each is looked at
        if not math.isfinite(float(plain.sum())) and not bool(plain.isfinite().all()):
            bad = int(rows[int((~plain.isfinite().all(1)).nonzero()[0])])
            known = self.read(np.array([bad]))
            name = f"id {shown(known[bad].id)}" if known else "an id deleted since"
            raise BadInput(
                f"the encoder gave NaN or infinity for the key of the record with {name}; repair that key or the "
                "encoder (a division by a length of 0, a learning rate too large)"
            )
        return encoded

    @torch.no_grad()
    def found(self, keys: Tensor, rows: NDArray[np.int64]) -> Tensor:  # (m, d), (m,) -> (m, d')
        """As `of`, for finding: `size` at a time, in eval mode and without gradient."""
        with self.lock, evaluating(self.encoder):
            parts = [slice(low, low + self.size) for low in range(0, max(1, len(keys)), self.size)]
            found = [self.of(keys[part], rows[part]) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)


def _like(encoder: Encode) -> Tensor | None:
    """A parameter of the encoder, in whose dtype and on whose device it takes keys; None where it has none."""
    parameters = encoder.parameters() if isinstance(encoder, torch.nn.Module) else iter(())
    return next((parameter for parameter in parameters if parameter.is_floating_point()), None)


def device_of(encoder: Encode) -> torch.device | None:
    """Device of the encoder's parameters; None if it has none."""
    like = _like(encoder)
    return None if like is None else like.device


def copyable(encoder: Encode) -> torch.nn.Module:
    """The encoder, if it is one to copy. Raises BadInput."""
    if not isinstance(encoder, torch.nn.Module):
        raise BadInput(
            f"encoder is {shown(encoder)}, of which no copy can be frozen while training goes on; make it an nn.Module "
            "to reindex in the background, or reindex at once"
        )
    return encoder


def frozen_copy(encoder: Encode) -> Encode:
    """A copy that training does not reach, in eval mode."""
    module = copyable(encoder)
    try:
        return copy.deepcopy(module).eval()
    except (RuntimeError, TypeError) as error:
        raise BadInput(
            f"the encoder cannot be copied, which reindexing in the background needs: {error}; reindex at once, or let "
            "it hold parameters alone (torch.nn.utils.parametrizations.weight_norm in the place of weight_norm)"
        ) from error


def _as_input(encoder: Encode, keys: Tensor) -> Tensor:
    """Keys in the dtype and on the device of the encoder's parameters; float32 where it has none."""
    like = _like(encoder)
    return keys.float() if like is None else keys.to(like.device).to(like.dtype)


def _shaped(encoded: object, count: int, dim: int | None) -> int:
    """The width of what the encoder returned, checked."""
    expected = f"a floating tensor ({count}, {dim or 'any width'})"
    if not isinstance(encoded, Tensor) or not encoded.is_floating_point():
        raise BadInput(f"the encoder returned {shown(encoded)} for {count} keys; expected {expected}")
    fits = encoded.ndim == 2 and len(encoded) == count and encoded.shape[1] > 0
    if not fits or (dim is not None and encoded.shape[1] != dim):
        raise BadInput(
            f"the encoder returned shape {tuple(encoded.shape)} for {count} keys; expected {expected}: one vector for "
            "each key, all as wide as the view"
        )
    return encoded.shape[1]


def unindexed(snapshot: Snapshot, version: Version, allowed: Live | None = None) -> Live:  # (size,) -> (size,)
    """Mask of records that came after a version."""
    keep = snapshot.live.copy() if allowed is None else snapshot.live & allowed
    if snapshot.contiguous:
        keep[: version.indexed_until] = False
    else:
        keep &= snapshot.rows(np.arange(snapshot.size)) >= version.indexed_until
    return keep


@dataclass(frozen=True)
class Encoded(OfGeneration):
    """The records of a database by their encoded keys f(k), whose graph leads to the encoder."""

    encoding: Encoding
    metric: Metric  # of the stale index
    version: Version | None  # None: every record is compared
    overfetch: int  # how many times k candidates are asked of the version, before they are scored anew
    read: Resolve
    stamp: tuple[tuple[int, int], ...]  # of the encoder when this was made
    graph: bool = True  # False: in eval mode, without gradient

    @property
    def width(self) -> int:
        """v."""
        return self.schema.pooled_dim if self.schema.has_values else self.encoding.dim

    @property
    def resolve(self) -> Resolve:
        """Ids and payload texts of rows, as the database reads them."""
        return self.read

    @property
    def encodes(self) -> int:
        """Records encoded at once, where they have a graph."""
        return self.encoding.size if self.graph else 0

    def encoded(self, block: Block) -> Block:
        """The block with encoded keys."""
        encode = self.encoding.of if self.graph else self.encoding.found
        keys = encode(block.keys, self.rows(block.positions.numpy()))
        return Block(block.positions, keys, block.values if self.schema.has_values else keys)

    @cached_property
    def _fixed(self) -> Encoded:
        return replace(self, graph=False)

    def frozen(self) -> Encoded:
        """The same without a graph. Raises StaleRead where the encoder was changed since."""
        if self.encoding.stamp != self.stamp:
            raise StaleRead(
                "the encoder was changed since this answer, whose weights are told by encoding the records again; "
                "explain before the step, or ask again"
            )
        return self._fixed

    def find(self, request: Request) -> Candidates:
        """The k best as the encoder is, of `overfetch` k that the version finds and of all that are younger."""
        request, k = request.detached, min(request.k, self.count)
        version, folded = (None if request.exact else self.version), request.folded
        if version is None or folded is None or folded.metric is not self.metric:
            return Candidates(scan(request, self._fixed), "scan")
        count = min(self.overfetch * k, self.count)
        recent, keep = self._split(request, version)
        fresh = int(np.count_nonzero(recent))
        positions = self.snapshot.positions(version.find(folded.queries, count, keep))
        if fresh:
            more = scan(replace(request, allowed=recent, k=min(count, fresh)), self._fixed)
            positions = np.concatenate([positions, more], axis=1)
        return Candidates(self._best(request, positions, k), "stale index")

    def _split(self, request: Request, version: Version) -> tuple[Live, Live | None]:  # (size,), (n,)
        """Records that came after a version, and those of its vectors that take part; None: all."""
        recent = unindexed(self.snapshot, version, request.allowed)
        whole = request.allowed is None and self.count - int(np.count_nonzero(recent)) == len(version.rows)
        return recent, None if whole else version.alive(self.snapshot, request.allowed)

    def estimate(self, request: Request) -> Pooled:
        """The softmax over all records, from some that the codes of the version draw and the encoder makes anew.

        A record drawn with probability p counts 1 / p times: sums are unbiased whatever the encoder has become. Records
        younger than the version are all encoded. `bar` is NaN: codes of other vectors bound nothing. Exact where that
        encodes no more records, or nothing can be drawn. Raises BadInput as `estimate_drawn`.
        """
        if request.pools:
            require_estimator(request)
        version, folded, tolerance = self.version, request.detached.folded, request.tolerance
        most = 0 if tolerance is None else tolerance.most or 0
        if version is None or folded is None or folded.scale is None or most * len(request.queries) >= self.count:
            return self.exact(request)
        recent, keep = self._split(request, version)
        vectors, factor = prepared(folded.queries.cpu().numpy(), self.metric), float(folded.scale) / request.temperature
        drawn = version.draw(Drawing(vectors, factor, most, request.seed, 1.0), keep) if 1e-30 < factor < 1e30 else None
        return self.exact(request) if drawn is None else self._weighed(request, *drawn, recent)

    def _weighed(self, request: Request, rows: Positions, log_weights: Floats, recent: Live) -> Pooled:
        """The answer by the encoder as it is, with the standard error that the draws (q, w) show."""
        positions = self.snapshot.positions(rows)
        keys, scores = self._fresh(request, positions)
        live = torch.from_numpy(positions >= 0).to(scores.device)
        logs = torch.from_numpy(log_weights).to(scores).masked_fill(~live, 0)
        weights, lse = softmax(scores + logs * request.temperature, request.temperature, live)
        width, candidates = self.width if request.pools else 0, Scored(positions, scores, keys)
        state = State(self.pooled(weights, candidates) if width else weights.new_zeros(len(weights), 0), lse)
        if recent.any():
            state = merge([state, self.stream(replace(request, allowed=recent))])
        with torch.no_grad():
            weights = weights * (lse - state.lse).exp().nan_to_num(0).unsqueeze(1)
            noise = weights.square() * -torch.expm1(-logs)  # (1 - p) w² / p², of the part that was drawn
            values = self.snapshot.values_at(positions) if self.schema.has_values else keys
            if not values.is_floating_point():
                values = torch.nn.functional.one_hot(values.long(), self.width)
            apart = (values.to(noise)[..., :width] - state.output.unsqueeze(1)).square().sum(2)
            errors = (noise * apart).sum(1).sqrt(), noise.sum(1).sqrt()
            unknown, never = torch.full_like(lse, torch.nan), torch.zeros_like(live[:, 0])
            weights, order = weights.topk(min(SHOWN, weights.shape[1]), dim=1)
            named = (
                torch.from_numpy(positions).to(live.device).gather(1, order),
                scores.detach().gather(1, order),
                weights,
            )
            doubt = Doubt(never, torch.zeros_like(lse), Estimated(*state, *errors, unknown, never, *named, live.sum(1)))
        records = Scored(named[0].cpu().numpy(), named[1])
        return answered(request, self, state, "stale index", (records, named[2]), doubt)

    def _best(self, request: Request, positions: Positions, k: int) -> Positions:  # (q, c) -> (q, k)
        """The k best of some candidates by the encoder as it is, ties by row. Each record is encoded once."""
        positions = np.sort(positions, axis=1)  # of unlike engines alike: ties by row, -1 first
        table, places = self._fixed._table(positions, request.queries)
        best = np.empty((len(positions), min(k, positions.shape[1])), np.int64)
        chunk = max(1, GATHERED // max(1, positions.shape[1] * self.encoding.dim))
        for low in range(0, len(positions), chunk):
            part = slice(low, low + chunk)
            scores = scores_of(request.score, request.queries[part], table[torch.from_numpy(places[part])])
            scores = scores.masked_fill(torch.from_numpy(positions[part] < 0).to(scores.device), -torch.inf)
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            best[part] = np.take_along_axis(positions[part], order.cpu().numpy(), 1)
        return np.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Candidates best first by their scores in the encoder's current mode. Each record is encoded once."""
        own, scores = self._fresh(request, positions)
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        there = order.to(own.device).unsqueeze(2).expand_as(own)
        positions = np.take_along_axis(positions, order.cpu().numpy(), 1)
        return Scored(positions, scores.gather(1, order), own.gather(1, there))

    def _fresh(self, request: Request, positions: Positions) -> tuple[Tensor, Tensor]:  # (q, c, d'), (q, c)
        """Encoded keys of candidates, and their scores, -inf for none."""
        table, places = self._table(positions, request.queries)
        own = table[torch.from_numpy(places)]
        none = torch.from_numpy(positions < 0).to(request.queries.device)
        return own, scores_of(request.score, request.queries, own).masked_fill(none, -torch.inf)

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """Stored values or labels, else the encoded keys."""
        if not self.schema.has_values and found.keys is not None:
            return pool(weights, found.keys)
        if not self.snapshot.size:
            return pool(weights, weights.new_zeros(*found.positions.shape, self.width))
        return pool(weights, self.snapshot.values_at(found.positions), self.num_classes)

    def _table(self, positions: Positions, like: Tensor) -> tuple[Tensor, Positions]:  # (u, d'), as positions
        """Encoded keys of the distinct records, zeros for none; and where each position's are."""
        known, places = np.unique(positions, return_inverse=True)
        live = known[known >= 0]
        keys = self.snapshot.keys_at(live) if len(live) else torch.zeros(0, 1)
        block = Block(torch.from_numpy(live), keys, keys)
        table = alike(self.encoded(block).keys, like)
        if len(live) < len(known):
            table = torch.cat([table.new_zeros(1, self.encoding.dim), table])
        return table, places.reshape(positions.shape)
