"""The methods `search`, `attend` and other soft queries, which a database and a cluster share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from softdb import check
from softdb.answers import Estimate, Hits, Pooled, Samples, shaped_as
from softdb.attend import Source
from softdb.database.core import Core, SearchArguments
from softdb.errors import BadInput, EmptyDatabase, SoftDBError
from softdb.index.placement import DEVICE_ERRORS
from softdb.misnomers import OwnNames, require_known
from softdb.scoring import Kernel, Score, ScoreFunction, Weighting
from softdb.scoring.once import REFUSAL, transformed
from softdb.typing import IdsPerQuery, Vectors

MAX_SAMPLES = 2**31  # largest number of records that one call of `sample` may draw, over all queries

SearchMode: TypeAlias = Literal["hybrid", "text", "vector"]
Fuse: TypeAlias = Literal["scores", "ranks"] | tuple[Literal["scores"], float] | float | Tensor
P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound="Questions")


def verb(method: Callable[Concatenate[V, P], R]) -> Callable[Concatenate[V, P], R]:
    """Wrap a public method: a closed handle raises Closed, and every error message begins with the method's name."""
    known = inspect.signature(method).parameters
    answers_queries = [*known][1:2] == ["queries"]  # then (…, d) like (q, d)

    @functools.wraps(method)
    def call(self: V, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # a graph cannot hold files, so torch.compile must not trace the verb
            return torch.compiler.disable(call)(self, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        require_known(method.__name__, kwargs, known)
        try:
            self.core.require_open()
            self._warn_if_new(method.__name__, answers_queries)
            try:
                if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                    with check.precise():
                        answer = method(self, *args, **kwargs)
                else:
                    answer = method(self, *args, **kwargs)
            except RuntimeError as error:
                if not transformed(error):
                    raise
                raise BadInput(REFUSAL.format("this call")) from error
            return shaped_as(answer, args[0] if args else kwargs.get("queries")) if answers_queries else answer
        except DEVICE_ERRORS as error:
            raise self.core.device_failed(method.__name__, error) from error
        except SoftDBError as error:
            if not hasattr(error, "verb"):
                error.verb = method.__name__.strip("_")  # type: ignore[attr-defined]
                error.args = (f"{error.verb}: {error.args[0]}", *error.args[1:])  # type: ignore[attr-defined]
            raise

    return call


class Questions(OwnNames):
    """Methods that answer queries, which a database and a cluster share; `core` gives access to the records."""

    core: Core[Source]

    def _warn_if_new(self, verb: str, answers_queries: bool) -> None:
        """Warn if a database that `open` has created is queried before records are inserted; check this once."""
        if self.core.created and (answers_queries or verb in ("insert", "upsert")):
            self.core.created = False
            if answers_queries and not self.core.count(None):
                message = f"{verb}: {self.core.path} holds no records, and is new; check the path"
                warnings.warn(message, EmptyDatabase, stacklevel=3)

    @verb
    def search(
        self,
        queries: Vectors | None = None,
        k: int | None = None,
        *,
        texts: str | Sequence[str] | None = None,
        mode: SearchMode | None = None,
        fusion: Fuse | None = None,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        radius: float | None = None,
        exclude_ids: IdsPerQuery | None = None,
        diversity: float | None = None,
        fetch_k: int | None = None,
        offset: int = 0,
        group_by: str | None = None,
        group_size: int | None = None,
    ) -> Hits:
        """Find the k nearest records of each query, best first: min(k, n) columns, n the number of records with a key.

        If fewer records take part, the remaining columns have row -1 and score -inf.

        Args:
            queries: (q, d) or (…, d) numbers, or q texts if the database has an encoder. A tensor keeps its graph:
                `hits.scores` have gradients. Answers are in the queries' precision; a list is float32.
            k: number of records, default 10; not with `radius`.
            texts, mode, fusion: search by words, or by words and vectors together; see `index_text`.
                Pass q texts. "text": records with the best BM25 scores, as FTS5's `bm25()`, float64, also records
                without a key. "hybrid": the best of `fetch_k` (default 4 k) records by text and as many by vector.
                "vector": embed the texts with the encoder. None: "vector" for queries alone; for texts "hybrid" with
                queries or an encoder, else "text". With mode "text" or "hybrid" the texts may be given as queries.
            fusion: for mode "hybrid". "scores" (the default): 0.8 times the vector's score plus 0.2 times the text's,
                each scaled to 0 … 1 among the candidates; ("scores", 0.5): the same, with 0.5 in place of 0.2 for the
                text and 0.5 for the vector; "ranks": the sum of 1 / (60 + rank), without a gradient; or a weight w, a
                number or a tensor to learn: score + w BM25.
            where: a filter on the payload; see `softdb.filters.grammar`.
            exact: ignore the index and compare all records.
            radius: in place of k, find every record that is near enough, always exactly: for "l2" a largest distance,
                ‖q - k‖ ≤ radius (scores are still -‖q - k‖²); for "dot" and "cosine" a least score, s ≥ radius. The
                answer is as wide as the query with the most hits.
            exclude_ids: ids to leave out, one list for all queries or one for each query; unknown ids are ignored.
            diversity: from 0 (nearest records) to 1 (records unlike each other): choose k of the nearest `fetch_k`
                (default 4 k) by maximal marginal relevance. They come in the order of choosing, with the scores of the
                query. See `softdb.index.diverse`.
            offset: number of best records to skip, for the next page. An index searches farther for a later page, so
                that may show records that were missed before; with `exact` all pages together are one long answer.
            group_by: a field of the payload whose value is a record's group: find the best record of each of the k best
                groups; `offset` counts groups. Records whose field is missing, null, a list or an object have no group
                and are not found. See `softdb.attend.grouped` for the cost.
            group_size: number of best records of each group, default 1, group after group; the answer is as wide as
                the query with the most hits.

        Cost: q n d without an index, or if few records match; with an index, its probes and about 100 exact scores.

        >>> db.search(queries, k=2).ids
        [['amelie', 'alien']]
        >>> hits = db.search(queries, radius=0.8)  # every record with a score of at least 0.8
        >>> hits = db.search(db.get(ids).keys, k=1, exclude_ids=[[i] for i in ids])  # neighbours of stored records
        >>> hits = db.search(queries, k=2, group_by="year")  # the best record of each year

        Raises BadInput for queries or arguments that do not fit, and BadFilter.
        """
        search = SearchArguments(
            queries, k, texts, mode, fusion, where, exact, radius, exclude_ids, diversity, fetch_k, offset, group_by,
            group_size,
        )  # fmt: skip
        return self.core.search(search)

    @verb
    def attend(
        self,
        queries: Any,
        *,
        temperature: float | Tensor = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        k: int | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        need_weights: bool = False,
    ) -> Pooled:
        """Answer the soft query: the mean of the values, weighted by softmax(score / temperature) or another weighting.

            w_i = exp(s(q, k_i) / T) / Σ_j exp(s(q, k_j) / T),  output = Σ_i w_i v_i,  lse = log Σ_j exp(s(q, k_j) / T)

        Without `k` and tolerances the sums are over every record that takes part (exact; cost q n (d + v), memory
        O(block)). With `k=` they are over the k nearest: `exact` is True for a query whose answer is proven to be the
        same, `missed_mass` estimates the weight of all other records. Differentiable in queries and score parameters.

        Args:
            queries: (q, d) numbers or a tensor with its graph, or q texts if the database has an encoder. As wide as
                the keys, unless the score compares other widths. For queries (…, d), such as (b, h, m, d) in a
                transformer, every part of the answer has these leading dimensions in place of q.
            temperature: towards 0 the answer is the nearest record's value, towards infinity the mean of all values. A
                number, or a floating tensor that broadcasts to (q,) or (…), which gets a gradient; learn its logarithm,
                as it must stay above 0. Not for normalised weights.
            score: a `softdb.scores` object or a callable (q, d), (m, d) -> (q, m). None: the database's metric, which
                its index uses. (The default of `softdb.attention` is torch's: score=scores.ScaledDot().)
            weights: "softmax", "sparsemax", "entmax15", "normalised" (a kernel's plain normalisation), "uniform"
                (average pooling), "argmax" (a lookup); None: normalised for a kernel, else softmax.
            k: truncate to the k nearest. A score that no index supports is computed for every record.
            rtol, atol: estimate the answer from records that are drawn through the index, with an error ‖ô - o‖ of at
                most atol + rtol max(‖o‖, 0.1 rms‖v‖). `bar` bounds the error of each answer, `met` is True if the bar
                is within the tolerance. Exact where that costs less, and where no records can be drawn: without an
                index of kind "ivf" made on a CPU, if its metric is not the score's, or with a mask. Raises BadInput for
                weights other than softmax, and for scores that no index supports.
            confidence: share of the answers whose error is at most their `bar`.
            max_draws: draw about this number of records for each query, once, even if the tolerance is not met; `bar`
                is inf where the draws bound no error. A few extreme records are pooled in addition.
            generator: random numbers for the draws; pass one in training. None: every call draws the same numbers.
            where: a filter on the payload.
            mask: bool that broadcasts to (q, n) or (…, n), the n records with a key in row order, True = takes part.
            need_weights: return the weights of an exact answer: `weights` (q, n) of `hits`, all records that take part,
                in row order. Memory q n. With `k` and tolerances the answer always has weights.

        An empty set of records gives zeros and lse = -inf, with gradient zero.

        Raises BadInput for arguments that do not fit, and BadFilter.

        >>> db.attend(queries, temperature=0.1).output.shape
        torch.Size([1, 2])
        """
        others = score, weights, k, max_draws, generator, where, mask
        if rtol is not None and not need_weights and all(other is None for other in others):
            plain = self.core.estimate_plainly(queries, (temperature, rtol, atol, confidence))
            if plain is not None:
                return plain
        tolerance = check.tolerance(rtol, atol, confidence, max_draws, k)
        count = None if k is None else check.integer(k, "k")
        request, source = self.core.request(
            queries, temperature, score, weights, where, mask, k=count, tolerance=tolerance, generator=generator,
            need_weights=need_weights,
        )  # fmt: skip
        if tolerance is not None:
            return source.estimate(request)
        return source.exact(request) if count is None else source.nearest(request)

    @verb
    def log_partition(
        self,
        queries: Any,
        *,
        temperature: float | Tensor = 1.0,
        score: Score | ScoreFunction | None = None,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """Estimate log Z = log Σ exp(score / temperature) over every record, so that |Ẑ / Z - 1| ≤ rtol.

        Z is the normaliser of a softmax; for a kernel see `log_density`. The estimates of Z and its gradient are
        unbiased. `bar` is the error of Ẑ / Z. Arguments as `attend`.

        Raises BadInput for arguments that do not fit, and BadFilter.

        >>> db.log_partition(queries).value.shape
        torch.Size([1])
        """
        tolerance = _tolerance(rtol, 0.0, confidence, max_draws)
        request, source = self.core.request(
            queries, temperature, score, where=where, tolerance=tolerance, generator=generator
        )
        return source.log_partition(request)

    @verb
    def log_density(
        self,
        queries: Any,
        kernel: Kernel,
        *,
        rtol: float = 0.05,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """Kernel density estimate log p(q) = log Σ_i K(q, k_i) - log n - log ∫K (Rosenblatt 1956; Parzen 1962).

        Differentiable in the queries and the bandwidth. -inf if no record takes part, or K is 0 at all records.
        Estimated through the index of an "l2" database for `Gaussian`, else exact; arguments as `log_partition`.

        >>> density = db.log_density(queries, scores.Gaussian(0.3)).value.exp()

        Raises BadInput for a score that is no kernel of `softdb.scores`, and for other arguments that do not fit.
        """
        if not isinstance(kernel, Kernel):
            raise BadInput(f"kernel is {check.shown(kernel)}; expected one of softdb.scores, such as Gaussian(0.3)")
        tolerance = _tolerance(rtol, 0.0, confidence, max_draws)
        request, source = self.core.request(
            queries, score=kernel, where=where, tolerance=tolerance, generator=generator
        )
        estimate = source.log_partition(request)
        volume = kernel.log_volume(request.queries.shape[1])
        shift = source.taking_part(request).clamp(min=1).to(estimate.value).log() + volume
        return dataclasses.replace(estimate, value=estimate.value - shift.to(estimate.value))

    @verb
    def count_within(
        self,
        queries: Any,
        radius: float,
        *,
        rtol: float = 0.05,
        atol: float = 0.0,
        confidence: float = 0.95,
        max_draws: int | None = None,
        generator: torch.Generator | None = None,
        where: dict[str, Any] | None = None,
    ) -> Estimate:
        """Estimate the number of records within a radius of each query: `value` (q,) float64, `bar`, `met`, `exact`.

        A count has no gradient. It is exact where that costs less, for example if there are few records.

        Args:
            radius: for "l2" the largest distance (not the score -distance²); for "dot" and "cosine" the least score.
            rtol, atol: the tolerance; the error is at most atol + rtol max(count, 1).
            confidence, max_draws, generator: as in `attend`.
            queries, where: as in `search`.

        Raises BadInput for a radius or a tolerance that does not fit.

        >>> db.count_within(queries, radius=0.7).value
        tensor([2.], dtype=torch.float64)
        """
        least = check.least_score(radius, self.core.schema.metric)
        tolerance = _tolerance(rtol, atol, confidence, max_draws)
        request, source = self.core.request(queries, where=where, tolerance=tolerance, generator=generator)
        return source.count_within(request.detached, least)

    @verb
    def sample(
        self,
        queries: Any,
        n: int = 1,
        *,
        temperature: float | Tensor = 1.0,
        score: Score | ScoreFunction | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        generator: torch.Generator | None = None,
    ) -> Samples:
        """Draw n records for each query, with replacement, exactly from softmax(score / temperature) over all records.

        `log_prob` carries the gradient for REINFORCE: -(reward * samples.log_prob).mean(). Cost: with an index a scan
        of some of its coarser codes, and exact scores of some records; without an index, or if its codes are too
        coarse, one pass over all keys (`scanned` is then True). If not scanned, reading `log_prob` costs a pass.
        Equations are in docs/error-bars.md. Other arguments as `attend`; without a generator torch's default generator
        draws.

        Raises BadInput for arguments that do not fit, and BadFilter.

        >>> db.sample(queries, 5).hits.rows.shape
        torch.Size([1, 5])
        """
        request, source = self.core.request(queries, temperature, score, where=where, mask=mask)
        count = check.integer(n, "n", 1, MAX_SAMPLES // max(1, len(request.queries)))
        generator = check.generator(generator) or torch.default_generator
        return source.sample(request, count, generator)


def _tolerance(rtol: object, atol: object, confidence: object, max_draws: object) -> check.Tolerance:
    """Check the tolerance of a method that always estimates, and return it. Raises BadInput for rtol None."""
    tolerance = check.tolerance(rtol, atol, confidence, max_draws, None)
    if tolerance is None:
        raise BadInput("rtol is None; expected a number above 0, such as 0.05")
    return tolerance
