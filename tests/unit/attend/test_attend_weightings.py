"""Every weighting and score against dense weights over all records; certificates and explanations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import stored
from torch import Tensor
from worlds import holding

import softdb
from softdb import SoftDB, scores
from softdb.attend import Request
from softdb.attend import exact as whole
from softdb.attend.scoring import scan
from softdb.store import Snapshot
from softdb.weights import Entmax15, Sparsemax, Weighed, weighting

Array = np.ndarray
N, D, V = 300, 6, 4
WEIGHTINGS = ["softmax", "sparsemax", "entmax15", "uniform", "argmax"]
KERNELS = [
    scores.Gaussian(0.8), scores.Laplacian(0.5), scores.Boxcar(2.2), scores.Epanechnikov(2.5), scores.Triangular(2.5),
    scores.Constant(),
]  # fmt: skip


def every_score() -> dict[str, Any]:
    torch.manual_seed(0)
    general = scores.General(D, D)
    torch.nn.init.normal_(general.weight)
    return {
        "dot": scores.Dot(),
        "scaled dot": scores.ScaledDot(),
        "cosine": scores.Cosine(),
        "l2": scores.NegativeL2(0.7),
        "l2 per coordinate": scores.NegativeL2([0.5, 1, 2, 1, 1, 3]),
        "general": general,
        "additive": scores.Additive(D, D, 8),
        "linear additive": scores.LinearAdditive(D, D),
        "callable": lambda queries, keys: queries @ keys.to(queries.dtype).mT / 2,
    }


SCORES = every_score()


@pytest.fixture
def records(rng: np.random.Generator) -> tuple[Array, Array]:
    keys = rng.standard_normal((N, D)).astype(np.float32)
    keys[5] = keys[9]
    keys[7] = 0
    return keys, rng.standard_normal((N, V)).astype(np.float32)


@pytest.fixture
def db(records: tuple[Array, Array]) -> SoftDB:
    return holding(*records, payloads=[{"even": i % 2 == 0} for i in range(N)])


@pytest.fixture
def queries(rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal((5, D)))


def dense(
    records: tuple[Array, Array], queries: Tensor, score: Any, by: str, temperature: float, part: Array | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and weights (q, n) with the weights of all records held at once."""
    keys, values = (torch.from_numpy(column).to(queries.dtype) for column in records)
    live = torch.ones(len(queries), N, dtype=torch.bool) if part is None else torch.from_numpy(part)
    weights, lse, _ = weighting(by).weigh(score(queries, keys), temperature, live)
    return weights @ values, lse, weights


def close(found: Any, expected: tuple[Tensor, ...], atol: float = 1e-9) -> None:
    torch.testing.assert_close(found.output, expected[0], rtol=0, atol=atol)
    torch.testing.assert_close(found.lse, expected[1], rtol=1e-9, atol=atol)


@pytest.mark.parametrize("by", WEIGHTINGS)
@pytest.mark.parametrize("name", SCORES)
def test_every_score_and_weighting_is_exact_over_all(
    name: str, by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    leaf = queries.requires_grad_()
    actual = db.attend(leaf, score=SCORES[name], weights=by, temperature=0.7)
    expected = dense(records, leaf, SCORES[name], by, 0.7)
    close(actual, expected)
    assert actual.exact.all()
    assert actual.missed_mass.tolist() == [0] * 5
    losses = [output.sin().sum() + lse.sum() for output, lse in ((actual.output, actual.lse), expected[:2])]
    grads = [torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)[0] for loss in losses]
    grads = [torch.zeros_like(leaf) if grad is None else grad for grad in grads]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
