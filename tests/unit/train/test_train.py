"""Training a projection: it learns, nothing leaks, a break costs nothing, and a bad line is named."""

from __future__ import annotations

import doctest
import gzip
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import softdb
import softdb.train.projection
from softdb.check import Id
from softdb.cli.commands import app
from softdb.errors import BadInput, TrainingWarning
from softdb.text import HashedNGrams
from softdb.train import Fitted, Pairs, QueryProjection, fit, load, ranking, read_pairs, save
from softdb.train.held_out import ranked, split

N, D, M = 120, 8, 240
SMALL: dict[str, Any] = {"lr": 0.02, "batch_size": 64, "epochs": 6, "patience": None}


def keys_of(n: int = N, d: int = D) -> Tensor:
    """Unit keys with an exact twin and a zero vector."""
    keys = torch.nn.functional.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(1)), dim=1)
    keys[1], keys[2] = keys[0], 0
    return keys


def world(m: int = M, n: int = N) -> tuple[softdb.SoftDB, Tensor, list[list[Id]]]:
    """Records, queries that are their keys under a rotation, and the ids each shall find; ids are of both types."""
    db, keys, noise = softdb.open(None, dim=D), keys_of(n), torch.Generator().manual_seed(2)
    ids: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(n)]
    db.insert(ids, keys)
    rotation = torch.linalg.qr(torch.randn(D, D, generator=noise))[0]
    wanted = torch.randint(n, (m,), generator=noise).tolist()
    queries = keys[wanted] @ rotation + 0.05 * torch.randn(m, D, generator=noise)
    return db, queries, [[ids[i]] if i > 1 else [ids[0], ids[1]] for i in wanted]


