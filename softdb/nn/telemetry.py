"""Measure the gradients of truncated and estimated soft queries against exact ones, on a sample during training."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softdb import check
from softdb.answers import Pooled, shaped
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn.eager import eager
from softdb.nn.encoded import evaluating
from softdb.nn.targets import database, require_shape
from softdb.nn.view import View
from softdb.scoring import Score, ScoreFunction
from softdb.typing import Vectors
from softdb.visible import table

REPEATS = 3  # number of further estimates, with other draws, for the standard error


class GradientReport(NamedTuple):
    """Errors of soft queries against exact ones; one number for each query."""

    mass: Tensor  # (q,) sum of the exact weights of the candidates; 1 if the soft query was exact
    effective: Tensor  # (q,) exp(entropy) of the exact weights: the number of equal weights with that entropy
    cosine: Tensor  # (q,) between the gradient to the query and the exact gradient; NaN if either is 0
    gradient_error: Tensor  # (q,) ‖ĝ - g‖ / ‖g‖
    gradient_stderr: Tensor  # (q,) standard error of ĝ over other draws, relative to ‖g‖; 0 without draws
    output_error: Tensor  # (q,) ‖ô - o‖ / ‖o‖

    def means(self) -> dict[str, float]:
        """Return the mean of each field over the queries, without NaN."""
        return {name: float(column.nanmean()) for name, column in self._asdict().items()}

    def _repr_html_(self) -> str:
        lines = [[name, f"{mean:.4g}"] for name, mean in self.means().items()]
        return table(["", "mean"], lines, f"queries {self.mass.numel():,}")


@eager
@shaped
def gradient_report(
    db: SoftDB | View,
    queries: Vectors,  # (q, d), or (…, d)
    *,
    temperature: float | Tensor = 1.0,
    score: Score | ScoreFunction | None = None,
    k: int | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    max_draws: int | None = None,
    generator: torch.Generator | None = None,
    where: dict[str, Any] | None = None,
    upstream: Tensor | None = None,  # (q, v), or (…, v)
) -> GradientReport:
    """Compare a soft query, truncated or estimated as in training, and its gradient with the exact ones.

    With u the upstream gradient of the output o: g = ∂(u·o)/∂q is the exact gradient, and ĝ that of the answer with
    `k=`, `rtol=` or draws. The error of a truncated gradient does not average out over steps; the noise of an estimate
    does. `gradient_stderr` measures that noise by 3 further estimates. Cost: the query itself, the further estimates,
    three passes over the records and a search. No `.grad` and no random numbers of torch change.

    Args:
        db: the database, or a `View`, whose encoder is in eval mode during the call.
        queries: (q, d) or (…, d) as in training; their graph is not used.
        temperature, score, k, rtol, atol, max_draws, where: arguments of `attend`, as in training.
        generator: random numbers of the estimates. Do not share it with training, whose draws would change. None: the
            same draws every time.
        upstream: (…, v) gradient of the training loss to the output; None: fixed random directions.

    Raises BadInput as `attend`, and for an upstream of another shape than the output.

    >>> import softdb
    >>> db = softdb.open(None, dim=4)
    >>> ids = db.insert(range(50), torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    >>> report = gradient_report(db, torch.ones(3, 4), k=50)
    >>> report.mass.tolist()
    [1.0, 1.0, 1.0]
    """
    temperature = temperature.detach() if isinstance(temperature, Tensor) else temperature
    ask = db.request if isinstance(db, View) else database(db).core.request
    request, source = ask(queries, temperature, score, where=where)
    vectors = request.vectors.detach()
    shape = (*check.leading(queries, len(vectors)), source.width)
    if upstream is None:
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        upstream = upstream / torch.linalg.vector_norm(upstream, dim=-1, keepdim=True)
    require_shape(upstream, "upstream", shape)
    upstream = upstream.flatten(0, -2)
    heat = check.temperature(temperature, shape[:-1])
    options: dict[str, Any] = {"temperature": heat, "score": score, "where": where}
    exact, true = _differentiated(db, vectors, upstream, options)
    options |= {"k": k, "rtol": rtol, "atol": atol, "max_draws": max_draws}
    used, gradient = _differentiated(db, vectors, upstream, options | {"generator": generator})
    stderr = torch.zeros_like(exact.lse)
    if k is None and not bool(used.exact.all()):
        seeds = torch.randint(1, 1 << 40, (REPEATS,), generator=generator or torch.Generator().manual_seed(1)).tolist()
        others = [options | {"generator": torch.Generator().manual_seed(seed)} for seed in seeds]
        repeated = torch.stack([gradient, *(_differentiated(db, vectors, upstream, other)[1] for other in others)])
        stderr = repeated.var(0).sum(1).sqrt() / torch.linalg.vector_norm(true, dim=1)
    with torch.no_grad():
        mass = torch.ones_like(exact.lse)
        if used.hits is not None:
            positions = source.positions(used.hits.rows.cpu().numpy())
            scores = source.frozen().scored(request.detached, positions).scores
            candidate_mass = (scores / request.temperature - exact.lse.unsqueeze(1)).exp().sum(1).clamp(max=1)
            mass = torch.where(used.exact, mass, candidate_mass)
        effective = mass.new_tensor([explanation.effective for explanation in exact.explain(1)])
        norms = torch.linalg.vector_norm(true, dim=1) * torch.linalg.vector_norm(gradient, dim=1)
        cosine = ((true * gradient).sum(1) / norms).clamp(-1, 1)
        output_error = _relative_error(used.output, exact.output)
        return GradientReport(mass, effective, cosine, _relative_error(gradient, true), stderr, output_error)


class Telemetry:
    """Measures the soft queries of a training loop every `every` steps, and keeps a history.

        telemetry = Telemetry(every=100)
        for batch in batches:
            queries = encoder(batch)
            telemetry(db, queries, temperature=0.05, k=100)  # as in the loss
            ...
        telemetry.history[-1]["cosine"]

    Telemetry draws its own random numbers, so the training results stay the same to the bit. A measured step costs a
    `gradient_report` of `sample` queries, other steps nothing.

    Args:
        every: number of steps from one measurement to the next; the first step is measured.
        sample: number of queries of the batch to measure, drawn at random.
        seed: seed of Telemetry's random numbers.

    Raises BadInput for anything but whole numbers above 0.
    """

    history: list[dict[str, float]]  # of each measurement: step, seconds, queries, and the means of GradientReport

    def __init__(self, every: int = 100, sample: int = 32, seed: int = 0) -> None:
        self.every = check.integer(every, "every")
        self.sample = check.integer(sample, "sample")
        self.steps = 0
        self.history = []
        self._generator = torch.Generator().manual_seed(check.integer(seed, "seed", 0, 2**63 - 1))

    def __call__(
        self,
        db: SoftDB,
        queries: Tensor,  # (q, d), or (…, d)
        *,
        upstream: Tensor | None = None,  # (q, v), or (…, v)
        **words: Any,
    ) -> GradientReport | None:
        """Count a step; every `every` steps measure and return a report, else None. `words`: see `gradient_report`."""
        step, self.steps = self.steps, self.steps + 1
        if step % self.every:
            return None
        if not isinstance(queries, Tensor) or queries.ndim < 2 or not queries.numel():
            came = f"shape {tuple(queries.shape)}" if isinstance(queries, Tensor) else shown(queries)
            raise BadInput(f"queries have {came}; expected the batch of this step, (q, d) or (…, d)")
        start, flat = time.perf_counter(), queries.detach().flatten(0, -2)
        chosen = torch.randperm(len(flat), generator=self._generator)[: self.sample].to(queries.device)
        upstream = None if upstream is None else upstream.to(queries.device).flatten(0, -2)[chosen]
        words = {"generator": self._generator, **words}
        heat = check.temperature(words.get("temperature", 1.0), queries.shape[:-1])
        words["temperature"] = heat.detach()[chosen.to(heat.device)] if isinstance(heat, Tensor) else heat
        report = gradient_report(db, flat[chosen], upstream=upstream, **words)
        seconds = time.perf_counter() - start
        self.history.append({"step": step, "seconds": seconds, "queries": len(chosen), **report.means()})
        return report


@torch.enable_grad()
def _differentiated(
    db: SoftDB | View,
    queries: Tensor,  # (q, d)
    upstream: Tensor,  # (q, v)
    options: dict[str, Any],
) -> tuple[Pooled, Tensor]:  # and (q, d)
    """Return the answer of `db.attend`, and the gradient of Σ upstream · output with respect to the queries."""
    leaf = queries.clone().requires_grad_()
    with evaluating(db.encoder if isinstance(db, View) else torch.nn.Identity()):
        pooled = db.attend(leaf, **options)
        return pooled, torch.autograd.grad(pooled.output, leaf, upstream.detach().to(pooled.output))[0]


def _relative_error(estimate: Tensor, true: Tensor) -> Tensor:  # (q, *), (q, *) -> (q,)
    """Return ‖estimate - true‖ / ‖true‖; 0 where both are equal."""
    error: Tensor = torch.linalg.vector_norm(estimate - true, dim=1)
    relative: Tensor = error / torch.linalg.vector_norm(true, dim=1)
    return relative.masked_fill(error == 0, 0)