def test_kernels_are_normalised_by_default(
    kernel: scores.Kernel, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    queries = torch.cat([queries, 50 + queries[:1]])  # far from all
    actual = db.attend(queries, score=kernel)
    expected = dense(records, queries, kernel, "normalised", 1.0)
    torch.testing.assert_close(actual.output[:5], expected[0][:5], rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.lse[:5], expected[1][:5])
    close(db.attend(queries[:5], score=kernel, weights="normalised"), tuple(one[:5] for one in expected))
    if kernel.compact:
        assert actual.output[5].tolist() == [0] * V  # nothing in the support
        assert actual.lse[5] == -math.inf
    else:  # where every K underflows the answer is still the nearest
        assert torch.isfinite(actual.lse[5])
        assert actual.output[5].abs().sum() > 0


def test_any_nonnegative_score_can_be_normalised(db: SoftDB, records: tuple[Array, Array], queries: Tensor) -> None:
    def inverse(queries: Tensor, keys: Tensor) -> Tensor:
        actual: Tensor = 1 / (1 - scores.NegativeL2()(queries, keys))
        return actual

    close(db.attend(queries, score=inverse, weights="normalized"), dense(records, queries, inverse, "normalised", 1.0))
    with pytest.raises(softdb.BadInput, match=r"a score is -.*at least 0: use softmax"):
        db.attend(queries, weights="normalised")
    with pytest.raises(softdb.BadInput, match=r"temperature is 2.*normalised weights have none"):
        db.attend(queries, score=scores.Gaussian(), temperature=2)


@pytest.mark.parametrize("by", WEIGHTINGS)
def test_filters_masks_and_deletions_hold_for_every_weighting(
    by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor, rng: np.random.Generator
) -> None:
    db.delete([0, 1, 2, 3])
    mask = rng.random((5, N - 4)) < 0.5
    mask[4] = False
    part = np.zeros((5, N), np.bool_)
    part[:, 4:] = mask
    part[:, 1::2] = False
    actual = db.attend(queries, weights=by, where={"even": True}, mask=mask, temperature=0.3)
    close(actual, dense(records, queries, scores.Dot(), by, 0.3, part))
    assert actual.output[4].tolist() == [0] * V
    assert actual.lse[4] == -math.inf
    truncated = db.attend(queries, weights=by, where={"even": True}, mask=mask, temperature=0.3, k=N)
    close(truncated, dense(records, queries, scores.Dot(), by, 0.3, part))
    assert truncated.exact.all()


@pytest.mark.parametrize("by", WEIGHTINGS)
def test_an_empty_database_gives_zeros(by: str) -> None:
    queries = torch.ones(2, D, requires_grad=True)
    for k in (None, 3):
        actual = softdb.open(None, dim=D, value_dim=V).attend(queries, weights=by, k=k)
        assert actual.output.tolist() == [[0] * V] * 2
        assert actual.lse.tolist() == [-math.inf] * 2
        assert actual.exact.all()


# -- certificates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["sparsemax", "entmax15"])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_enough_candidates_prove_the_answer_over_all(
    temperature: float, by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    _, _, weights = expected = dense(records, queries, scores.Dot(), by, temperature)
    support = int((weights > 0).sum(1).max())
    enough = db.attend(queries, weights=by, temperature=temperature, k=min(N, support + 1))
    assert enough.exact.all()
    close(enough, expected)
    few = db.attend(queries, weights=by, temperature=temperature, k=max(1, int((weights > 0).sum(1).min()) - 1))
    short = (weights > 0).sum(1) > few.n_pooled
    assert not few.exact[short].any()  # never claimed where it is not so
    assert few.missed_mass[~few.exact].isnan().all()


@pytest.mark.parametrize("by", ["sparsemax", "entmax15"])
def test_candidates_grow_until_the_proof_or_give_way_to_passes(
    by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "FIRST", 2)
    monkeypatch.setattr(whole, "GROWTH", 2)
    for temperature in (0.2, 1.0, 100.0):
        expected = dense(records, queries, scores.Dot(), by, temperature)
        grown = db.attend(queries, weights=by, temperature=temperature)
        close(grown, expected)
        assert grown.finder == "flat"
        assert grown.weights is not None
        assert (grown.weights > 0).sum(1).tolist() == (expected[2] > 0).sum(1).tolist()
        monkeypatch.setattr(whole, "MOST", 1)
        passes = db.attend(queries, weights=by, temperature=temperature)
        close(passes, expected)
        assert passes.finder == "all"
        assert passes.exact.all()
        monkeypatch.setattr(whole, "MOST", 1000)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.compact], ids=lambda k: type(k).__name__)