def same(one: Fitted, two: Fitted) -> None:
    """Asserts equal runs, to the bit."""
    for a, b in zip(one.projection.parameters(), two.projection.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one[1:] == two[1:]


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


@pytest.fixture(scope="module")
def indexed() -> tuple[softdb.SoftDB, Tensor, list[list[Id]]]:
    """As `world`, but large enough, and with an index, for estimates that draw."""
    pytest.importorskip("faiss", reason="an estimate draws through an IVF index")
    db, queries, positives = world(120, 20_000)
    db.build_index("ivf")
    return db, queries, positives


@pytest.fixture
def drawn(indexed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """As `indexed`, where an estimate is never replaced by the exact answer for being dearer."""
    monkeypatch.setattr("softdb.attend.rounds.Estimator._exact_seconds", lambda *_: np.inf)
    estimates = [
        indexed[0].log_partition(indexed[1], temperature=0.2, rtol=0.3, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    ]
    assert not torch.allclose(estimates[0].value, estimates[1].value, rtol=1e-4), "nothing is drawn"
    return indexed


@pytest.mark.slow
def test_an_estimated_loss_is_near_the_exact_one_and_the_same_by_its_seed(drawn: tuple[Any, ...]) -> None:
    words = {**SMALL, "temperature": 0.2}
    one, two = (fit(*drawn, rtol=0.3, **words) for _ in range(2))
    same(one, two)
    exact = fit(*drawn, **words)
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


def test_training_stops_when_nothing_is_gained_and_keeps_the_best() -> None:
    db, queries, positives = world()
    found = queries / queries.norm(dim=1, keepdim=True)
    keyed = torch.stack([torch.as_tensor(db[mine[0]].key) for mine in positives])
    done = fit(db, keyed, positives, **{**SMALL, "epochs": 50, "patience": 3, "lr": 5.0})  # the identity is best
    assert (done.best, len(done.history)) == (0, 3)
    assert torch.equal(done.projection.weight, torch.eye(D))
    assert done.before == done.after
    done = fit(db, found, positives, **{**SMALL, "epochs": 50, "patience": 2})
    scores = [epoch.mrr_100 for epoch in done.history]
    assert 0 < done.best == len(done.history) - 2
    assert scores[done.best - 1] == max(one for one in scores if one is not None)
    again = fit(db, found, positives, **{**SMALL, "epochs": done.best, "patience": 2})
    assert torch.equal(done.projection.weight, again.projection.weight)


def test_a_measure_that_fell_is_told() -> None:
    db, _, positives = world()
    keyed = torch.stack([torch.as_tensor(db[mine[0]].key) for mine in positives])
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
    found = [getattr(epoch, criterion) for epoch in done.history]
    assert len(set(found)) > 1
    assert done.best == 1 + found.index(max(found))


def test_the_caller_may_say_which_queries_are_held_out() -> None:
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
    with pytest.raises(BadInput, match="leave a side empty when 1 are held out"):
        fit(db, queries, positives, holdout=names | True)


def test_one_half_of_what_is_held_out_chooses_and_the_other_is_reported() -> None:
    db, queries, positives = world()
    done = fit(db, queries, positives, **{**SMALL, "epochs": 1, "patience": 1, "lr": 0.1})
    parts = split(queries, positives, 0.2, True, 0)
    found = [
        ranking(db, queries[part], [positives[i] for i in part.tolist()], done.projection)
        for part in (parts.choose, parts.test)
    ]
    assert done.best == 1
    assert done.history[0].mrr_100 == found[0].mrr_100 != found[1].mrr_100
    assert done.after == found[1]


def test_texts_are_encoded_by_the_database() -> None:
    encoder = HashedNGrams(32)
    words = ["schumacher", "weber", "schuler", "fischer", "schneider", "meyer", "becker", "wagner"]
    with softdb.open(None, encoder=encoder) as db:
        db.insert(words, words)
        asked = [f"{word} {i}" for word in words for i in range(3)]
        right = [word for word in words for _ in range(3)]
        one = fit(db, asked, right, epochs=1, patience=None)
        same(one, fit(db, encoder(asked), right, epochs=1, patience=None))


def test_progress_says_how_far_it_is() -> None:
    db, queries, positives = world()
    said: list[tuple[str, int, int]] = []
    fit(db, queries, positives, **SMALL, progress=lambda *one: said.append(one))
    steps = -(-round(M * 0.8) // 64) * 6
    assert [done for _, done, _ in said] == list(range(1, steps + 1))
    assert {whole for _, _, whole in said} == {steps}
    assert said[-1][0].startswith("epoch 6, loss ")


# -- what is held out --------------------------------------------------------------------------------------------------


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
def test_what_cannot_be_held_out_is_refused(positives: list[list[Id]]) -> None:
    with pytest.raises(BadInput, match=r"leave a side empty when 0\.2 are held out: queries that share a positive"):
        split(torch.arange(float(len(positives)))[:, None], positives, 0.2, True, 0)


@pytest.mark.parametrize("n", [3, 40, 300])
def test_ranking_is_what_a_loop_says(n: int) -> None:
    db, queries, _ = world(60, n)
    names: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(n)]
    db.delete([names[-1]])
    keys, names = keys_of(n)[:-1], names[:-1]
    draw = np.random.default_rng(0)
    positives = [[names[i] for i in draw.integers(0, n - 1, size=draw.integers(1, 4))] for _ in range(60)]
    positives[0] = ["gone"]
    ranks = []
    for query, mine in zip(queries, positives, strict=True):
        scores = keys @ query
        nearest = np.argsort(-scores.numpy(), kind="stable")[:100]  # equal keys: the first inserted comes first
        ranks.append(next((i for i, row in enumerate(nearest, 1) if names[row] in mine), math.inf))
    found = ranked(db, queries, positives, None)
    assert found.recall_1 == np.mean([rank <= 1 for rank in ranks])
    assert found.recall_10 == np.mean([rank <= 10 for rank in ranks])
    assert found.mrr_100 == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert found.queries == 60
    assert ranks[0] == math.inf
    flipped = torch.nn.Linear(D, D, bias=False)
    torch.nn.init.eye_(flipped.weight)
    assert ranking(db, -queries[1:], positives[1:], flipped) == ranked(db, -queries[1:], positives[1:], None)


def test_in_an_empty_database_nothing_is_found() -> None:
    with softdb.open(None, dim=2) as db:
        assert ranked(db, torch.ones(3, 2), [["a"]] * 3, None) == (0, 0, 0, 3)


def test_a_ranking_takes_an_id_each_and_names_what_is_wrong() -> None:
    db, queries, positives = world()
    with softdb.open(None, dim=D) as one:
        one.insert(range(N), keys_of())
        firsts = np.arange(N)
        assert ranking(one, keys_of(), firsts).recall_10 == ranking(one, keys_of(), [[i] for i in range(N)]).recall_10
    assert ranking(db, queries, [mine[0] for mine in positives]).queries == M
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


def test_too_few_pairs_are_told_how_many_would_do() -> None:
    with pytest.raises(BadInput, match=r"such as 8 that share none, .* \(--patience 0 on the command line\)"):
        split(torch.ones(1, 2), [["a"]], 0.2, True, 0)
    queries = torch.arange(8.0)[:, None]
    positives: list[list[Id]] = [[name] for name in "abcdefgh"]
    assert [len(part) for part in split(queries, positives, 0.2, True, 0)] == [6, 1, 1]


# -- a break costs nothing ---------------------------------------------------------------------------------------------


class Break(Exception):
    """The machine is taken away."""


def breaking(epoch: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, whole: int) -> None:
        if what.startswith(f"epoch {epoch},") and done % 2 == 0:
            raise Break

    return progress


@pytest.mark.parametrize("more", [{}, {"patience": 2}, {"bias": True, "k": 30}])
@pytest.mark.parametrize("epoch", [2, 4])
def test_a_resumed_run_is_bit_equal_to_one_without_a_break(more: dict[str, Any], epoch: int, tmp_path: Path) -> None:
    db, queries, positives = world()
    words, file = {**SMALL, **more}, tmp_path / "run.pt"
    whole = fit(db, queries, positives, **words)
    with pytest.raises(Break, match=r"^$"):
        fit(db, queries, positives, **words, checkpoint=file, progress=breaking(epoch))
    same(whole, fit(db, queries, positives, **words, checkpoint=file, resume=True))
    assert [one.name for one in tmp_path.iterdir()] == ["run.pt"]


def test_a_resumed_run_draws_on_where_it_stopped(drawn: tuple[Any, ...], tmp_path: Path) -> None:
    words: dict[str, Any] = {**SMALL, "rtol": 0.3, "temperature": 0.2}
    file = tmp_path / "run.pt"
    with pytest.raises(Break, match=r"^$"):
        fit(*drawn, **words, checkpoint=file, progress=breaking(3))
    same(fit(*drawn, **words), fit(*drawn, **words, checkpoint=file, resume=True))


def test_a_finished_run_goes_on_to_more_epochs(tmp_path: Path) -> None:
    db, queries, positives = world()
    file = tmp_path / "run.pt"
    fit(db, queries, positives, **{**SMALL, "epochs": 2}, checkpoint=file)
    same(fit(db, queries, positives, **SMALL), fit(db, queries, positives, **SMALL, checkpoint=file, resume=True))
    same(fit(db, queries, positives, **SMALL), fit(db, queries, positives, **SMALL, checkpoint=file, resume=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"temperature": 0.1}, r"temperature 0\.05 there, 0\.1 here"),
        ({"rtol": 0.1}, r"rtol None there, 0\.1 here"),
        ({"patience": 3}, "patience None there, 3 here"),
        ({"batch_size": 63}, "batch_size 64 there, 63 here"),
        ({"bias": True}, "bias False there, True here"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    db, queries, positives = world()
    fit(db, queries, positives, **SMALL, checkpoint=tmp_path / "run.pt")
    content = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(BadInput, match=f"is the checkpoint of another run: {message}"):
        fit(db, queries, positives, **{**SMALL, **change}, checkpoint=tmp_path / "run.pt", resume=True)
    assert (tmp_path / "run.pt").read_bytes() == content


def test_a_checkpoint_of_other_pairs_or_records_is_refused(tmp_path: Path) -> None:
    db, queries, positives = world()
    words = {**SMALL, "checkpoint": tmp_path / "run.pt"}
    fit(db, queries, positives, **words)
    with pytest.raises(BadInput, match="another run: pairs others there, these here"):
        fit(db, queries * 1.001, positives, **words, resume=True)
    with pytest.raises(BadInput, match="another run: pairs others there, these here"):
        fit(db, queries, [*positives[1:], positives[0]], **words, resume=True)
    db.insert(["new"], torch.ones(1, D))
    with pytest.raises(BadInput, match="another run: generation 1 there, 2 here"):
        fit(db, queries, positives, **words, resume=True)
    names = [f"r{i}" if i % 3 == 0 else i for i in range(N)]
    for ids, keys in ((names, keys_of() * 2), ([names[-1], *names[:-1]], keys_of())):
        with softdb.open(None, dim=D) as other:
            other.insert(ids, keys)
            with pytest.raises(BadInput, match="another run: keys others there, these here"):
                fit(other, queries, positives, **words, resume=True)


def test_a_checkpoint_is_of_the_index_where_candidates_count(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="an index is built")
    db, queries, positives = world(M, 2000)
    words = {**SMALL, "epochs": 1}
    fit(db, queries, positives, **words, k=20, checkpoint=tmp_path / "k.pt")
    fit(db, queries, positives, **words, checkpoint=tmp_path / "exact.pt")
    db.build_index("ivf")
    with pytest.raises(BadInput, match="another run: index another there, this one here"):
        fit(db, queries, positives, **words, k=20, checkpoint=tmp_path / "k.pt", resume=True)
    fit(db, queries, positives, **words, checkpoint=tmp_path / "exact.pt", resume=True)  # every record, as before
    more = {**SMALL, "epochs": 2, "k": 20}
    fit(db, queries, positives, **words, k=20, checkpoint=tmp_path / "i.pt")
    db.search(queries, 5)
    fit(db, queries, positives, **more, checkpoint=tmp_path / "i.pt", resume=True)


def test_a_checkpoint_without_its_parts_is_named(tmp_path: Path) -> None:
    db, queries, positives = world()
    words = {**SMALL, "epochs": 1, "checkpoint": tmp_path / "run.pt"}
    fit(db, queries, positives, **words)
    content = torch.load(tmp_path / "run.pt", weights_only=True)
    for broken, message in (
        ({"format": content["format"]}, "is not a checkpoint that softdb train wrote"),
        ({**content, "run": [1]}, "is not a checkpoint that softdb train wrote"),
        ({**content, "state": {}}, r"run\.pt is a checkpoint whose parts are missing or broken"),
        ({**content, "state": {**content["state"], "best": 3}}, "parts are missing or broken"),
    ):
        torch.save(broken, tmp_path / "run.pt")
        with pytest.raises(BadInput, match=message):
            fit(db, queries, positives, **words, resume=True)


def test_a_checkpoint_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    _, queries, positives = world()
    (tmp_path / "run.pt.tmp").mkdir()
    said: list[object] = []
    with softdb.open(tmp_path / "db", dim=D) as db:
        db.insert([f"r{i}" if i % 3 == 0 else i for i in range(N)], keys_of())
        for name, message in (("run.pt", "cannot be written"), ("db/run.pt", "is inside the database")):
            with pytest.raises(BadInput, match=message):
                fit(db, queries, positives, checkpoint=tmp_path / name, progress=lambda *one: said.append(one))
    assert not said


def test_a_checkpoint_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, queries, positives = world()
    file = tmp_path / "run.pt"
    fit(db, queries, positives, **{**SMALL, "epochs": 1}, checkpoint=file)
    content = file.read_bytes()
    with pytest.raises(BadInput, match="is there already; go on from it with resume, or remove it"):
        fit(db, queries, positives, **SMALL, checkpoint=file)

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        fit(db, queries, positives, **SMALL, checkpoint=file, resume=True)
    assert file.read_bytes() == content


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    db, queries, positives = world()
    (tmp_path / "text.pt").write_text("no")
    torch.save({"a": 1}, tmp_path / "other.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": Break}, tmp_path / "code.pt")
    for name, message in {
        "none.pt": "there is no checkpoint .*none.pt to resume; leave resume out",
        "text.pt": "cannot be read as a checkpoint",
        "code.pt": "cannot be read as a checkpoint",
        "other.pt": "is not a checkpoint that softdb train wrote",
        "list.pt": "it holds a list",
    }.items():
        with pytest.raises(BadInput, match=message):
            fit(db, queries, positives, **SMALL, checkpoint=tmp_path / name, resume=True)
    with pytest.raises(BadInput, match="no checkpoint is named"):
        fit(db, queries, positives, resume=True)
    with pytest.raises(BadInput, match="there is no folder"):
        fit(db, queries, positives, checkpoint=tmp_path / "no" / "run.pt")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"holdout": 0}, "holdout is 0; expected a share between 0 and 1"),
        ({"holdout": 1.0}, "holdout is 1; expected"),
        ({"holdout": -0.1}, r"holdout is -0\.1"),
        ({"k": 3, "rtol": 0.1}, r"k and a tolerance are both given \(k 3, rtol 0\.1"),
        ({"k": 0}, "k is 0"),
        ({"rtol": -1}, "rtol is -1"),
        ({"temperature": 0}, "temperature is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 1.5}, r"batch_size is 1\.5"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr": 1e300}, r"lr is 1e\+300; expected at most 1000"),
        ({"patience": 0}, "patience is 0"),
        ({"criterion": "loss"}, "criterion is 'loss'; expected one of recall_1, recall_10, mrr_100"),
        ({"seed": -1}, "seed is -1"),
        ({"bias": "yes"}, "bias is 'yes'; expected True or False"),
    ],
)
def test_settings_that_make_no_sense(words: dict[str, Any], message: str, tmp_path: Path) -> None:
    db, queries, positives = world()
    with pytest.raises(BadInput, match=message):
        fit(db, queries, positives, checkpoint=tmp_path / "run.pt", **words)
    assert not list(tmp_path.iterdir())


