"""Choice of a kernel's bandwidth from data: rules of thumb, and leave-one-out cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from softdb.check import positive, sample_weights, shown
from softdb.errors import BadInput
from softdb.scoring.distance import NegativeL2
from softdb.scoring.kernels import Constant, Gaussian, Kernel

BLOCK = 1 << 17  # number of distances computed at once: 1 MB in float64, which fits in the CPU's cache
MAX_STORED = 1 << 23  # largest number of distances stored, 64 MB; more are computed again for each set of bandwidths
REACH = 1000.0  # bandwidths are searched from h / REACH to h · REACH, where h is Silverman's bandwidth
GRID = 31  # number of bandwidths tried first, each about 1.6 times the one before; usual dips of the loss are wider
GOLDEN = (math.sqrt(5) - 1) / 2
STEPS = 24  # number of golden-section steps; they narrow the interval of log h from two grid steps to 1e-5


def silverman(keys: Tensor, per_coordinate: bool = False) -> Tensor:  # (n, d) -> (), or (d,) float64
    """Silverman's rule of thumb, h_i = σ_i (4 / ((d + 2) n))^(1 / (d + 4)) (Silverman 1986, section 4.3.2).

    The rule is optimal for the density of a normal distribution under the Gaussian kernel, and too wide for data with
    several groups. σ_i is the standard deviation of coordinate i (with divisor n - 1); a single bandwidth uses the mean
    of all σ_i. No gradient. Cost n d. Raises BadInput for fewer than two keys, for NaN or infinity, and if all keys are
    equal (with `per_coordinate`: equal in some coordinate).

    >>> silverman(torch.tensor([[0.0], [1.0], [2.0], [3.0]])).round(decimals=4)
    tensor(1.0363, dtype=torch.float64)
    """
    keys = _table(keys, "keys", "silverman")
    n, d = keys.shape
    return _deviations(keys, per_coordinate, "silverman") * math.pow(4 / ((d + 2) * n), 1 / (d + 4))


def scott(keys: Tensor, per_coordinate: bool = False) -> Tensor:  # (n, d) -> (), or (d,) float64
    """Scott's rule of thumb, h_i = σ_i n^(-1 / (d + 4)) (Scott 1992, equation 6.42). Else as `silverman`."""
    keys = _table(keys, "keys", "scott")
    n, d = keys.shape
    return _deviations(keys, per_coordinate, "scott") * math.pow(n, -1 / (d + 4))


def leave_one_out(
    keys: Tensor,  # (n, d)
    values: Tensor | None = None,  # (n,) or (n, v); class labels as one-hot
    kernel: type[Kernel] = Gaussian,
    bounds: tuple[float, float] | None = None,  # lowest and highest h; None: h / 1000, h · 1000 of Silverman's h
    sample_weight: Any = None,  # (n,)
) -> float:
    """Return the bandwidth under which the other records best predict each record.

    With values, h minimises Σ_i ‖v_i - Σ_j≠i K_ij v_j / Σ_j≠i K_ij‖², the leave-one-out error of the Nadaraya–Watson
    mean (Li and Racine 2007, section 2.2.2, with weights of 1). Without values, h maximises
    Σ_i log(Σ_j≠i K_ij / ((n - 1) V)), the leave-one-out likelihood of the density (Silverman 1986, section 3.4.4),
    where V is the kernel's volume. With sample_weight w, w_j K_ij takes the place of K_ij, and w_i multiplies term i.

    The search tries a grid over log h, then golden sections around the best grid point, so it may miss a dip narrower
    than a grid step. If the optimum lies at a bound (h → ∞ for values that do not depend on the keys), the result is
    near that bound. A compact kernel must reach another record from every record, so a single far record makes h
    large. All coordinates share h: scale them alike first. No gradient. Cost 56 n² + n² d; from 2,897 records on
    26 n² d, as their distances are not stored: pass a sample of some thousand records of a large database.

    Raises BadInput for fewer than two keys, NaN or infinity, keys that are all equal, more or fewer values than keys, a
    kernel without a bandwidth, a lower bound above the upper, bounds so low that a compact kernel reaches no other
    record from some record, and for a density where every key has a duplicate: its likelihood is unbounded as h → 0.
    """
    keys = _table(keys, "keys", "leave_one_out")
    if not (isinstance(kernel, type) and issubclass(kernel, Kernel)) or issubclass(kernel, Constant):
        raise BadInput(f"kernel is {shown(kernel)}; expected a class of softdb.scores with a bandwidth, like Gaussian")
    low, high = _bounds(keys, bounds)
    shares = None if sample_weight is None else torch.from_numpy(sample_weights(sample_weight, len(keys))).to(keys)
    if values is not None:
        values = _table(values, "values", "leave_one_out").to(keys.device)
        if len(values) != len(keys):
            raise BadInput(
                f"leave_one_out: values have shape {tuple(values.shape)} and keys {tuple(keys.shape)}; give one value "
                "for each key"
            )
    elif int(torch.unique(keys, dim=0, return_counts=True)[1].min()) > 1:
        raise BadInput(
            "leave_one_out: every key has a duplicate, so the likelihood of the density grows without end as the "
            "bandwidth shrinks; remove duplicates, or give values"
        )
    keys = keys - keys.mean(dim=0)  # ‖a‖² + ‖b‖² - 2 a·b is most precise for keys around 0
    stored = list(_distances(keys)) if len(keys) ** 2 <= MAX_STORED else None
    return _minimum(lambda hs: _losses(stored or _distances(keys), keys, values, kernel, hs, shares), low, high)