def test_a_record_outside_a_compact_kernel_proves_the_answer(
    kernel: scores.Kernel, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    expected = dense(records, queries, kernel, "normalised", 1.0)
    inside = (expected[2] > 0).sum(1)
    actual = db.attend(queries, score=kernel, k=int(inside.max()) + 1)
    assert actual.exact.all()
    close(actual, expected)
    few = db.attend(queries, score=kernel, k=max(1, int(inside.max()) - 1))
    assert not few.exact[inside > few.n_pooled].any()
    assert actual.hits is not None
    assert actual.hits.scores.max() <= 1  # kernel values, not their logarithms
    assert actual.hits.scores.min() >= 0


@pytest.mark.slow
def test_an_approximate_finder_gives_no_certificate(rng: np.random.Generator) -> None:
    pytest.importorskip("faiss", reason="an index needs FAISS")
    db = holding(rng.standard_normal((6000, 8)).astype(np.float32))
    queries = rng.standard_normal((4, 8))
    before = db.attend(queries, weights="sparsemax", temperature=0.1, k=50)
    assert before.finder == "flat"
    assert before.exact.all()
    db.build_index("hnsw", recall=0.9)
    after = db.attend(queries, weights="sparsemax", temperature=0.1, k=50)
    assert after.finder == "hnsw"
    assert not after.exact.any()
    assert db.attend(
        queries, weights="sparsemax", temperature=0.1
    ).exact.all()  # all records: no approximate finder is used
    # the index holds dot products: another metric is compared exactly, and says so
    assert db.attend(queries, score=scores.NegativeL2(), k=50).finder == "flat"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_argmax_is_a_lookup_and_ties_go_to_the_lower_row(db: SoftDB, records: tuple[Array, Array]) -> None:
    keys, values = records
    exactly = db.attend(torch.from_numpy(keys[[9, 20]]), weights="argmax", score=scores.NegativeL2())
    np.testing.assert_array_equal(exactly.output, values[[5, 20]])  # 5 and 9 tie
    assert exactly.hits is not None
    assert exactly.hits.ids == [[5], [20]]
    assert exactly.exact.all()


@pytest.mark.parametrize("by", ["softmax", "sparsemax", "entmax15"])
def test_temperature_leads_from_the_nearest_to_the_mean(
    by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    nearest = db.search(queries, k=1).rows[:, 0]
    np.testing.assert_allclose(db.attend(queries, weights=by, temperature=1e-9).output, records[1][nearest], rtol=1e-6)
    mean = np.tile(records[1].mean(0), (5, 1))
    np.testing.assert_allclose(db.attend(queries, weights=by, temperature=1e9).output, mean, atol=1e-6)
    np.testing.assert_allclose(db.attend(queries, weights="uniform").output, mean, atol=1e-6)


@pytest.mark.parametrize("by", WEIGHTINGS)
def test_the_answer_lies_among_the_values(by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor) -> None:
    output = db.attend(queries.float(), weights=by, temperature=0.5).output.numpy()
    assert (output >= records[1].min(0) - 1e-6).all()
    assert (output <= records[1].max(0) + 1e-6).all()


@pytest.mark.parametrize("by", WEIGHTINGS)
def test_the_order_of_the_records_changes_nothing(
    by: str, db: SoftDB, records: tuple[Array, Array], queries: Tensor, rng: np.random.Generator
) -> None:
    order = rng.permutation(N)
    other = holding(records[0][order], records[1][order], ids=order)
    close(
        other.attend(queries, weights=by), (db.attend(queries, weights=by).output, db.attend(queries, weights=by).lse)
    )


def test_labels_are_pooled_by_every_weighting(rng: np.random.Generator, records: tuple[Array, Array]) -> None:
    labels = rng.integers(0, 3, N)
    db = holding(records[0], labels, num_classes=3)
    queries = torch.from_numpy(rng.standard_normal((4, D)))
    one_hot = np.eye(3, dtype=np.float32)[labels]
    for by in WEIGHTINGS:
        for temperature in (0.5, 50.0):
            actual = db.attend(queries, weights=by, temperature=temperature)
            close(actual, dense((records[0], one_hot), queries, scores.Dot(), by, temperature))
            torch.testing.assert_close(actual.output.sum(1), torch.ones(4, dtype=torch.float64))


# -- scores that learn, and scores of another width --------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 20])
@pytest.mark.parametrize("name", ["general", "additive", "linear additive"])
def test_parameters_of_a_score_learn_through_the_database(
    name: str, k: int | None, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    module = SCORES[name]
    parameters = tuple(module.parameters())
    actual = db.attend(queries, score=module, k=k)
    part = None
    if actual.hits is not None:
        part = np.zeros((5, N), np.bool_)
        np.put_along_axis(part, actual.hits.rows.numpy(), True, 1)
    output, lse, _ = dense(records, queries, module, "softmax", 1.0, part)
    grads = [
        torch.autograd.grad(o.sin().sum() + s.sum(), parameters)
        for o, s in ((actual.output, actual.lse), (output, lse))
    ]
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)


def test_a_learnt_bandwidth_gets_its_gradient(db: SoftDB, records: tuple[Array, Array], queries: Tensor) -> None:
    for kind in (scores.NegativeL2, scores.Gaussian, scores.Laplacian, scores.Epanechnikov):
        kernel = kind(torch.tensor(2.0, dtype=torch.float64), learnable=True)
        by = "normalised" if isinstance(kernel, scores.Kernel) else "softmax"
        expected = dense(records, queries, kernel, by, 1.0)
        grads = [
            torch.autograd.grad(output.sin().sum(), tuple(kernel.parameters()))[0]
            for output in (
                expected[0],
                db.attend(queries, score=kernel).output,
                db.attend(queries, score=kernel, k=N).output,
            )
        ]
        for grad in grads[1:]:
            torch.testing.assert_close(grad, grads[0], rtol=1e-6, atol=1e-9)


def test_queries_may_be_of_another_width(db: SoftDB, rng: np.random.Generator) -> None:
    queries = torch.from_numpy(rng.standard_normal((3, 2)))
    for score in (scores.Additive(2, D, 4), scores.General(2, D), scores.LinearAdditive(2, D)):
        assert db.attend(queries, score=score).output.shape == (3, V)
        assert db.attend(queries, score=score, k=4).output.shape == (3, V)
        with pytest.raises(softdb.BadInput, match="queries are 6 wide"):
            db.attend(torch.ones(1, D), score=score)


def test_a_score_without_an_index_form_is_scanned_for(
    db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    for name in ("additive", "callable", "l2 per coordinate"):
        actual = db.attend(queries, score=SCORES[name], k=7)
        assert actual.finder == "scan"
        table = SCORES[name](queries, torch.from_numpy(records[0]).double()).detach().numpy()
        assert actual.hits is not None
        np.testing.assert_array_equal(actual.hits.rows, np.argsort(-table, axis=1, kind="stable")[:, :7])


def test_a_score_that_misbehaves_is_named(db: SoftDB, queries: Tensor) -> None:
    for k in (None, 3):
        with pytest.raises(softdb.BadInput, match="returned NaN"):
            db.attend(queries, score=lambda q, k: q @ k.mT * math.nan, k=k)
        with pytest.raises(softdb.BadInput, match=r"returned shape \(5, 1\)"):
            db.attend(queries, score=lambda q, k: q[:, :1], k=k)
    with pytest.raises(softdb.BadInput, match="weights"):
        db.attend(queries, weights="softest")


class Halved:
    """A weighting of one's own."""

    name, sparse = "halved", False

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        weights, lse, threshold = weighting("softmax").weigh(scores, temperature, live)
        return Weighed(weights / 2, lse, threshold)


def test_a_weighting_of_ones_own_needs_candidates(db: SoftDB, queries: Tensor) -> None:
    actual = db.attend(queries, weights=Halved(), k=10)
    torch.testing.assert_close(actual.output, db.attend(queries, k=10).output / 2)
    with pytest.raises(softdb.BadInput, match=r"needs all scores at once.*pass k="):
        db.attend(queries, weights=Halved())


def test_scanning_breaks_ties_by_row(rng: np.random.Generator) -> None:
    from worlds import snapshot

    keys = rng.integers(0, 3, (200, 1)).astype(np.float32)
    request = Request.of(torch.ones(2, 1), scores.Dot())
    actual = scan(request.top(90), stored(snapshot(keys, cuts=[70])))
    np.testing.assert_array_equal(actual[0], np.argsort(-keys[:, 0], kind="stable")[:90])
    short = scan(request.top(4), stored(snapshot(keys[:5], live=[True, False, True, True, False])))
    assert short.shape == (2, 3)  # there are no more
    assert set(short[0]) == {0, 2, 3}


# -- explanations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 40])
@pytest.mark.parametrize("by", WEIGHTINGS)
def test_an_explanation_names_the_heaviest_records(
    by: str, k: int | None, db: SoftDB, records: tuple[Array, Array], queries: Tensor
) -> None:
    pooled = db.attend(queries, weights=by, temperature=0.8, k=k)
    part = None
    if k is not None:
        assert pooled.hits is not None
        part = np.zeros((5, N), np.bool_)
        np.put_along_axis(part, pooled.hits.rows.numpy(), True, 1)
    _, _, weights = dense(records, queries, scores.Dot(), by, 0.8, part)
    share = 1 - pooled.missed_mass.nan_to_num(0)
    for i, explanation in enumerate(pooled.explain(3)):
        best = weights[i].sort(descending=True, stable=True)
        kept = min(3, int((weights[i] > 0).sum()))
        torch.testing.assert_close(
            torch.tensor(explanation.weights, dtype=torch.float64), best.values[:kept] * share[i], rtol=1e-6, atol=1e-9
        )
        if by != "uniform":
            assert explanation.ids == best.indices[:kept].tolist()
        assert explanation.payloads == [{"even": name % 2 == 0} for name in explanation.ids]
        assert explanation.mass == pytest.approx(float(best.values[:kept].sum() * share[i]))
        entropy = -torch.special.xlogy(weights[i], weights[i]).sum()
        assert explanation.effective == pytest.approx(float(entropy.exp()), rel=1e-6)
        assert f"{explanation.weights[0]:.2%}" in str(explanation)
        assert "effectively" in str(explanation)


def test_an_explanation_without_records_is_empty(db: SoftDB) -> None:
    (one,) = db.attend(torch.ones(1, D), where={"missing": 1}).explain()
    assert (one.ids, one.mass, one.effective) == ([], 0, 0)
    with pytest.raises(softdb.BadInput, match="k is 0"):
        db.attend(torch.ones(1, D)).explain(0)


def test_an_explanation_after_a_deletion_raises_stale_read(db: SoftDB, queries: Tensor) -> None:
    pooled = db.attend(queries, weights="argmax")
    assert pooled.hits is not None
    db.delete([int(pooled.hits.rows[0, 0])])
    with pytest.raises(softdb.StaleRead, match="search again"):
        pooled.explain()


# -- at scale ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [Sparsemax(), Entmax15()], ids=lambda b: b.name)
def test_sparse_weightings_are_exact_on_disk(by: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    keys = rng.standard_normal((20_000, 16)).astype(np.float32)
    with softdb.open(tmp_path / "db", dim=16) as db:
        for low in range(0, 20_000, 5000):
            db.insert(range(low, low + 5000), keys[low : low + 5000])
        queries = torch.from_numpy(rng.standard_normal((8, 16)))
        table = queries @ torch.from_numpy(keys).double().T
        for temperature in (0.5, 20.0):
            actual = db.attend(queries, weights=by, temperature=temperature)
            weights, lse, _ = by.weigh(table, temperature, torch.ones_like(table, dtype=torch.bool))
            close(actual, (weights @ torch.from_numpy(keys).double(), lse))
            assert actual.exact.all()


# -- ties and deleted records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize(
    "kernel", [scores.Boxcar(2.0), scores.Epanechnikov(0.1), scores.Triangular(0.1), scores.Constant()]
)
def test_argmax_breaks_ties_of_a_score_by_row(kernel: Any, k: int | None) -> None:
    """An index orders by distance, more finely than a kernel that is flat, or 0 outside its support."""
    keys, values = np.array([[1.0], [0.5], [0.4], [1.5]], np.float32), np.arange(4.0)[:, None]
    with holding(keys, values, metric="l2") as db:
        query = torch.zeros(1, 1)
        answer = db.attend(query, score=kernel, weights="argmax", k=k)
        tensors = softdb.attention(
            query, torch.from_numpy(keys), torch.from_numpy(values), score=kernel, weights="argmax"
        )
        assert answer.output.item() == tensors.item() == 0  # the first of those that score alike


def test_a_query_does_not_walk_over_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(np.ones((500, 2))) as db:
        db.upsert(range(500), np.ones((500, 2)))  # every record was replaced once
        visited: list[tuple[int, int]] = []
        blocks = Snapshot.blocks

        def seen(self: Snapshot, size: int, allowed: Any = None, start: int = 0) -> Any:
            visited.append((size, start))
            return blocks(self, size, allowed, start)

        monkeypatch.setattr(Snapshot, "blocks", seen)
        db.attend(torch.ones(1, 2), score=lambda q, k: q @ k.T)
        assert visited[0] == (1, 500)  # where the first live record stands


def test_all_weights_of_an_exact_answer_on_request(db: SoftDB, queries: Tensor) -> None:
    for by in WEIGHTINGS:
        plain, dense = (db.attend(queries, weights=by, need_weights=need) for need in (False, True))
        torch.testing.assert_close(dense.output, plain.output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dense.lse, plain.lse, rtol=1e-4, atol=1e-5)
        assert dense.weights is not None
        assert dense.hits is not None
        assert dense.weights.shape == dense.hits.rows.shape == (len(queries), N)
        assert bool((dense.hits.rows.diff(dim=1) > 0).all())  # in row order
        assert dense.exact.all()
        torch.testing.assert_close(dense.weights.sum(1), torch.ones(len(queries)).to(dense.weights))
    where = db.attend(queries, where={"even": True}, need_weights=True)
    assert where.weights is not None
    assert where.weights.shape == (len(queries), N // 2)


def test_all_weights_carry_gradients_and_heed_a_mask(db: SoftDB, queries: Tensor) -> None:
    mask = torch.zeros(len(queries), N, dtype=torch.bool)
    mask[:, :4] = True
    mask[0] = False
    asked = queries.clone().requires_grad_()
    pooled = db.attend(asked, mask=mask, need_weights=True)
    expected = db.attend(asked, mask=mask)
    assert pooled.weights is not None
    assert int((pooled.weights > 0).sum()) == 4 * (len(queries) - 1)
    actual, plain = (torch.autograd.grad(one.output.square().sum(), asked)[0] for one in (pooled, expected))
    torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)