def test_pairs_that_make_no_sense() -> None:
    db, queries, positives = world()
    with pytest.raises(BadInput, match="positives are 239 for 240 queries"):
        fit(db, queries, positives[1:])
    with pytest.raises(BadInput, match="query 2 has no positive"):
        fit(db, queries, [*positives[:2], [], *positives[3:]])
    with pytest.raises(
        BadInput, match="positives are 1 for 240 queries; give one id, or one list of ids, for each query"
    ):
        fit(db, queries, "r0")
    with pytest.raises(BadInput, match="0 queries in 0 groups"):
        fit(db, torch.zeros(0, D), [])
    with pytest.raises(BadInput, match="queries are 7 wide but"):
        fit(db, queries[:, 1:], positives)
    with pytest.raises(BadInput, match="without an encoder"):
        fit(db, ["a"] * M, positives)
    unknown = [["x"], ["r0", "y"], ["z"], ["u"], *positives[4:]]
    match = r"not in the database: 'x' \(query 0\), 'y' \(query 1\), 'z' \(query 2\) and 1 more; insert them"
    with pytest.raises(BadInput, match=match):
        fit(db, queries, unknown)
    db.delete(["r0"])
    with pytest.raises(BadInput, match=r"not in the database: 'r0'"):
        fit(db, queries, ["r0", *positives[1:]])