def _table(value: Tensor, name: str, door: str) -> Tensor:
    """Return `value` as finite numbers (n, d) in float64, without gradient. Values (n,) become (n, 1)."""
    try:
        table = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{door}: {name} are {shown(value)}; expected a tensor of numbers") from None
    if table.ndim == 1 and name == "values":
        table = table.unsqueeze(1)
    if table.ndim != 2 or not table.shape[1]:
        expected = "(n,) or (n, v)" if name == "values" else "(n, d); one number a record is keys.unsqueeze(1)"
        raise BadInput(f"{door}: {name} have shape {tuple(table.shape)}; expected {expected}")
    if name == "keys" and len(table) < 2:
        raise BadInput(f"{door}: {len(table)} keys determine no bandwidth; give at least 2")
    table = table.double()
    if not bool(table.isfinite().all()):
        row = int((~table.isfinite().all(dim=1)).nonzero()[0])
        raise BadInput(f"{door}: {name} hold NaN or infinity, first in row {row}; remove or repair it")
    return table


def _deviations(keys: Tensor, per_coordinate: bool, door: str) -> Tensor:  # (n, d) -> (d,) or ()
    """Return the standard deviation of each coordinate, or the mean of these. Raises BadInput if a result is 0."""
    deviations = keys.std(dim=0)  # exactly 0 for equal numbers: torch sums differences from the running mean
    if per_coordinate and bool((deviations == 0).any()):
        raise BadInput(
            f"{door}: coordinate {int((deviations == 0).nonzero()[0])} is the same in all {len(keys)} keys, so it has "
            "no bandwidth; remove that coordinate, or leave out per_coordinate"
        )
    if not bool((deviations > 0).any()):
        raise BadInput(f"{door}: all {len(keys)} keys are equal, which determine no bandwidth; give keys that differ")
    return deviations if per_coordinate else deviations.mean()


def _bounds(keys: Tensor, bounds: tuple[float, float] | None) -> tuple[float, float]:
    deviation, (n, d) = float(_deviations(keys, False, "leave_one_out")), keys.shape
    if bounds is None:
        guess = deviation * math.pow(4 / ((d + 2) * n), 1 / (d + 4))
        return guess / REACH, guess * REACH
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise BadInput(f"bounds are {shown(bounds)}; expected two numbers, the lowest and the highest bandwidth")
    low, high = positive(bounds[0], "the lower bound"), positive(bounds[1], "the upper bound")
    if low >= high:
        raise BadInput(f"bounds are {low} and {high}; the lower must come first")
    return low, high


def _distances(keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # (n, d) -> (m,), (m, n)
    """Yield blocks: the positions of m records, and their squared distances to all n; infinity to the record itself."""
    score = NegativeL2()
    for positions in torch.split(torch.arange(len(keys)), max(1, BLOCK // len(keys))):
        squares = score(keys[positions], keys).neg_()
        squares[torch.arange(len(positions)), positions] = torch.inf  # no record predicts itself
        yield positions, squares


def _losses(
    blocks: Iterable[tuple[Tensor, Tensor]],  # as `_distances` yields them
    keys: Tensor,  # (n, d)
    values: Tensor | None,  # (n, v)
    kernel: type[Kernel],
    hs: list[float],
    shares: Tensor | None,  # (n,) weights of the records
) -> list[float]:
    """Return the loss of each bandwidth; infinity if a compact kernel reaches no other record from some record."""
    kernels, losses = [kernel(h) for h in hs], [0.0] * len(hs)
    for positions, squares in blocks:
        measured = torch.empty_like(squares)
        for i, (h, scaled) in enumerate(zip(hs, kernels, strict=True)):
            if math.isinf(losses[i]):
                continue
            if scaled.rooted:
                torch.sqrt(squares, out=measured).div_(h)
            else:
                torch.div(squares, -(h * h), out=measured)
            logs = scaled.log_value(measured)  # (m, n)
            logs = logs if shares is None else logs + shares.log()
            top = logs.amax(dim=1, keepdim=True)
            if not bool(top.isfinite().all()):
                losses[i] = math.inf
                continue
            weights = logs.sub_(top).exp_()
            total = weights.sum(dim=1, keepdim=True)
            terms = -total.log() - top if values is None else (weights @ values / total - values[positions]).square()
            losses[i] += float((terms if shares is None else terms * shares[positions, None]).sum())
    if values is not None:
        return losses
    volumes = [float(scaled.log_volume(keys.shape[1])) for scaled in kernels]
    count = len(keys) if shares is None else float(shares.sum())
    return [loss + count * volume for loss, volume in zip(losses, volumes, strict=True)]


def _minimum(losses: Callable[[list[float]], list[float]], low: float, high: float) -> float:
    """Return the h with the least loss from `low` to `high`: by a grid over log h, then by golden sections."""
    grid: list[float] = torch.linspace(math.log(low), math.log(high), GRID, dtype=torch.float64).tolist()
    tried = dict(zip(grid, losses([math.exp(x) for x in grid]), strict=True))
    if all(math.isinf(loss) for loss in tried.values()):
        raise BadInput(
            f"leave_one_out: no bandwidth from {low:g} to {high:g} reaches from every record to another; raise the "
            "upper bound, or use a kernel that is not compact"
        )

    def loss(x: float) -> float:
        if x not in tried:
            tried[x] = losses([math.exp(x)])[0]
        return tried[x]

    best = grid.index(min(tried, key=lambda x: tried[x]))
    lower, upper = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    for _ in range(STEPS):
        first, second = upper - GOLDEN * (upper - lower), lower + GOLDEN * (upper - lower)
        # both losses are infinite if h is too small for a compact kernel to reach other records: then try larger h
        lower, upper = (lower, second) if loss(first) < loss(second) else (first, upper)
    return math.exp(min(tried, key=lambda x: (tried[x], -x)))
