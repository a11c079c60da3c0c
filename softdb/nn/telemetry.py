"""Accuracy of the gradients of a truncated or estimated soft query: measured on a sample, while training goes on."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softdb import check
from softdb.answers import Pooled
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn.eager import eager
from softdb.nn.targets import database, require_shape
from softdb.scoring import Score, ScoreFunction
from softdb.typing import Vectors

AGAIN = 3  # estimates that a standard error is taken from, besides the one that is judged


class GradientReport(NamedTuple):
    """Errors of a soft query beside the exact one, one entry a query."""

    mass: Tensor  # (q,) share of the exact weight that its candidates hold; 1 where exact
    effective: Tensor  # (q,) exp(entropy) of the exact weights: among how many equal records they are as spread out
    cosine: Tensor  # (q,) between its gradient to the query and the exact one; NaN where one of them is 0
    gradient_error: Tensor  # (q,) ‖ĝ - g‖ / ‖g‖
    gradient_stderr: Tensor  # (q,) standard error of ĝ over other draws, relative to ‖g‖; 0 where nothing is drawn
    output_error: Tensor  # (q,) ‖ô - o‖ / ‖o‖

    def means(self) -> dict[str, float]:
        """The mean of each over the queries, NaN left out."""
        return {name: float(column.nanmean()) for name, column in self._asdict().items()}


@eager
def gradient_report(
    db: SoftDB,
    queries: Vectors,  # (q, d)
    *,
    temperature: float = 1.0,
    score: Score | ScoreFunction | None = None,
    k: int | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    max_draws: int | None = None,
    generator: torch.Generator | None = None,
    where: dict[str, Any] | None = None,
    upstream: Tensor | None = None,  # (q, v)
) -> GradientReport:
    """Compare a soft query that training would use, and its gradient, with the exact one over every record.

    With u the upstream gradient of the output o: g = ∂(u·o)/∂q, exact, and ĝ the same of the answer with `k=` or to
    `rtol=`. The error of a truncated gradient does not average out over steps, as the noise of an estimate does; how
    large that noise is, `gradient_stderr` tells, from AGAIN further estimates by other draws. Cost: the query itself,
    those, three passes over the records and a search. No `.grad` and no random numbers of torch change.

    Args:
        db: the database.
        queries: (q, d) as training asks them; their graph is not used.
        temperature, score, k, rtol, atol, max_draws, where: as `attend` is asked in training.
        generator: of the estimate's draws; give one of its own, or training's draws change. None: the same every time.
        upstream: the gradient of the loss in the output, as training has it; None: the same random directions always.

    Raises BadInput as `attend`, and for an upstream of another shape than the output.

    >>> import softdb
    >>> db = softdb.open(None, dim=4)
    >>> db.insert(range(50), torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    >>> report = gradient_report(db, torch.ones(3, 4), k=50)
    >>> report.mass.tolist()
    [1.0, 1.0, 1.0]
    """
    request, source = database(db).core.request(queries, temperature, score, where=where)
    asked = request.queries.detach()
    shape = (len(asked), source.width)
    if upstream is None:
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        upstream = upstream / torch.linalg.vector_norm(upstream, dim=1, keepdim=True)
    require_shape(upstream, "upstream", shape)
    same: dict[str, Any] = {"temperature": temperature, "score": score, "where": where}
    how = {"k": k, "rtol": rtol, "atol": atol, "max_draws": max_draws, "generator": generator}
    exact, true = _differentiated(db, asked, upstream, same)
    used, found = _differentiated(db, asked, upstream, same | how)
    stderr = torch.zeros_like(exact.lse)
    if rtol is not None:
        seeds = torch.randint(1, 1 << 40, (AGAIN,), generator=generator or torch.Generator().manual_seed(1)).tolist()
        others = [how | {"generator": torch.Generator().manual_seed(seed)} for seed in seeds]
        drawn = torch.stack([found, *(_differentiated(db, asked, upstream, same | other)[1] for other in others)])
        stderr = drawn.var(0).sum(1).sqrt() / torch.linalg.vector_norm(true, dim=1)
    with torch.no_grad():
        mass = torch.ones_like(exact.lse)
        if used.hits is not None:
            positions = source.columns.positions(used.hits.rows.cpu().numpy())
            scores = source.scored(request.detached, positions).scores
            held = (scores / request.temperature - exact.lse.unsqueeze(1)).exp().sum(1).clamp(max=1)
            mass = torch.where(used.exact, mass, held)
        effective = mass.new_tensor([one.effective for one in exact.explain(1)])
        both = torch.linalg.vector_norm(true, dim=1) * torch.linalg.vector_norm(found, dim=1)
        cosine = ((true * found).sum(1) / both).clamp(-1, 1)
        return GradientReport(mass, effective, cosine, _error(found, true), stderr, _error(used.output, exact.output))


class Telemetry:
    """Measures the soft queries of a training loop on every so many steps, and keeps what it found.

        telemetry = Telemetry(every=100)
        for batch in batches:
            queries = encoder(batch)
            telemetry(db, queries, temperature=0.05, k=100)  # as the loss asks
            ...
        telemetry.history[-1]["cosine"]

    It draws its own random numbers: training goes on to the bit as without it. A measured step costs what
    `gradient_report` does of `sample` queries, another one nothing.

    Args:
        every: measures the first of so many steps.
        sample: how many queries of the batch, drawn at random.
        seed: of its random numbers.
    """

    history: list[dict[str, float]]  # step, seconds, queries, and the means of GradientReport; one a measurement

    def __init__(self, every: int = 100, sample: int = 32, seed: int = 0) -> None:
        self.every = check.integer(every, "every")
        self.sample = check.integer(sample, "sample")
        self.steps = 0
        self.history = []
        self._generator = torch.Generator().manual_seed(check.integer(seed, "seed", 0, 2**63 - 1))

    def __call__(
        self,
        db: SoftDB,
        queries: Tensor,  # (q, d)
        *,
        upstream: Tensor | None = None,  # (q, v)
        **words: Any,
    ) -> GradientReport | None:
        """Count a step; measure it where its turn has come, else None. `words` as `gradient_report` takes them."""
        step, self.steps = self.steps, self.steps + 1
        if step % self.every:
            return None
        if not isinstance(queries, Tensor) or queries.ndim != 2 or not len(queries):
            came = f"shape {tuple(queries.shape)}" if isinstance(queries, Tensor) else shown(queries)
            raise BadInput(f"queries have {came}; expected the batch of this step, (q, d)")
        start = time.perf_counter()
        chosen = torch.randperm(len(queries), generator=self._generator)[: self.sample].to(queries.device)
        mine = None if upstream is None else upstream.to(queries.device)[chosen]
        words = {"generator": self._generator, **words}
        report = gradient_report(db, queries.detach()[chosen], upstream=mine, **words)
        seconds = time.perf_counter() - start
        self.history.append({"step": step, "seconds": seconds, "queries": len(chosen), **report.means()})
        return report


@torch.enable_grad()
def _differentiated(
    db: SoftDB,
    queries: Tensor,  # (q, d)
    upstream: Tensor,  # (q, v)
    words: dict[str, Any],
) -> tuple[Pooled, Tensor]:  # and (q, d)
    """The answer, and the gradient of u·o to the queries."""
    leaf = queries.clone().requires_grad_()
    pooled = db.attend(leaf, **words)
    return pooled, torch.autograd.grad(pooled.output, leaf, upstream.detach().to(pooled.output))[0]


def _error(found: Tensor, true: Tensor) -> Tensor:  # (q, *), (q, *) -> (q,)
    """‖found - true‖ / ‖true‖; 0 where both are alike."""
    off: Tensor = torch.linalg.vector_norm(found - true, dim=1)
    relative: Tensor = off / torch.linalg.vector_norm(true, dim=1)
    return relative.masked_fill(off == 0, 0)