def test_ids_of_arrays_and_a_checkpoint_that_is_no_path() -> None:
    with softdb.open(None, dim=D) as db:
        db.insert(range(N), keys_of())
        one = fit(db, keys_of(), list(range(N)), epochs=1)
        same(one, fit(db, keys_of(), np.arange(N), epochs=1))
        same(one, fit(db, keys_of(), torch.arange(N), epochs=1))
        same(one, fit(db, keys_of(), list(np.arange(N)), epochs=1))
        with pytest.raises(BadInput, match=f"positives are 1 for {N} queries"):
            fit(db, keys_of(), np.array(5))
        wrong: Any = 5
        with pytest.raises(BadInput, match="checkpoint is 5; expected the path of a file"):
            fit(db, keys_of(), np.arange(N), checkpoint=wrong)


def test_a_query_beyond_float32_is_named_before_training() -> None:
    db, queries, positives = world()
    large = queries.double()
    large[3, 0] = 1e300
    with pytest.raises(BadInput, match="query 3 is NaN or infinite in float32"):
        fit(db, large, positives)


def test_the_grad_mode_and_default_dtype_around_it_do_not_count() -> None:
    db, queries, positives = world()
    one = fit(db, queries, positives, **SMALL)
    with torch.no_grad():
        same(one, fit(db, queries, positives, **SMALL))
    with torch.inference_mode():
        same(one, fit(db, queries.clone(), positives, **SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        same(one, fit(db, queries, positives, **SMALL))
        asked = one.projection.of(db, queries)
    assert torch.equal(asked, one.projection.of(db, queries))
    torch.set_default_dtype(torch.float64)
    try:
        same(one, fit(db, queries, positives, **SMALL))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_projection_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    db, queries, positives = world()
    after = torch.optim.Adam.step

    def diverge(self: Any, *words: Any) -> None:
        after(self, *words)
        with torch.no_grad():
            self.param_groups[0]["params"][0][0, 0] = torch.inf

    monkeypatch.setattr(torch.optim.Adam, "step", diverge)
    with pytest.raises(BadInput, match="the projection became NaN or infinity; lower lr"):
        fit(db, queries, positives, **{**SMALL, "batch_size": M, "epochs": 1})


def test_a_loss_that_is_no_number_is_named() -> None:
    db, queries, positives = world()
    with pytest.raises(BadInput, match=r"the loss became (inf|nan) in epoch 1; lower lr, or raise temperature"):
        fit(db, queries, positives, **SMALL, temperature=1e-39)


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_pairs_of_json_lines(name: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / name, {"query": [1, 2.5], "positives": [7, "7", 7]}, "", {"positives": "a", "query": [0, 1]}
    )
    found = read_pairs(path)
    assert (found.queries, found.positives, found.lines) == ([[1, 2.5], [0, 1]], [[7, "7"], ["a"]], [1, 3])
    assert not found.is_text


@pytest.mark.parametrize(("name", "mark"), [("p.csv", ","), ("p.tsv", "\t"), ("p.csv.gz", ",")])
def test_pairs_of_tables(name: str, mark: str, tmp_path: Path) -> None:
    rows = [
        ("asked", "more", "found"),
        ("1984", "x", "7"),
        ("a horse", "", '"[7, ""b""]"'),
        ("c", "1", "a"),
    ]
    found = read_pairs(write(tmp_path / name, *(mark.join(row) for row in rows)), query="asked", positives="found")
    assert (found.queries, found.positives) == (["1984", "a horse", "c"], [["7"], [7, "b"], ["a"]])
    assert found.is_text
    assert found.lines == [2, 3, 4]


def test_numbers_in_tables_and_queries_from_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "query,positives", '"[1, 2]",a', '"[3, 4]",b')
    assert read_pairs(path).queries == [[1, 2], [3, 4]]
    array = np.ones((2, 5))
    only = write(tmp_path / "p.jsonl", {"positives": 1}, {"positives": [2]})
    assert read_pairs(only, queries=array).queries is array
    assert read_pairs(only, queries=array).positives == [[1], [2]]
    with pytest.raises(BadInput, match=r"p\.csv line 2: field 'query' is a query, but queries are given, too"):
        read_pairs(path, queries=array)
    for bad in (np.ones(()), np.ones(2), np.ones((2, 1, 1))):
        with pytest.raises(BadInput, match=r"queries have shape \(.*\); expected \(m, d\) numbers"):
            read_pairs(only, queries=bad)
    wide = write(tmp_path / "wide.csv", "query,positives", f'"{[1.25] * 40_000}"," [""r1""]"')
    found = read_pairs(wide)
    assert (len(found.queries[0]), found.positives) == (40_000, [["r1"]])
    with pytest.raises(BadInput, match=r"5 queries but p\.jsonl has 2 lines"):
        read_pairs(only, queries=np.ones((5, 2)))


def test_an_id_of_a_table_is_what_the_database_knows(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "query,positives", "x,7", "x,8", 'x,"[8, ""8""]"')
    with softdb.open(None, dim=1) as db:
        db.insert(["7", 7, 8, "8"], [[1], [2], [3], [4]])
        pairs = read_pairs(path)
        pairs.resolve(db)
        assert pairs.positives == [["7"], ["8"], [8, "8"]]
        db.delete(["7", "8"])
        pairs = read_pairs(write(path, "query,positives", "x,7", "x,8"))
        pairs.resolve(db)
        assert pairs.positives == [[7], [8]]
        pairs = read_pairs(write(tmp_path / "p.jsonl", {"query": "x", "positives": "7"}))
        with pytest.raises(BadInput, match=r"'7' \(p\.jsonl line 1\)"):  # typed: 7 and "7" differ
            pairs.resolve(db)
        pairs = read_pairs(write(path, "query\tpositives".replace("\t", ","), 'x,"r1, r2"'))
        with pytest.raises(BadInput, match=r"'r1, r2' \(p\.csv line 2\); insert .*; several ids are a JSON list"):
            pairs.resolve(db)
        pairs = read_pairs(write(tmp_path / "p.jsonl", "", {"query": [1, 2], "positives": 8}))
        with pytest.raises(BadInput, match=r"p\.jsonl line 2: the query has 2 numbers but this database is 1 wide"):
            pairs.resolve(db)
        huge = Pairs(["x"], [["9" * 19]], [5], "p.csv", False)
        with pytest.raises(BadInput, match=r"'9999999999999999999' \(p\.csv line 5\)"):
            huge.resolve(db)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("p.jsonl", ['{"query": "a", "positives": 1}', "{"], r"p\.jsonl line 2: not JSON"),
        ("p.jsonl", ["[1]"], r"p\.jsonl line 1: \[1\]; expected an object"),
        ("p.jsonl", ['{"positives": 1}'], r"p\.jsonl line 1: no field 'query'; its fields are \['positives'\]"),
        ("p.jsonl", ['{"query": "a"}'], "line 1: no field 'positives'"),
        ("p.jsonl", ['{"query": "a", "positives": []}'], r"line 1: field 'positives' is \[\]; expected an id"),
        ("p.jsonl", ['{"query": "a", "positives": 1.5}'], "line 1: field 'positives' is 1.5"),
        ("p.jsonl", ['{"query": "a", "positives": [true]}'], "line 1: id True is of type bool"),
        ("p.jsonl", ['{"query": " ", "positives": 1}'], "line 1: field 'query' is ' '; expected a text or a list"),
        ("p.jsonl", ['{"query": [], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1, "a"], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1' + "0" * 400 + '], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1], "positives": 1}', '{"query": "a", "positives": 1}'], "line 2: texts and lists"),
        ("p.jsonl", ['{"query": [1], "positives": 1}', '{"query": [1, 2], "positives": 1}'], "2: .* has 2 numbers, 1"),
        ("p.jsonl", [], "holds no pairs"),
        ("p.csv", ["query,positives"], "holds no pairs"),
        ("p.csv", ["query,positives", "a,[1"], r"line 2: '\[1' begins with \[ but is not a JSON list"),
        ("p.csv", ["query,positives", "a,b,c"], "line 2: 3 cells, 2 in the header"),
        ("p.csv", ["query,positives", "a,"], "line 2: field 'positives': the cell is empty"),
        ("p.txt", ["x"], "has a name of no known kind"),
        ("none.jsonl", None, "none.jsonl is not a file"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(name: str, lines: list[str] | None, message: str, tmp_path: Path) -> None:
    if lines is not None:
        write(tmp_path / name, *lines)
    with pytest.raises(BadInput, match=message):
        read_pairs(tmp_path / name)


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_goes_through_its_file(bias: bool, tmp_path: Path) -> None:
    projection = QueryProjection(3, bias)
    assert torch.equal(projection(torch.eye(3)), torch.eye(3))
    torch.manual_seed(0)
    for one in projection.parameters():
        torch.nn.init.normal_(one)
    save(tmp_path / "p.pt", projection, {"seed": 7})
    back = load(tmp_path / "p.pt")
    assert torch.equal(back(torch.ones(2, 3)), projection(torch.ones(2, 3)))
    assert back.metadata == {"seed": 7}
    content = torch.load(tmp_path / "p.pt", weights_only=True)
    plain = torch.nn.Linear(3, 3, bias)
    plain.load_state_dict(content["state_dict"])
    assert torch.equal(plain(torch.ones(2, 3)), projection(torch.ones(2, 3)))


def test_the_example_of_the_docstring_runs() -> None:
    finished = doctest.testmod(softdb.train.projection, extraglobs={"torch": torch})
    assert finished.attempted > 0
    assert not finished.failed


def test_files_that_hold_no_projection(tmp_path: Path) -> None:
    states = {
        "flat": {"weight": torch.ones(2, 3)},
        "nan": {"weight": torch.eye(2) / 0},
        "x": {"weight": torch.eye(2), "x": torch.eye(2)},
    }
    for name, state in states.items():
        torch.save({"format": "softdb projection 1", "state_dict": state}, tmp_path / f"{name}.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    parts: list[dict[str, Any]] = [
        {"weight": torch.eye(2, dtype=torch.int64)}, {"weight": torch.zeros(0, 0)}, {"weight": torch.eye(2), "bias": 1},
        {"weight": torch.eye(2), "bias": torch.ones(3)}, {"weight": torch.ones(2)}, {},
    ]  # fmt: skip
    for part in parts:
        torch.save({"format": "softdb projection 1", "state_dict": part}, tmp_path / "part.pt")
        with pytest.raises(BadInput, match=r"part\.pt is not a projection that softdb train wrote"):
            load(tmp_path / "part.pt")
    for facts in ({"path": tmp_path}, {"loss": math.nan}):
        with pytest.raises(BadInput, match="metadata holds"):
            save(tmp_path / "meta.pt", QueryProjection(2), facts)
    assert not (tmp_path / "meta.pt").exists()
    for name, message in {
        "none": "is not there", "flat": "is not a projection", "nan": "holds NaN or infinity",
        "x": "is not a projection", "linear": "is not a projection", "empty": "cannot be read as a projection",
    }.items():  # fmt: skip
        with pytest.raises(BadInput, match=message):
            load(tmp_path / f"{name}.pt")
    with softdb.open(None, dim=2) as db, pytest.raises(BadInput, match="of queries 3 wide but this database is 2 wide"):
        QueryProjection(3).of(db, [[1, 2]])


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def fails(*arguments: object) -> str:
    (line,) = run(*arguments, code=1).stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Path]:
    """A database on disk and its pairs."""
    _, queries, positives = world()
    with softdb.open(tmp_path / "db", dim=D) as db:
        db.insert([f"r{i}" if i % 3 == 0 else i for i in range(N)], keys_of())
    rows = [{"query": one.tolist(), "positives": mine} for one, mine in zip(queries, positives, strict=True)]
    return tmp_path / "db", write(tmp_path / "pairs.jsonl", *rows)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(one): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in sorted(folder.rglob("*"))
        if one.is_file() and not one.name.endswith(("-shm", "-wal"))  # SQLite's own, also for readers
    }


