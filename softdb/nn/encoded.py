"""Source of encoded keys: candidates come from vectors of an earlier training step, scores from the current encoder."""

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

from softdb.answers import Resolve
from softdb.attend.blocks import scores_of
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.attend.scoring import scan
from softdb.attend.stored import OfGeneration
from softdb.check import Metric, shown
from softdb.errors import BadInput, StaleRead
from softdb.lazy import cached_property
from softdb.nn.stale_index import Version
from softdb.pool import pool
from softdb.scoring.score import alike
from softdb.store import Snapshot
from softdb.store.snapshot import Block

GATHERED = 1 << 24  # largest number of floats in encoded candidates that are gathered at once: 64 MB

Encode = Callable[[Any], Tensor]  # (m, d), or m texts -> (m, d')


def probed(encoder: Encode, dim: int | None) -> int:
    """Return d', the width of the encoder's output, for keys of zeros (2, dim), or for two texts if dim is None."""
    if not callable(encoder):
        raise BadInput(f"encoder is {shown(encoder)}; expected an nn.Module or a callable, (m, d) -> (m, d')")
    with torch.no_grad(), evaluating(encoder):
        if dim is None:
            return _shaped(encoder(["one", "two"]), 2, None)
        try:
            encoded = encoder(_as_input(encoder, torch.zeros(2, dim)))
        except RuntimeError as error:  # torch's error for shapes that do not fit
            raise BadInput(
                f"the encoder failed on two keys of zeros, {dim} wide as those of this database: {error}; give one "
                f"that takes (m, {dim})"
            ) from error
    return _shaped(encoded, 2, None)


@contextlib.contextmanager
def evaluating(encoder: Encode) -> Iterator[None]:
    """Put the encoder into eval mode; afterwards restore the mode of each submodule."""
    modules = list(encoder.modules()) if isinstance(encoder, torch.nn.Module) else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _casts() -> tuple[tuple[str, torch.dtype], ...]:
    """Return (device type, autocast dtype) for each device type with autocast on in the calling thread."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@dataclass(frozen=True)
class Encoding:
    """An encoder of stored keys or texts, whose output is checked.

    In a soft query only the encoder runs under autocast, with the settings of the thread that made this object. The
    encoder's output is converted to at least float32; scores and pooling have the precision of the queries.
    """

    encoder: Encode
    dim: int  # d'
    size: int  # number of records encoded at once
    read: Resolve  # rows -> ids, for messages
    lock: Any = field(default_factory=threading.RLock)  # held during encoding, because threads share the eval mode
    casts: tuple[tuple[str, torch.dtype], ...] = field(default_factory=_casts)
    texts: Callable[[NDArray[np.int64]], list[str]] | None = None  # reads texts of rows; None: stored keys are encoded

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Identity and version of each parameter: differs after a parameter was changed in place, or replaced."""
        parameters = self.encoder.parameters() if isinstance(self.encoder, torch.nn.Module) else ()
        return tuple((id(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in parameters)

    def of(self, keys: Tensor, rows: NDArray[np.int64]) -> Tensor:  # (m, d), (m,) -> (m, d')
        """Encode the keys, or the texts of `rows`, with gradient, in the encoder's current mode.

        Raises BadInput if the encoder returns another shape or dtype, NaN or infinity.
        """
        if not len(keys):
            return torch.zeros(0, self.dim)
        with self.lock, contextlib.ExitStack() as stack:
            for kind, dtype in self.casts:  # torch 2.6 would reuse weights cast without gradient
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=torch.is_grad_enabled()))
            encoded = self.encoder(_as_input(self.encoder, keys) if self.texts is None else self.texts(rows))
        _shaped(encoded, len(keys), self.dim)
        encoded = encoded.to(torch.promote_types(encoded.dtype, torch.float32))
        plain = encoded.detach()
        # the sum is cheap; it can be infinite by overflow alone, so then test each number
        if not math.isfinite(float(plain.sum())) and not bool(plain.isfinite().all()):
            bad = int(rows[int((~plain.isfinite().all(1)).nonzero()[0])])
            records = self.read(np.array([bad]))
            name = f"id {shown(records[bad].id)}" if records else "an id deleted since"
            raise BadInput(
                f"the encoder gave NaN or infinity for the key of the record with {name}; repair that key or the "
                "encoder (a division by a length of 0, a learning rate too large)"
            )
        return encoded

    @torch.no_grad()
    def evaluated(self, keys: Tensor, rows: NDArray[np.int64]) -> Tensor:  # (m, d), (m,) -> (m, d')
        """Encode the keys in eval mode without gradient, `size` at a time."""
        with self.lock, evaluating(self.encoder):
            chunks = [slice(low, low + self.size) for low in range(0, max(1, len(keys)), self.size)]
            blocks = [self.of(keys[chunk], rows[chunk]) for chunk in chunks]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _like(encoder: Encode) -> Tensor | None:
    """Return a floating parameter of the encoder, whose dtype and device the input must have; None without any."""
    parameters = encoder.parameters() if isinstance(encoder, torch.nn.Module) else iter(())
    return next((parameter for parameter in parameters if parameter.is_floating_point()), None)


