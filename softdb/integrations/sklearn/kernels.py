"""Kernel regression and kernel density estimation, with bandwidths learnt from the samples."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammainc
from sklearn.base import DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from softdb.check import integer, number, one_of, positive, shown
from softdb.errors import BadInput
from softdb.integrations.sklearn.samples import SampleEstimator, TargetEstimator, columns, means, present, rounded
from softdb.nn import KernelRegressor
from softdb.scoring import Boxcar, Epanechnikov, Gaussian, Kernel, Laplacian, Triangular, leave_one_out
from softdb.scoring.distance import Bandwidth

KERNELS: dict[str, type[Kernel]] = {  # by scikit-learn's names
    "gaussian": Gaussian, "tophat": Boxcar, "epanechnikov": Epanechnikov, "exponential": Laplacian,
    "linear": Triangular,
}  # fmt: skip
MAX_SEARCHED = 2048  # largest number of samples in the leave-one-out search for a bandwidth


class NadarayaWatsonRegressor(TargetEstimator):
    """Kernel regression, with one bandwidth or one for each coordinate, learnt by leave-one-out.

        ŷ(x) = Σ_i w_i K(‖(x - x_i) / h‖) y_i / Σ_j w_j K(‖(x - x_j) / h‖)     (Nadaraya 1964, Watson 1964; w_i = 1)

    `fit` finds one h by `softdb.scores.leave_one_out`. Of more than 2,048 samples it uses an evenly spaced subset, and
    then refines h by training through the database (`softdb.nn.KernelRegressor`). With `per_coordinate` this training
    always follows, and gives uninformative coordinates a wide h. The prediction is NaN where a compact kernel reaches
    no sample.

    Args:
        kernel: "gaussian", "exponential", "epanechnikov", "linear" or "tophat".
        bandwidth: h, or one for each coordinate; None: learnt by `fit`.
        per_coordinate: learn an h for each coordinate.
        steps, learning_rate, batch_size, random_state: settings of that training, by Adam.
        path: a new directory for the database; None: in memory.

    Attributes: `bandwidth_` (a number or (d,)), `db_`, `n_samples_fit_`, `n_features_in_`. See
    `SoftKNeighborsClassifier` for precision and float32.

    >>> import numpy as np
    >>> x = np.linspace(0, 3, 31)[:, None]
    >>> NadarayaWatsonRegressor().fit(x, np.sin(x[:, 0])).predict([[1.5]]).round(2)
    array([1.])
    """

    def __init__(
        self,
        kernel: str = "gaussian",
        *,
        bandwidth: Bandwidth | None = None,
        per_coordinate: bool = False,
        steps: int = 50,
        learning_rate: float = 0.1,
        batch_size: int = 256,
        random_state: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.kernel, self.bandwidth, self.per_coordinate = kernel, bandwidth, per_coordinate
        self.steps, self.learning_rate, self.batch_size = steps, learning_rate, batch_size
        self.random_state, self.path = random_state, path

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> NadarayaWatsonRegressor:
        """Insert the samples (n, d) and their targets (n,) or (n, outputs) into a new database; learn the bandwidth.

        With `sample_weight` (n,), the w_i, samples of weight 0 are not inserted, and `leave_one_out` alone finds h.
        Raises BadInput for invalid settings or weights, and if no bandwidth can be learnt: all samples are equal, a
        compact kernel does not reach from each sample to another, or "tophat" or weights with `per_coordinate`.
        """
        kind = KERNELS[one_of(self.kernel, "kernel", KERNELS)]
        h = None if self.bandwidth is None else kind(self.bandwidth).bandwidth
        if self.per_coordinate and kind is Boxcar:
            raise BadInput(
                "kernel 'tophat' has no gradient to train a bandwidth for each coordinate; choose another kernel"
            )
        if self.per_coordinate and h is None and sample_weight is not None:
            raise BadInput("per_coordinate learns no bandwidths with sample_weight; give bandwidth, or leave one out")
        samples, targets = self._pairs(X, y, reset=True, ensure_min_samples=1 if h is not None else 2)
        weights, samples, targets = present(sample_weight, samples, targets)
        if h is not None and h.ndim and len(h) != samples.shape[1]:
            raise BadInput(f"bandwidth has {len(h)} numbers, X {samples.shape[1]} features; give 1, or as many as X")
        values = columns(targets, weights)
        if h is None:
            h = _searched(rounded(samples), targets, kind, weights)
        self._open(samples, values, metric="l2")
        self._weighted = weights is not None
        many = len(samples) > MAX_SEARCHED and kind is not Boxcar and weights is None
        if self.bandwidth is None and (self.per_coordinate or many):
            model = KernelRegressor(self.db_, kind, h, per_coordinate=self.per_coordinate)
            seed = int(check_random_state(self.random_state).randint(1 << 31))
            model.fit(steps=self.steps, lr=self.learning_rate, batch_size=self.batch_size, seed=seed)
            h = model.kernel.bandwidth.detach().double()
        self.bandwidth_ = h.numpy() if h.ndim else float(h)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q,) or (q, outputs)
        """Return the weighted means of the targets; NaN where the kernel reaches no sample."""
        check_is_fitted(self)
        answer = self.db_.attend(self._queries(X), score=KERNELS[self.kernel](torch.as_tensor(self.bandwidth_)))
        predicted = means(answer.output.numpy(), self._weighted)
        predicted[np.isneginf(answer.lse.numpy())] = np.nan
        return self._shaped(predicted)


class KernelDensity(DensityMixin, SampleEstimator):
    """Kernel density estimate over a database, with the results of scikit-learn's KernelDensity.

        p(x) = Σ_i w_i K(‖x - x_i‖ / h) / (Σ_i w_i ∫K)     (Rosenblatt 1956, Parzen 1962)

    Args:
        bandwidth: h; "scott" and "silverman" are scikit-learn's rules, for samples of standard deviation 1;
            "leave_one_out" maximises the likelihood of each sample under the density of all others.
        kernel: "gaussian", "tophat", "epanechnikov", "exponential" or "linear".
        rtol: 0 is exact; otherwise, if that costs less, densities are estimated from a few hundred samples drawn
            through an index, to this relative error in 19 of 20 cases (`SoftDB.log_density`). Gaussian kernel only.
        path: a new directory for the database; None: in memory.

    Attributes: `bandwidth_`, `db_`, `n_samples_fit_`, `n_features_in_`.

    >>> import numpy as np
    >>> KernelDensity(bandwidth=1.0).fit(np.array([[0.0], [1.0]])).score_samples([[0.5]]).round(4)
    array([-1.0439])
    """

    def __init__(
        self,
        *,
        bandwidth: float | str = 1.0,
        kernel: str = "gaussian",
        rtol: float = 0,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.bandwidth, self.kernel, self.rtol, self.path = bandwidth, kernel, rtol, path

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> KernelDensity:
        """Insert the samples (n, d) into a new database, without those of weight 0.

        Raises BadInput for invalid settings, and for weights of another shape, negative, not finite or all 0.
        """
        kind = KERNELS[one_of(self.kernel, "kernel", KERNELS)]
        rtol = number(self.rtol, "rtol", "a number of at least 0", lambda rtol: rtol >= 0)
        if rtol and (sample_weight is not None or kind is not Gaussian):
            raise BadInput("rtol is for the gaussian kernel without sample_weight; leave it at 0")
        samples = self._validated(X, reset=True)
        weights, samples = present(sample_weight, samples)
        values = None if weights is None else columns(samples[:, :0], weights)  # the weights alone
        self._weight = float(len(samples) if weights is None else weights.sum())
        self.bandwidth_ = self._bandwidth(samples, kind, weights)
        self._open(samples, values, metric="l2")
        return self

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:  # (q, d) -> (q,)
        """Return the log density at each query; -inf where a compact kernel reaches no sample."""
        check_is_fitted(self)
        queries, kernel = self._queries(X), KERNELS[self.kernel](self.bandwidth_)
        if self.db_.value_dim is None:
            return self.db_.log_density(queries, kernel, rtol=self.rtol or 0.05).value.double().numpy()
        answer = self.db_.attend(queries, score=kernel)
        with np.errstate(divide="ignore"):
            weight = np.log(means(answer.output.numpy(), False)[:, 0])
        volume = float(kernel.log_volume(queries.shape[1]))
        logs: NDArray[np.float64] = answer.lse.double().numpy() + weight - np.log(self._weight) - volume
        return logs

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Return the total log-likelihood of the queries."""
        return float(self.score_samples(X).sum())

    def sample(self, n_samples: int = 1, random_state: Any = None) -> NDArray[np.float64]:  # (n_samples, d)
        """Draw samples from the density; for a seed they equal scikit-learn's, up to the rounding to float32.

        Raises BadInput for kernels other than "gaussian" and "tophat".
        """
        check_is_fitted(self)
        count = integer(n_samples, "n_samples")
        if self.kernel not in ("gaussian", "tophat"):
            raise BadInput(f"sample: there is no sampling for the kernel {self.kernel!r}; use 'gaussian' or 'tophat'")
        snapshot, _ = self.db_.core.view()
        rng = check_random_state(random_state)
        quantiles = rng.uniform(0, 1, size=count)
        if self.db_.value_dim is None:
            positions = (quantiles * snapshot.size).astype(np.int64)
        else:
            weights = means(snapshot.values_at(np.arange(snapshot.size)).numpy(), False)[:, 0].cumsum()
            positions = np.searchsorted(weights, quantiles * weights[-1])
        centres: NDArray[np.float64] = snapshot.keys_at(positions).double().numpy()
        samples: NDArray[np.float64]
        if self.kernel == "gaussian":
            samples = rng.normal(centres, self.bandwidth_)
            return samples
        normal, d = rng.normal(size=centres.shape), centres.shape[1]
        squares = np.square(normal).sum(axis=1)
        # normal · scale is uniform in the ball of radius h
        scale: NDArray[np.float64] = gammainc(d / 2, squares / 2) ** (1 / d) * self.bandwidth_ / np.sqrt(squares)
        samples = centres + normal * scale[:, None]
        return samples

    def _index(self) -> None:
        """Build the index through which samples are drawn if `rtol` is above 0."""
        if self.rtol:
            self.db_.build_index("ivf")

    def _bandwidth(self, X: NDArray[Any], kind: type[Kernel], weights: NDArray[Any] | None) -> float:
        n, d = X.shape
        if not isinstance(self.bandwidth, str):
            return positive(self.bandwidth, "bandwidth")
        if self.bandwidth == "scott":
            return float(n ** (-1 / (d + 4)))
        if self.bandwidth == "silverman":
            return float((n * (d + 2) / 4) ** (-1 / (d + 4)))
        if self.bandwidth != "leave_one_out":
            expected = "a number above 0, 'scott', 'silverman' or 'leave_one_out'"
            raise BadInput(f"bandwidth is {shown(self.bandwidth)}; expected {expected}")
        return leave_one_out(torch.from_numpy(X), None, kind, sample_weight=weights)


def _searched(X: NDArray[Any], y: NDArray[Any], kind: type[Kernel], weights: NDArray[Any] | None) -> torch.Tensor:  # ()
    """Return the bandwidth with the least leave-one-out error; at most MAX_SEARCHED of the samples are used."""
    n, d = X.shape
    subset = np.unique(np.linspace(0, n - 1, min(n, MAX_SEARCHED), dtype=np.int64))
    shares = None if weights is None else weights[subset]
    h = leave_one_out(torch.from_numpy(X[subset]), torch.from_numpy(y[subset]), kind, sample_weight=shares)
    # the best bandwidth falls with the number of samples as n^(-1 / (d + 4))
    return torch.tensor(h * (len(subset) / n) ** (1 / (d + 4)), dtype=torch.float64)