def test_the_command_trains_and_the_others_ask_with_it(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    before, out = digests(path), tmp_path / "p.pt"
    words = ("--lr", 0.02, "--batch-size", 64, "--epochs", 6, "--patience", 0)
    shown = run("train", path, pairs, "--out", out, *words).stdout
    assert digests(path) == before
    db, queries, positives = world()
    done = fit(db, queries, positives, **SMALL)
    projection = load(out)
    torch.testing.assert_close(projection.weight, done.projection.weight)
    table = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith(("recall", "MRR"))}
    assert table == {
        label: [f"{getattr(one, name):.3f}" for one in (done.before, done.after)] + ["fell"] * (name in done.fell)
        for name, label in (("recall_1", "recall@1"), ("recall_10", "recall@10"), ("mrr_100", "MRR@100"))
    }
    assert projection.metadata["pairs"] == M
    assert projection.metadata["after"] == done.after._asdict()
    query = json.dumps(queries[5].tolist())
    (hits,) = json.loads(run("search", path, query, "--projection", out, "--json").stdout)
    assert [hit["id"] for hit in hits] == db.search(projection(queries[5:6]), 10).ids[0]
    assert hits != json.loads(run("search", path, query, "--json").stdout)[0]
    (pooled,) = json.loads(run("attend", path, query, "--projection", out, "--json").stdout)
    torch.testing.assert_close(torch.tensor(pooled["lse"]), db.attend(projection(queries[5:6])).lse[0].detach())