def device_of(encoder: Encode) -> torch.device | None:
    """Return the device of the encoder's parameters; None if the encoder has no parameters."""
    like = _like(encoder)
    return None if like is None else like.device


def copyable(encoder: Encode) -> torch.nn.Module:
    """Return the encoder. Raises BadInput unless it is an nn.Module, which can be copied."""
    if not isinstance(encoder, torch.nn.Module):
        raise BadInput(
            f"encoder is {shown(encoder)}, which cannot be copied while training goes on; make it an nn.Module, "
            "or do not reindex in the background"
        )
    return encoder


def frozen_copy(encoder: Encode) -> Encode:
    """Return a copy of the encoder, in eval mode, that training does not change. Raises BadInput if copying fails."""
    module = copyable(encoder)
    try:
        return copy.deepcopy(module).eval()
    except (RuntimeError, TypeError) as error:
        raise BadInput(
            f"the encoder cannot be copied, which reindexing in the background needs: {error}; reindex at once, or "
            "keep no computed tensors in it (torch.nn.utils.parametrizations.weight_norm in place of weight_norm)"
        ) from error


def _as_input(encoder: Encode, keys: Tensor) -> Tensor:
    """Move keys to the dtype and device of the encoder's parameters; to float32 if the encoder has no parameters."""
    like = _like(encoder)
    return keys.float() if like is None else keys.to(like.device).to(like.dtype)


def _shaped(encoded: object, count: int, dim: int | None) -> int:
    """Return the width of the encoder's output. Raises BadInput for another shape or dtype."""
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
    """Return the mask of live and allowed records that are newer than a version of the stale index."""
    keep = snapshot.live.copy() if allowed is None else snapshot.live & allowed
    if snapshot.contiguous:
        keep[: version.indexed_until] = False
    else:
        keep &= snapshot.rows(np.arange(snapshot.size)) >= version.indexed_until
    return keep


