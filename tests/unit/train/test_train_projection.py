"""Training a projection: it learns, and held-out queries do not leak."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding
from worlds.trainings import SMALL, D, M, N, drawn, keys_of, same, world

import softdb
from softdb.check import Id
from softdb.errors import BadInput, TrainingWarning
from softdb.text import HashedNGrams
from softdb.train import QueryProjection, apply, fit, load, ranking, save
from softdb.train.held_out import ranked, split

# -- it learns ---------------------------------------------------------------------------------------------------------


def test_a_rotation_is_undone_for_queries_that_were_never_seen() -> None:
    db, queries, positives = world()
    done = fit(db, queries, positives, lr=0.05, epochs=20, batch_size=64, holdout=0.3)
    assert done.before.recall_10 < 0.3
    assert done.after.recall_1 > 0.8
    assert done.after.recall_10 > 0.95
    assert done.before.queries == done.after.queries == round(M * 0.3) - round(M * 0.3) // 2
    assert done.history[0].loss > done.history[-1].loss
    assert not torch.equal(done.projection.weight, torch.eye(D))


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_step_is_adams_on_the_equation(metric: Any, bias: bool) -> None:
    _, queries, positives = world()
    keys = keys_of()
    db = softdb.open(None, dim=D, metric=metric)
    names: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(N)]
    db.insert(names, keys)
    done = fit(db, queries, positives, temperature=0.3, bias=bias, **{**SMALL, "batch_size": M, "epochs": 1})
    train = split(queries, positives, 0.2, False, 0).train.tolist()
    weight, shift = torch.eye(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    parameters = [one.requires_grad_() for one in ([weight, shift] if bias else [weight])]
    loss = torch.zeros((), dtype=torch.float64)
    for i in train:
        asked = weight @ queries[i].double() + shift
        scores = _scores(metric, asked, keys.double()) / 0.3
        right = torch.tensor([names.index(one) for one in positives[i]])
        loss = loss + (scores.exp().sum().log() - scores[right].exp().sum().log()) / len(train)
    adam = torch.optim.Adam(parameters, lr=0.02)
    loss.backward()  # type: ignore[no-untyped-call]
    adam.step()
    assert done.history[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(done.projection.weight.double(), weight, rtol=0, atol=1e-5)
    if bias:
        torch.testing.assert_close(done.projection.bias.double(), shift, rtol=0, atol=1e-5)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_steps_learn_the_temperature_as_adam_does(metric: Any) -> None:
    _, queries, positives = world()
    keys, names = keys_of(), [f"r{i}" if i % 3 == 0 else i for i in range(N)]
    with holding(keys, ids=names, metric=metric) as db:
        done = fit(db, queries, positives, temperature="learn", **{**SMALL, "batch_size": M, "epochs": 3})
    train = split(queries, positives, 0.2, False, 0).train.tolist()
    weight, log_scale = torch.eye(D, dtype=torch.float64), torch.tensor(-math.log(0.07), dtype=torch.float64)
    adam = torch.optim.Adam([weight.requires_grad_(), log_scale.requires_grad_()], lr=0.02)
    for epoch in done.history:
        loss = torch.zeros((), dtype=torch.float64)
        for i in train:
            scores = _scores(metric, weight @ queries[i].double(), keys.double()) * log_scale.exp()
            right = torch.tensor([names.index(one) for one in positives[i]])
            loss = loss + (scores.logsumexp(0) - scores[right].logsumexp(0)) / len(train)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        assert epoch.loss == pytest.approx(loss.item(), rel=1e-5)
        assert epoch.temperature == pytest.approx(math.exp(-log_scale.item()), rel=1e-5)
    torch.testing.assert_close(done.projection.weight.double(), weight, rtol=0, atol=2e-5)
    assert done.temperature == done.history[-1].temperature == done.projection.metadata["temperature"] != 0.07
    assert f"{done.temperature:.3f}" in str(done).splitlines()[4]


def test_a_learnt_temperature_has_a_least_value() -> None:
    keys = torch.eye(40)  # the lower the temperature, the lower the loss
    with holding(keys, metric="cosine") as db:
        done = fit(db, keys, range(40), temperature="learn", lr=0.5, batch_size=10, epochs=4, patience=None)
    assert done.temperature == pytest.approx(0.01)
    assert done.history[0].temperature is not None
    assert done.history[0].temperature > 0.015


def _scores(metric: str, query: Tensor, keys: Tensor) -> Tensor:
    if metric == "l2":
        return -(keys - query).square().sum(1)
    dots = keys @ query
    return dots if metric == "dot" else dots / (query.norm() * keys.norm(dim=1)).clamp(min=1e-12)


@pytest.mark.parametrize("how", [{"k": 20}, {"k": 1000}, {"rtol": 0.1}])
def test_truncated_and_estimated_losses_learn_too(how: dict[str, Any]) -> None:
    db, queries, positives = world()
    done = fit(db, queries, positives, **{**SMALL, "epochs": 12}, **how)
    assert done.after.recall_10 > 0.8 > 0.4 > done.before.recall_10


@pytest.mark.slow
def test_an_estimated_loss_is_near_the_exact_one_and_the_same_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    words, given = {**SMALL, "temperature": 0.2}, drawn(monkeypatch)
    one, two = (fit(*given, rtol=0.3, **words) for _ in range(2))
    same(one, two)
    exact = fit(*given, **words)
    for mine, true in zip(one.history, exact.history, strict=True):
        assert 1e-6 < abs(mine.loss - true.loss) < 0.3


def test_the_same_seed_gives_the_same_bits() -> None:
    db, queries, positives = world()
    runs = [fit(db, queries, positives, **SMALL, seed=seed) for seed in (3, 3, 4)]
    same(runs[0], runs[1])
    assert not torch.equal(runs[0].projection.weight, runs[2].projection.weight)


def test_global_random_numbers_are_neither_used_nor_changed() -> None:
    db, queries, positives = world()
    torch.manual_seed(5)
    first = fit(db, queries, positives, **SMALL, rtol=0.1)
    after = torch.random.get_rng_state()
    torch.manual_seed(6)
    same(first, fit(db, queries, positives, **SMALL, rtol=0.1))
    torch.manual_seed(5)
    assert torch.equal(after, torch.random.get_rng_state())


def test_training_stops_without_a_gain_and_keeps_the_best() -> None:
    db, queries, positives = world()
    actual = queries / queries.norm(dim=1, keepdim=True)
    keyed = torch.stack([torch.as_tensor(db[positive[0]].key) for positive in positives])
    done = fit(db, keyed, positives, **{**SMALL, "epochs": 50, "patience": 3, "lr": 5.0})  # the identity is best
    assert (done.best, len(done.history)) == (0, 3)
    assert torch.equal(done.projection.weight, torch.eye(D))
    assert done.before == done.after
    done = fit(db, actual, positives, **{**SMALL, "epochs": 50, "patience": 2})
    scores = [epoch.mrr_100 for epoch in done.history]
    assert 0 < done.best == len(done.history) - 2
    assert scores[done.best - 1] == max(score for score in scores if score is not None)
    again = fit(db, actual, positives, **{**SMALL, "epochs": done.best, "patience": 2})
    assert torch.equal(done.projection.weight, again.projection.weight)


def test_a_run_that_raises_no_measure_says_what_to_change() -> None:
    db, queries, positives = world()
    done = fit(db, queries, positives, lr=1e-6, epochs=3, batch_size=100, patience=None)
    assert done.steps == 6  # 192 queries train
    assert done.advice == "no measure rose by 0.01 in 6 steps with lr 1e-06: raise lr or epochs, or lower batch_size"
    assert str(done).splitlines()[0].endswith("after   6 steps")
    assert str(done).splitlines()[-1] == done.advice
    assert f"epochs 3, best 3, steps 6; {done.advice}" in done._repr_html_()
    assert done._replace(lr=1.0).advice.endswith("with lr 1: lower lr or raise patience")
    assert done._replace(after=done.before._replace(recall_10=1.0)).advice == ""
    assert done._replace(after=done.before._replace(recall_1=1.0)).advice == ""
    still = fit(db, queries, positives, lr=1e-6, epochs=1, batch_size=256, criterion="recall_1")
    assert "epochs 1, best none, steps 1" in still._repr_html_()


def test_wrong_databases_and_modules_are_typed_errors(tmp_path: Path) -> None:
    _, queries, positives = world()
    with pytest.raises(BadInput, match="db is 'path'; expected an open softdb database"):
        fit("path", queries, positives)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="db is 'path'; expected an open softdb database"):
        apply("path", QueryProjection(D, hidden=3))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"projection is Linear\(.*expected a QueryProjection, such as fit's projection"):
        save(tmp_path / "x.pt", torch.nn.Linear(3, 3))  # type: ignore[arg-type]
    (tmp_path / "junk.pt").write_text("hello")
    with pytest.raises(BadInput, match=r"junk\.pt cannot be read as a projection \('KeyError: .*; give another"):
        load(tmp_path / "junk.pt")
    assert not (tmp_path / "x.pt").exists()


def test_a_fallen_measure_is_reported() -> None:
    db, _, positives = world()
    keyed = torch.stack([torch.as_tensor(db[positive[0]].key) for positive in positives])
    with pytest.warns(TrainingWarning, match=r"^fit: held-out queries fell by recall@1 1\.000 -> 0\.\d+, MRR@100"):
        done = fit(db, keyed, positives, **{**SMALL, "epochs": 2, "lr": 5.0})
    assert done.fell == ["recall_1", "mrr_100"]
    assert done.after.recall_1 < done.before.recall_1
    table = [line.split() for line in str(done).splitlines()[1:]]
    assert [row[0] for row in table] == ["recall@1", "recall@10", "MRR@100"]
    assert [(float(row[1]), float(row[2])) for row in table] == [
        pytest.approx(pair, abs=5e-4) for pair in zip(done.before[:3], done.after[:3], strict=True)
    ]
    assert [row[3:] for row in table] == [["fell"], [], ["fell"]]


@pytest.mark.parametrize("criterion", ["recall_1", "recall_10", "mrr_100"])
def test_the_best_epoch_is_chosen_by_the_criterion(criterion: Any) -> None:
    db, queries, positives = world()
    words = {**SMALL, "epochs": 8, "patience": 8, "lr": 0.3, "criterion": criterion}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        done = fit(db, queries, positives, **words)
    results = [getattr(epoch, criterion) for epoch in done.history]
    assert len(set(results)) > 1
    assert done.best == 1 + results.index(max(results))


def test_the_caller_may_choose_the_held_out_queries() -> None:
    db, queries, positives = world()
    names = torch.zeros(M, dtype=torch.bool)
    names[split(queries, positives, 0.3, False, 7).test] = True
    parts = split(queries, positives, names, False, 0)
    assert torch.equal(parts.test, names.nonzero()[:, 0])
    assert torch.equal(parts.train, (~names).nonzero()[:, 0])
    halves = split(queries, positives, names.numpy(), True, 0)
    assert torch.equal(halves.train, parts.train)
    assert sorted([*halves.choose.tolist(), *halves.test.tolist()]) == parts.test.tolist()
    assert abs(len(halves.choose) - len(halves.test)) <= 12
    assert fit(db, queries, positives, **SMALL, holdout=names).before.queries == int(names.sum())
    with pytest.raises(
        BadInput, match=r"holdout has dtype float32 and shape \(240,\); expected a share .* or \(240,\) bool"
    ):
        fit(db, queries, positives, holdout=names.float())
    names[int(parts.test[0])] = False
    with pytest.raises(BadInput, match=r"\d held-out queries, the first is query \d+, share a right record"):
        fit(db, queries, positives, holdout=names)
    with pytest.raises(BadInput, match="holdout=1 leaves the training or a held-out set empty"):
        fit(db, queries, positives, holdout=names | True)


def test_one_held_out_half_selects_and_the_other_is_reported() -> None:
    db, queries, positives = world()
    done = fit(db, queries, positives, **{**SMALL, "epochs": 1, "patience": 1, "lr": 0.1})
    parts = split(queries, positives, 0.2, True, 0)
    results = [
        ranking(db, queries[part], [positives[i] for i in part.tolist()], done.projection)
        for part in (parts.choose, parts.test)
    ]
    assert done.best == 1
    assert done.history[0].mrr_100 == results[0].mrr_100 != results[1].mrr_100
    assert done.after == results[1]


def test_texts_are_encoded_by_the_database() -> None:
    encoder = HashedNGrams(32)
    words = ["schumacher", "weber", "schuler", "fischer", "schneider", "meyer", "becker", "wagner"]
    with softdb.open(None, encoder=encoder) as db:
        db.insert(words, words)
        asked = [f"{word} {i}" for word in words for i in range(3)]
        right = [word for word in words for _ in range(3)]
        one = fit(db, asked, right, epochs=1, patience=None)
        same(one, fit(db, encoder(asked), right, epochs=1, patience=None))


def test_progress_is_reported() -> None:
    db, queries, positives = world()
    said: list[tuple[str, int, int]] = []
    fit(db, queries, positives, **SMALL, progress=lambda *one: said.append(one))
    steps = -(-round(M * 0.8) // 64) * 6
    assert (said[0], said[-1]) == (("preparing", 0, 1), ("measuring", 0, 1))
    epochs = [one for one in said[1:-1] if "loss" in one[0]]
    assert [done for _, done, _ in epochs] == list(range(1, steps + 1))
    assert {whole for _, _, whole in said[1:-1]} == {steps}
    assert epochs[-1][0].startswith("epoch 6, loss ")


# -- held-out queries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_no_right_record_of_a_held_out_query_was_trained_on(choose: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    queries = torch.from_numpy(draw.normal(size=(200, 3)))
    queries[150:] = queries[100:150]  # equal queries whose positives differ
    positives: list[list[Id]] = [
        [int(one) for one in draw.integers(0, 2000, size=draw.integers(1, 4))] for _ in range(200)
    ]
    parts = split(queries, positives, 0.3, choose, seed)
    assert sorted(torch.cat(parts).tolist()) == list(range(200))
    named = [{one for i in part.tolist() for one in positives[i]} for part in parts]
    asked = [{tuple(queries[i].tolist()) for i in part.tolist()} for part in parts]
    for sides in (named, asked):
        assert not sides[0] & sides[1] | sides[0] & sides[2] | sides[1] & sides[2]
    assert len(parts.choose) == (30 if choose else 0)
    assert len(parts.test) == (30 if choose else 60)
    again = split(queries, positives, 0.3, choose, seed)
    other = split(queries, positives, 0.3, choose, seed + 10)
    assert torch.equal(parts.test, again.test)
    assert not torch.equal(parts.test, other.test)


def test_queries_hang_together_through_others() -> None:
    chain: list[list[Id]] = [["a", "b"], ["b", "c"], ["c", "d"], [1], [1, "1"], [2], [3], [4]]
    queries = torch.arange(8.0)[:, None]
    for seed in range(20):
        parts = [set(part.tolist()) for part in split(queries, chain, 0.5, False, seed)]
        for together in ({0, 1, 2}, {3, 4}):
            assert sum(bool(together & part) for part in parts) == 1


@pytest.mark.parametrize("positives", [[["a"]] * 9, [["a"], ["b"]], [["a"]]])
def test_impossible_held_out_sets_are_refused(positives: list[list[Id]]) -> None:
    with pytest.raises(BadInput, match=r"holdout=0\.2 leaves the training or a held-out set empty: queries that"):
        split(torch.arange(float(len(positives)))[:, None], positives, 0.2, True, 0)


@pytest.mark.parametrize("n", [3, 40, 300])
def test_ranking_equals_a_loop(n: int) -> None:
    db, queries, _ = world(60, n)
    names: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(n)]
    db.delete([names[-1]])
    keys, names = keys_of(n)[:-1], names[:-1]
    draw = np.random.default_rng(0)
    positives = [[names[i] for i in draw.integers(0, n - 1, size=draw.integers(1, 4))] for _ in range(60)]
    positives[0] = ["gone"]
    ranks = []
    for query, positive in zip(queries, positives, strict=True):
        scores = keys @ query
        nearest = np.argsort(-scores.numpy(), kind="stable")[:100]  # equal keys: the first inserted comes first
        ranks.append(next((i for i, row in enumerate(nearest, 1) if names[row] in positive), math.inf))
    actual = ranked(db, queries, positives, None)
    assert actual.recall_1 == np.mean([rank <= 1 for rank in ranks])
    assert actual.recall_10 == np.mean([rank <= 10 for rank in ranks])
    assert actual.mrr_100 == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert actual.queries == 60
    assert ranks[0] == math.inf
    flipped = torch.nn.Linear(D, D, bias=False)
    torch.nn.init.eye_(flipped.weight)
    assert ranking(db, -queries[1:], positives[1:], flipped) == ranked(db, -queries[1:], positives[1:], None)


def test_ranking_in_an_empty_database_is_zero() -> None:
    with softdb.open(None, dim=2) as db:
        assert ranked(db, torch.ones(3, 2), [["a"]] * 3, None) == (0, 0, 0, 3)


def test_ranking_takes_one_id_a_query_and_refuses_others() -> None:
    db, queries, positives = world()
    with holding(keys_of()) as one:
        firsts = np.arange(N)
        assert ranking(one, keys_of(), firsts).recall_10 == ranking(one, keys_of(), [[i] for i in range(N)]).recall_10
    assert ranking(db, queries, [positive[0] for positive in positives]).queries == M
    with pytest.raises(BadInput, match=r"not in the database: 'gone' \(query 1\)"):
        ranking(db, queries[:2], ["r0", "gone"])
    with pytest.raises(BadInput, match=r"queries are of shape \(0, 8\); expected one or more, \(m, d\)"):
        ranking(db, queries[:0], [])
    with pytest.raises(BadInput, match="positives are 1 for 2 queries"):
        ranking(db, queries[:2], ["r0"])


def test_zeros_of_either_sign_are_one_query() -> None:
    queries = torch.tensor([[0.0, 1], [-0.0, 1], [1, 0], [2, 0], [3, 0]])
    for seed in range(20):
        parts = [set(part.tolist()) for part in split(queries, [["a"], ["b"], ["c"], ["d"], ["e"]], 0.5, False, seed)]
        assert sum(bool({0, 1} & part) for part in parts) == 1


def test_too_few_pairs_name_the_number_needed() -> None:
    with pytest.raises(BadInput, match=r"such as 8 that share none$"):
        split(torch.ones(1, 2), [["a"]], 0.2, True, 0)
    queries = torch.arange(8.0)[:, None]
    positives: list[list[Id]] = [[name] for name in "abcdefgh"]
    assert [len(part) for part in split(queries, positives, 0.2, True, 0)] == [6, 1, 1]