def test_the_command_resumes_and_speaks_json(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    words = ("--lr", 0.02, "--batch-size", 64, "--json", "--out")
    whole = json.loads(run("train", path, pairs, *words, tmp_path / "a.pt", "--epochs", 4).stdout)
    file = tmp_path / "run.ckpt"
    run("train", path, pairs, *words, tmp_path / "b.pt", "--epochs", 2, "--checkpoint", file)
    more = ("--epochs", 4, "--checkpoint", file, "--resume")
    again = json.loads(run("train", path, pairs, *words, tmp_path / "b.pt", *more).stdout)
    assert {**again, "projection": ""} == {**whole, "projection": ""}
    assert len(whole["history"]) == 4
    assert torch.equal(load(tmp_path / "a.pt").weight, load(tmp_path / "b.pt").weight)
    assert "another run: seed 0 there, 1 here" in fails(
        "train", path, pairs, *words, tmp_path / "b.pt", *more, "--seed", 1
    )


def test_the_command_takes_texts_and_arrays(tmp_path: Path) -> None:
    words = ["Schumacher", "Weber", "Schuler", "Fischer", "Schneider", "Meyer", "Becker", "Wagner"]
    book = write(tmp_path / "book.jsonl", *({"id": i, "name": word} for i, word in enumerate(words)))
    run("import", tmp_path / "book", book, "--text", "name")
    asked = [(f"{word}{'x' * j}", i) for i, word in enumerate(words) for j in range(3)]
    table = write(tmp_path / "pairs.tsv", "query\tpositives", *(f"{text}\t{i}" for text, i in asked))
    common = ("--epochs", 1, "--patience", 0, "--json")
    one = json.loads(run("train", tmp_path / "book", table, "--out", tmp_path / "a.pt", *common).stdout)
    np.save(tmp_path / "q.npy", HashedNGrams()([text for text, _ in asked]))
    only = write(tmp_path / "p.jsonl", *({"right": i} for _, i in asked))
    more = ("--queries", tmp_path / "q.npy", "--positives", "right")
    two = json.loads(run("train", tmp_path / "book", only, "--out", tmp_path / "b.pt", *common, *more).stdout)
    assert {**one, "projection": ""} == {**two, "projection": ""}
    assert torch.equal(load(tmp_path / "a.pt").weight, load(tmp_path / "b.pt").weight)
    (hits,) = json.loads(run("search", tmp_path / "book", "Weberx", "--projection", tmp_path / "a.pt", "--json").stdout)
    assert hits[0]["id"] == 1


def test_what_the_command_refuses(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    out = ("--out", tmp_path / "p.pt")
    bad = write(
        tmp_path / "bad.jsonl", {"query": [1] * D, "positives": "r0"}, {"query": [1] * D, "positives": ["r0", "?"]}
    )
    assert "not in the database: '?' (bad.jsonl line 2)" in fails("train", path, bad, *out)
    narrow = write(tmp_path / "narrow.jsonl", *({"query": [i], "positives": i} for i in (1, 2, 4, 5)))
    assert "narrow.jsonl line 1: the query has 1 numbers but this database is 8 wide" in fails(
        "train", path, narrow, *out
    )
    assert "k and a tolerance are both given (k 3, rtol 0.1" in fails(
        "train", path, pairs, *out, "-k", 3, "--rtol", 0.1
    )
    assert "holdout is 1;" in fails("train", path, pairs, *out, "--holdout", 1)
    assert "give a file in a folder that is there" in fails("train", path, pairs, "--out", tmp_path / "no" / "p.pt")
    texts = write(tmp_path / "texts.jsonl", {"query": "a", "positives": "r0"})
    assert "does not say what made its keys; add --encoder" in fails("train", path, texts, *out)
    assert "none.pt is not there" in fails("search", path, json.dumps([1] * D), "--projection", tmp_path / "none.pt")
    assert "give its file with --checkpoint" in fails("train", path, pairs, *out, "--resume")
    np.save(tmp_path / "one.npy", np.float32(1))
    assert "queries have shape ()" in fails("train", path, pairs, *out, "--queries", tmp_path / "one.npy")
    assert not (tmp_path / "p.pt").exists()


def test_the_command_overwrites_nothing_of_its_own(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    array, file, out = tmp_path / "q.npy", tmp_path / "run.ckpt", tmp_path / "p.pt"
    np.save(array, np.ones((M, D), np.float32))
    (tmp_path / "q.pt.tmp").mkdir()
    before = digests(tmp_path)
    catalogue = next(one for one in path.iterdir() if one.is_file())
    ours = "would overwrite a file of this training"
    for words, message in (
        (("--out", pairs), f"--out {pairs} {ours}"),
        (("--out", tmp_path / "db" / ".." / "pairs.jsonl"), ours),
        (("--out", array, "--queries", array), f"--out {array} {ours}"),
        (("--out", file, "--checkpoint", file), f"--out {file} {ours}"),
        (("--out", catalogue), "is inside the database"),
        (("--out", out, "--checkpoint", path / "run.ckpt"), "--checkpoint"),
        (("--out", out, "--checkpoint", pairs, "--resume"), f"--checkpoint {pairs} {ours}"),
        (("--out", tmp_path / "q.pt"), "q.pt cannot be written"),
    ):
        assert message in fails("train", path, pairs, "--epochs", 1, *words)
    assert digests(tmp_path) == before


def test_a_training_without_gain_says_so(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = stored
    rows = [{"query": key.tolist(), "positives": f"r{i}" if i % 3 == 0 else i} for i, key in enumerate(keys_of())]
    found = write(tmp_path / "found.jsonl", *rows[3:])
    shown = run("train", path, found, "--out", tmp_path / "p.pt", "--lr", 5.0, "--epochs", 2).stdout
    assert "this projection changes nothing" in " ".join(shown.split())