@dataclass(frozen=True)
class Encoded(OfGeneration):
    """The records of a database with encoded keys f(k), whose gradients reach the encoder."""

    encoding: Encoding
    metric: Metric  # of the stale index
    version: Version | None  # None: every record is compared
    overfetch: int  # number of candidates from the version, as a multiple of k
    read: Resolve
    stamp: tuple[tuple[int, int], ...]  # the encoding's `stamp` when this source was made
    graph: bool = True  # False: in eval mode, without gradient

    @property
    def width(self) -> int:
        """Width v of the values pooled."""
        return self.schema.pooled_dim if self.schema.has_values else self.encoding.dim

    @property
    def resolve(self) -> Resolve:
        """Function that reads ids and payload texts of rows from the database."""
        return self.read

    @property
    def encodes(self) -> int:
        """Number of records encoded at once with a graph; 0 without a graph."""
        return self.encoding.size if self.graph else 0

    def encoded(self, block: Block) -> Block:
        """Return the block with encoded keys in place of the stored keys."""
        encode = self.encoding.of if self.graph else self.encoding.evaluated
        keys = encode(block.keys, self.rows(block.positions.numpy()))
        return Block(block.positions, keys, block.values if self.schema.has_values else keys)

    @cached_property
    def _fixed(self) -> Encoded:
        return replace(self, graph=False)

    def frozen(self) -> Encoded:
        """Return this source without a graph. Raises StaleRead if the encoder has changed since the source was made."""
        if self.encoding.stamp != self.stamp:
            raise StaleRead(
                "the encoder was changed since this answer, and explaining it encodes the records again; explain the "
                "answer before the optimiser's step, or repeat the query"
            )
        return self._fixed

    def find(self, request: Request) -> Candidates:
        """Find the k best by the current encoder, among `overfetch` k candidates and the unindexed records."""
        request, k = request.detached, min(request.k, self.count)
        version, folded = (None if request.exact else self.version), request.folded
        if version is None or folded is None or folded.metric is not self.metric:
            return Candidates(scan(request, self._fixed), "scan")
        count = min(self.overfetch * k, self.count)
        recent, keep = self._split(request, version)
        recent_count = int(np.count_nonzero(recent))
        positions = self.snapshot.positions(version.find(folded.queries, count, keep))
        if recent_count:
            newer = scan(replace(request, allowed=recent, k=min(count, recent_count)), self._fixed)
            positions = np.concatenate([positions, newer], axis=1)
        return Candidates(self._best(request, positions, k), "stale index")

    def _split(self, request: Request, version: Version) -> tuple[Live, Live | None]:  # (size,), (n,)
        """Return the masks of records newer than the version, and of the version's vectors to search (None: all)."""
        recent = unindexed(self.snapshot, version, request.allowed)
        all_live = request.allowed is None and self.count - int(np.count_nonzero(recent)) == len(version.rows)
        return recent, None if all_live else version.alive(self.snapshot, request.allowed)

    def _best(self, request: Request, positions: Positions, k: int) -> Positions:  # (q, c) -> (q, k)
        """Return the k best candidates by the current encoder, ties by row. Each record is encoded once."""
        positions = np.sort(positions, axis=1)  # so that ties go to the lower row with every engine; -1 comes first
        table, places = self._fixed._table(positions, request.queries)
        best = np.empty((len(positions), min(k, positions.shape[1])), np.int64)
        chunk = max(1, GATHERED // max(1, positions.shape[1] * self.encoding.dim))
        for low in range(0, len(positions), chunk):
            own = slice(low, low + chunk)
            scores = scores_of(request.score, request.queries[own], table[torch.from_numpy(places[own])])
            scores = scores.masked_fill(torch.from_numpy(positions[own] < 0).to(scores.device), -torch.inf)
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            best[own] = np.take_along_axis(positions[own], order.cpu().numpy(), 1)
        return np.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Score candidates in the encoder's current mode, best first. Each record is encoded once."""
        keys, scores = self._encoded_scores(request, positions)
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        key_order = order.to(keys.device).unsqueeze(2).expand_as(keys)
        positions = np.take_along_axis(positions, order.cpu().numpy(), 1)
        return Scored(positions, scores.gather(1, order), keys.gather(1, key_order))

    def shared_scores(self, request: Request, positions: Positions) -> Tensor:  # (u,) -> (q, u)
        """Score the same records for every query. Each record is encoded once."""
        table, places = self._table(positions, request.queries)
        return scores_of(request.score, request.queries, table[torch.from_numpy(places)])

    def _encoded_scores(self, request: Request, positions: Positions) -> tuple[Tensor, Tensor]:  # (q, c, d'), (q, c)
        """Encode candidates; return their keys and their scores, with score -inf for position -1."""
        table, places = self._table(positions, request.queries)
        keys = table[torch.from_numpy(places)]
        none = torch.from_numpy(positions < 0).to(request.queries.device)
        return keys, scores_of(request.score, request.queries, keys).masked_fill(none, -torch.inf)

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Pool the stored values or labels; in a database without values, the encoded keys."""
        if not self.schema.has_values and scored.keys is not None:
            return pool(weights, scored.keys)
        if not self.snapshot.size:
            return pool(weights, weights.new_zeros(*scored.positions.shape, self.width))
        return pool(weights, self.snapshot.values_at(scored.positions), self.num_classes)

    def _table(self, positions: Positions, like: Tensor) -> tuple[Tensor, Positions]:  # (u, d'), as positions
        """Encode each distinct record once; return the keys (zeros for -1), and each position's index into them."""
        distinct, places = np.unique(positions, return_inverse=True)
        live = distinct[distinct >= 0]
        keys = self.snapshot.keys_at(live) if len(live) else torch.zeros(0, 1)
        block = Block(torch.from_numpy(live), keys, keys)
        table = alike(self.encoded(block).keys, like)
        if len(live) < len(distinct):
            table = torch.cat([table.new_zeros(1, self.encoding.dim), table])
        return table, places.reshape(positions.shape)
