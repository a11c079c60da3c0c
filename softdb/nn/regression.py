"""Kernel regression and classification over the records of a database, with a trained bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn.handle import SharedHandle
from softdb.nn.targets import database
from softdb.scoring import Boxcar, Epanechnikov, Gaussian, Kernel, Laplacian, Triangular, silverman
from softdb.scoring.distance import Bandwidth
from softdb.typing import Vectors

KERNELS: dict[str, type[Kernel]] = {
    kernel.__name__.lower(): kernel for kernel in (Gaussian, Laplacian, Epanechnikov, Triangular, Boxcar)
}
MAX_FLOATS = 1 << 25  # largest number of floats in keys and values that `fit` holds in memory, as float64: 256 MB
TILE = 1 << 20  # number of weights computed at once: records in a chunk times all records
NARROW = 1 << 10  # largest squared key length, in bandwidths, for float32: the error of a logit is then about 1e-4


class _NadarayaWatson(torch.nn.Module):
    """The mean of the records' values, weighted by a kernel of the records' distances to the query."""

    labels: ClassVar[bool]  # True: values are labels, predicted as probabilities; False: vectors

    def __init__(
        self,
        db: SoftDB,
        kernel: str | type[Kernel] = "gaussian",
        bandwidth: Bandwidth | None = None,  # h, or (d,)
        *,
        per_coordinate: bool = False,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        schema = database(db).core.schema
        if (schema.num_classes if self.labels else schema.value_dim) is None:
            raise BadInput(
                "the database has no labels as values; open one with num_classes=, or use KernelRegressor for vectors"
                if self.labels
                else "the database has no vectors as values; open one with value_dim=, or use KernelClassifier for "
                "labels"
            )
        if not (isinstance(kernel, type) and kernel in KERNELS.values()):
            kernel = KERNELS[check.one_of(kernel, "kernel", KERNELS)]
        if learnable and kernel is Boxcar:
            raise BadInput(
                "the boxcar kernel has no gradient to its bandwidth; pass learnable=False, with the bandwidth of "
                "softdb.scores.leave_one_out, or use epanechnikov"
            )
        self._handle = SharedHandle(db)
        h = self._bandwidth(bandwidth, per_coordinate)
        if learnable:  # the parameter's dtype is that of the bandwidth if it is a floating tensor, else torch's default
            floating = isinstance(bandwidth, Tensor) and bandwidth.is_floating_point()
            h = h.to(bandwidth.dtype if isinstance(bandwidth, Tensor) and floating else torch.get_default_dtype())
        self.kernel = kernel(h, learnable=learnable)

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._handle.db

    def extra_repr(self) -> str:
        """Return the database's repr."""
        return repr(self.db)

    __call__: Callable[..., Tensor]

    def forward(
        self,
        queries: Vectors,  # (q, d), or (…, d)
        *,
        k: int | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,  # (q, n) or (n,) bool in row order, True = takes part
    ) -> Tensor:  # (q, v), or (…, v)
        """Return the weighted means of the k nearest or of all records; zeros if no record has a weight.

        Arguments and errors are those of `SoftDB.attend`. Differentiable in the queries and the bandwidth.
        """
        return self.db.attend(queries, score=self.kernel, k=k, where=where, mask=mask).output

    def leave_one_out(self, places: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (b,) -> (b, v), (b, v)
        """Predict the values of stored records from all other records, and return predictions and true values.

        A duplicate counts as another record. `places` are the records' int64 indices in row order; None: all.
        Differentiable in the bandwidth: minimise the distance of predictions and true values. Cost b n (d + v), and a
        mask of b n bytes; the database must not change meanwhile. Raises BadInput for an index out of range.
        """
        snapshot, _ = self.db.core.view()  # `scan` would read every payload too
        chosen = torch.arange(snapshot.count) if places is None else _places(places, snapshot.count)
        width = self.db.core.schema.pooled_dim
        if not len(chosen):
            return torch.zeros(0, width), torch.zeros(0, width)
        positions = np.flatnonzero(snapshot.live)[chosen.numpy()]
        others = torch.ones(len(chosen), snapshot.count, dtype=torch.bool)
        others[torch.arange(len(chosen)), chosen] = False
        assert self.kernel.log_bandwidth is not None  # every kernel here has one
        keys = snapshot.keys_at(positions).to(self.kernel.log_bandwidth.device)
        if self.kernel.learnable:
            keys = keys.to(torch.promote_types(keys.dtype, self.kernel.log_bandwidth.dtype))
        predicted = self(keys, mask=others)
        true = snapshot.values_at(positions)
        return predicted, (torch.nn.functional.one_hot(true, width) if self.labels else true).to(predicted)

    def fit(self, *, steps: int = 100, lr: float = 0.1, batch_size: int = 1024, seed: int = 0) -> list[float]:
        """Train the bandwidth with Adam; return the leave-one-out error, mean ‖predicted - true‖², of each step.

        The objective is that of `softdb.scores.leave_one_out`, which searches a single bandwidth and needs all
        distances. This function can also train a bandwidth for each coordinate, on `batch_size` records a step, drawn
        by `seed`. It finds a local minimum: a compact kernel must start so wide that most records reach another one.

        Cost steps · batch_size n (d + v). The Gaussian kernel is several times faster than others if keys and values
        are at most 2^25 numbers, which it keeps in memory. Raises BadInput for settings out of range, fewer than two
        records, and a bandwidth that is not learnt; Closed for a closed database.
        """
        count, width = check.integer(steps, "steps"), check.integer(batch_size, "batch_size")
        lr = check.positive(lr, "lr")
        n, draws = self.db.core.keyed, torch.Generator().manual_seed(check.integer(seed, "seed", low=0))
        if not self.kernel.learnable:
            raise BadInput("fit: the bandwidth is not learnt; make the module with learnable=True")
        if n < 2:
            raise BadInput(f"fit: the database has {n} records; insert at least 2")
        optimiser = torch.optim.Adam(self.parameters(), lr=lr)
        self.db.core.require_open()
        records = self._centred() if isinstance(self.kernel, Gaussian) else None
        errors = []
        for _ in range(count):
            places = torch.arange(n) if width >= n else torch.randperm(n, generator=draws)[:width]
            optimiser.zero_grad()
            with check.precise():
                result = None if records is None else _gaussian_step(*records, places, self.kernel.bandwidth.detach())
            if result is None:
                with torch.enable_grad():
                    predicted, true = self.leave_one_out(places)
                    error = (predicted - true).square().sum(dim=1).mean()
                error.backward()  # type: ignore[no-untyped-call]
                errors.append(error.item())
            else:
                assert self.kernel.log_bandwidth is not None
                self.kernel.log_bandwidth.grad = result[1].to(self.kernel.log_bandwidth)
                errors.append(result[0])
            optimiser.step()
        return errors

    def _centred(self) -> tuple[Tensor, Tensor] | None:  # (n, d), (n, v) float64
        """Return keys and values minus their means (the error stays the same); None for more than MAX_FLOATS floats."""
        (snapshot, _), schema = self.db.core.view(), self.db.core.schema
        if snapshot.count * (schema.dim + schema.pooled_dim) > MAX_FLOATS:
            return None
        assert self.kernel.log_bandwidth is not None
        live, device = np.flatnonzero(snapshot.live), self.kernel.log_bandwidth.device
        keys, values = snapshot.keys_at(live).to(device), snapshot.values_at(live).to(device)
        if self.labels:
            values = torch.nn.functional.one_hot(values.long(), schema.pooled_dim)
        keys, values = keys.double(), values.double()
        return keys - keys.mean(dim=0), values - values.mean(dim=0)

    def _bandwidth(self, bandwidth: Bandwidth | None, per_coordinate: bool) -> Tensor:  # () or (d,) float64
        """Check the given bandwidth and return it; for None compute one by Silverman's rule."""
        (snapshot, _), dim = self.db.core.view(), self.db.core.schema.dim
        if bandwidth is None:
            keys = snapshot.keys_at(np.flatnonzero(snapshot.live)) if snapshot.count else torch.zeros(0, dim)
            return silverman(keys, per_coordinate)
        h = Gaussian(bandwidth).bandwidth  # checked
        if h.ndim and len(h) != dim:
            raise BadInput(f"bandwidth has {len(h)} numbers but keys are {dim} wide; give 1 or {dim} numbers")
        return h.expand(dim) if per_coordinate else h


class KernelRegressor(_NadarayaWatson):
    """Nadaraya–Watson mean over the records of a database, with a trained bandwidth.

        ŷ(x) = Σ_i K(‖(x - k_i) / h‖) v_i / Σ_j K(‖(x - k_j) / h‖)     (Nadaraya 1964, Watson 1964; D2L, section 11.2)

    The keys are the inputs of a record and the values its outputs. The only parameter is `kernel.log_bandwidth`, the
    logarithm of h, one number or (d,). Inserted records count at once. Cost q n (d + v), in one pass.

    Args:
        db: the database, with `value_dim`.
        kernel: "gaussian", "laplacian", "epanechnikov", "triangular", "boxcar", or a class of `softdb.scores`.
        bandwidth: h, one number or (d,); None: Silverman's rule, for which all keys are read once.
        per_coordinate: True: h has a number for each coordinate, from Silverman's rule or equal at first.
        learnable: True: the bandwidth is a parameter.

    Raises BadInput for a database without vectors as values, an unknown kernel, a bandwidth that does not fit, and if
    Silverman's rule does not apply (fewer than two records, or all keys equal).

    >>> import softdb
    >>> db = softdb.open(None, dim=1, value_dim=1)
    >>> x = torch.linspace(0, 3, 31).unsqueeze(1)
    >>> ids = db.insert(range(31), x, x.sin())
    >>> model = KernelRegressor(db)
    >>> errors = model.fit(steps=50)
    >>> errors[-1] < errors[0]
    True
    >>> model([[1.5]]).shape
    torch.Size([1, 1])
    """

    labels = False


class KernelClassifier(_NadarayaWatson):
    """Kernel classification over the records of a database: the Nadaraya–Watson mean of one-hot labels.

        p(c | x) = Σ_i K(‖(x - k_i) / h‖) [y_i = c] / Σ_j K(‖(x - k_j) / h‖)

    These are the probabilities of Bayes' rule under kernel densities of the classes that share h, with the classes'
    shares as prior. `fit` trains the bandwidth by the leave-one-out Brier score, Σ_c (p(c | x_i) - [y_i = c])² (Brier
    1950). Arguments are those of `KernelRegressor`; the database has `num_classes` in place of `value_dim`.

    >>> import softdb
    >>> db = softdb.open(None, dim=1, num_classes=2)
    >>> ids = db.insert([1, 2, 3, 4], [[0.0], [0.1], [1.0], [1.1]], [0, 0, 1, 1])
    >>> KernelClassifier(db, bandwidth=0.2)([[0.0]]).round(decimals=3).tolist()
    [[1.0, 0.0]]
    """

    labels = True


def _gaussian_step(
    keys: Tensor,  # (n, d) float64
    values: Tensor,  # (n, v) float64
    places: Tensor,  # (b,)
    h: Tensor,  # () or (d,)
) -> tuple[float, Tensor] | None:
    """Return the leave-one-out error E of the records at `places` under a Gaussian kernel, and dE / d log h (as h).

    With x = k / h the logits are z_qi = x_q·x_i - ‖x_i‖² / 2, up to a constant for each q. With the weights
    w = softmax(z), the mean o and g = dE/do: dE/dz_qi = w_qi (g·v_i - g·o), dz_qi / d log h_j = x_ij² - 2 x_qj x_ij.
    None if a squared length in bandwidths overflows float64.
    """
    keys = keys / h.double()
    squares = keys.square().sum(dim=1)
    largest = float(squares.max())
    if not math.isfinite(largest):
        return None
    dtype = torch.float32 if largest < NARROW else torch.float64
    keys, values, half = keys.to(dtype), values.to(dtype), (squares / -2).to(dtype)
    error, slope, column = 0.0, keys.new_zeros(keys.shape[1], dtype=torch.float64), torch.zeros_like(half)
    for chunk in places.to(keys.device).split(max(1, TILE // len(keys))):  # type: ignore[no-untyped-call]
        queries = keys[chunk]
        weights = torch.addmm(half, queries, keys.mT)
        weights[torch.arange(len(chunk)), chunk] = -torch.inf
        weights.sub_(weights.amax(dim=1, keepdim=True)).exp_()
        weights.div_(weights.sum(dim=1, keepdim=True))
        mean = weights @ values
        residual = mean - values[chunk]
        error += float(residual.square().sum())
        # slopes is dE/dz divided by 2, because residual is g / 2
        slopes = torch.addmm((residual * mean).sum(dim=1, keepdim=True), residual, values.mT, beta=-1).mul_(weights)
        column += slopes.sum(dim=0)
        slope -= 2 * (queries * (slopes @ keys)).sum(dim=0)
    slope = (slope + column @ keys.square()) * (2 / len(places))
    return error / len(places), slope if h.ndim else slope.sum()


def _places(places: Tensor, count: int) -> Tensor:
    if not isinstance(places, Tensor) or places.ndim != 1 or places.dtype not in (torch.int32, torch.int64):
        raise BadInput(f"places are {shown(places)}; expected a tensor of whole numbers (b,) from 0 to {count - 1}")
    places = places.cpu().long()
    if len(places) and not bool(((places >= 0) & (places < count)).all()):
        raise BadInput(
            f"places reach from {int(places.min())} to {int(places.max())} but there are {count} records; "
            f"expected 0 to {count - 1}"
        )
    return places
