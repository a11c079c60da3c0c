"""Training an encoder of the keys beside a projection of the queries, and applying it to the stored keys."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding
from worlds.trainings import SMALL, run, same

import softdb
from softdb.check import Id
from softdb.errors import BadInput, TrainingWarning
from softdb.text import HashedNGrams
from softdb.train import KeyEncoder, QueryProjection, TextTowers, apply, fit, load, ranking, save
from softdb.train.held_out import split

N, D, M = 150, 6, 300
LEARNING: dict[str, Any] = {"lr": 0.02, "batch_size": 64, "epochs": 25, "patience": None, "temperature": 0.3}


def folded(n: int = N) -> tuple[Tensor, Tensor, list[Id]]:
    """Keys, queries that know the keys' positive parts alone, and the ids that they shall find."""
    draws = torch.Generator().manual_seed(3)
    keys = torch.randn(n, D, generator=draws)
    wanted = torch.randint(n, (M,), generator=draws)
    queries = 2 * keys[wanted].relu() + 0.05 * torch.randn(M, D, generator=draws)
    return keys, queries, [f"r{i}" if i % 3 == 0 else i for i in wanted.tolist()]


def mixed_ids(path: Path | None = None, n: int = N, **words: Any) -> softdb.SoftDB:
    values = None if "value_dim" not in words else np.arange(n * 2.0).reshape(n, 2)
    ids, payloads = [f"r{i}" if i % 3 == 0 else i for i in range(n)], [{"i": i} for i in range(n)]
    return holding(folded(n)[0], values, payloads, ids=ids, path=path, metric="l2", **words)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"k": 30}, {"keys": 20}])
def test_an_encoder_of_keys_learns_more_than_a_projection_of_queries(how: dict[str, Any]) -> None:
    _, queries, wanted = folded()
    with mixed_ids() as db:
        alone = fit(db, queries, wanted, **LEARNING)
        both = fit(db, queries, wanted, **{**LEARNING, "keys": True, **how})
        assert both.before == alone.before
        assert both.after.recall_1 > alone.after.recall_1 + 0.1
        assert both.after.mrr_100 > alone.after.mrr_100 + 0.1
        assert both.projection.keys is not None
        assert len(both.projection.keys.inner) == how.get("keys", D)
        apply(db, both.projection)  # the measured figures are those found after applying
        actual = ranking(db, queries, wanted, both.projection)
        assert actual.recall_10 > 0.95


@pytest.mark.parametrize("k", [None, N])
def test_one_step_is_adams_on_the_equation(k: int | None) -> None:
    keys, queries, wanted = folded()
    names: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(N)]
    with mixed_ids() as db:
        done = fit(db, queries, wanted, **{**LEARNING, "epochs": 2, "batch_size": M}, k=k, keys=True, bias=True)
    parts = split(queries, [[one] for one in wanted], 0.2, False, 0)
    twin = QueryProjection(D, True, D, 0).double()
    assert twin.keys is not None
    adam = torch.optim.Adam(twin.parameters(), lr=0.02)
    for epoch in done.history:
        loss = torch.zeros((), dtype=torch.float64)
        for i in parts.train.tolist():
            inside = (keys.double() @ twin.keys.inner.T + twin.keys.inner_bias).clamp(min=0)
            moved = keys.double() + inside @ twin.keys.outer.T + twin.keys.outer_bias
            asked = twin.weight @ queries[i].double() + twin.bias
            logits = -(moved - asked).square().sum(1) / 0.3
            loss = loss - logits.log_softmax(0)[names.index(wanted[i])] / len(parts.train)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        assert epoch.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, one in done.projection.named_parameters():
        torch.testing.assert_close(one.double(), twin.get_parameter(name), rtol=0, atol=1e-4)


def test_a_fallen_metric_warns() -> None:
    keys, _, _ = folded()
    with mixed_ids() as db, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainingWarning)
        done = fit(db, keys, [f"r{i}" if i % 3 == 0 else i for i in range(N)], **{**SMALL, "lr": 0.5}, keys=True)
    assert "recall_1" in done.fell
    assert "recall@1 1.000 -> " in str(caught[-1].message)
    assert "fell" in str(done)


@pytest.mark.parametrize("how", [{"patience": 3}, {"k": 20}, {"rtol": 0.3}])
def test_a_resumed_run_is_bit_equal_to_one_without_a_break(how: dict[str, Any], tmp_path: Path) -> None:
    _, queries, wanted = folded()
    words: dict[str, Any] = {**SMALL, "keys": True, **how}
    with mixed_ids() as db:
        whole = fit(db, queries, wanted, **words)
        fit(db, queries, wanted, **{**words, "epochs": 3}, checkpoint=tmp_path / "run.pt")
        same(whole, fit(db, queries, wanted, **words, checkpoint=tmp_path / "run.pt", resume=True))
        with pytest.raises(BadInput, match=r"another run: hidden was 6 and is now None"):
            fit(db, queries, wanted, **{**words, "keys": False}, checkpoint=tmp_path / "run.pt", resume=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"keys": True, "rtol": 0.1, "k": 5}, "k and a tolerance are both given"),
        ({"keys": 0}, "keys is 0"),
        ({"keys": "all"}, "keys is 'all'"),
    ],
)
def test_settings_that_make_no_sense(words: dict[str, Any], message: str) -> None:
    _, queries, wanted = folded()
    with mixed_ids() as db, pytest.raises(BadInput, match=message):
        fit(db, queries, wanted, **words)


# -- the stored keys ---------------------------------------------------------------------------------------------------


def trained(name: str | None = None, seed: int = 5) -> QueryProjection:
    """A projection with an encoder of keys, of random numbers."""
    projection = QueryProjection(D, True, 4, 1)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in projection.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=draws))
    projection.metadata["encoder"] = name
    return projection


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_apply_changes_every_key_and_no_other_column(dtype: Any, path: Path) -> None:
    projection, said = trained(), list[Any]()
    assert projection.keys is not None
    with mixed_ids(path, dtype=dtype, value_dim=2) as db:
        db.delete(["r3"])
        db.insert(["bare"], [None])
        ids: list[Id] = ["r0", 1, 2, 4, N - 1, "bare"]
        before = db.get(ids)
        report = apply(db, projection, progress=lambda *one: said.append(one))
        after = db.get(ids)
        assert (report.records, report.embedded, report.encoder) == (N - 1, N - 1, projection.name)
        assert said
        for old, new in zip(before, after, strict=True):
            assert (old.id, old.payload) == (new.id, new.payload)
            assert np.array_equal(np.asarray(old.value), np.asarray(new.value))
            if old.key is None:
                assert new.key is None
            else:
                true = projection.keys(torch.as_tensor(np.asarray(old.key, np.float32))[None])[0].detach().numpy()
                np.testing.assert_allclose(
                    np.asarray(new.key), true, rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-3
                )
        assert apply(db, projection).embedded == 0  # it is done
        assert db.verify() == N
    with softdb.open(path, mode="r") as db:
        assert db.encoder_name == projection.name


def test_a_killed_run_resumes(path: Path) -> None:
    """Killed half way nothing has changed, and the next call takes what there is."""
    mixed_ids(path).close()
    save(path.with_suffix(".pt"), trained())
    code = """
import os, signal, sys, softdb, softdb.train
softdb.train.applied.BATCH_KEYS = 40
def die(what, done, whole):
    if done >= 80: os.kill(os.getpid(), signal.SIGKILL)
with softdb.open(sys.argv[1]) as db:
    softdb.train.apply(db, softdb.train.load(sys.argv[2]), progress=die)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path), str(path.with_suffix(".pt"))], check=False)
    assert done.returncode == -signal.SIGKILL
    projection = load(path.with_suffix(".pt"))
    assert projection.keys is not None
    with softdb.open(path) as db:
        assert db.encoder_name is None
        assert np.array_equal(np.asarray(db["r0"].key), folded()[0][0].numpy())
        report = apply(db, projection)
        assert report.embedded == N - 80
        actual = torch.as_tensor(db.get([1, 2, "r3"]).keys)
        torch.testing.assert_close(actual, projection.keys(folded()[0][1:4]).detach())


def test_later_texts_go_through_both_encoders(path: Path) -> None:
    encoder, texts = HashedNGrams(D), ["schumacher", "weber", "fischer"]
    projection = trained(encoder.name)
    assert projection.keys is not None
    plain = torch.as_tensor(np.asarray(encoder(texts))).float()
    with softdb.open(path, encoder=encoder) as db:
        db.insert([1, 2], texts[:2], texts=texts[:2])
        db.build_index()
        apply(db, projection)
    with pytest.raises(BadInput, match=r"were made by the encoder 'softdb train \w{16}', not by 'ngrams'"):
        softdb.open(path, encoder=encoder)
    with softdb.open(path, encoder=TextTowers(projection, encoder)) as db:
        db.insert([3], texts=texts[2:])
        keys = projection.keys(plain).detach()
        torch.testing.assert_close(torch.as_tensor(db.get([1, 2, 3]).keys), keys)
        asked = projection(plain).detach()
        torch.testing.assert_close(db.core.as_queries(texts), asked)
        torch.testing.assert_close(projection.of(db, texts), asked)
        torch.testing.assert_close(projection.of(db, plain), asked)
        assert db.search(texts).ids == db.search(asked).ids
        again = trained(projection.name, 6)  # another training upon this one
        apply(db, again)
        assert db.encoder_name == again.name != projection.name
    with softdb.open(path, encoder=TextTowers(again, TextTowers(projection, encoder))) as db:
        torch.testing.assert_close(db.core.as_queries(texts), again(asked).detach())


def test_unsuitable_projections_are_refused() -> None:
    with mixed_ids() as db:
        before = db.generation
        for projection, message in (
            (QueryProjection(D), "the projection has no encoder of keys"),
            (
                trained("ngrams"),
                "was trained for keys 6 wide by 'ngrams' but those of this database are 6 wide by None",
            ),
            (QueryProjection(D + 1, hidden=3), "was trained for keys 7 wide"),
        ):
            with pytest.raises(BadInput, match=message):
                apply(db, projection)
        assert db.generation == before
    with pytest.raises(BadInput, match="the projection has no encoder of keys"):
        TextTowers(QueryProjection(D), HashedNGrams(D))


def test_a_file_holds_both(tmp_path: Path) -> None:
    projection = trained("ngrams")
    save(tmp_path / "p.pt", projection, {"seed": 3})
    actual = load(tmp_path / "p.pt")
    assert actual.name == projection.name
    assert actual.metadata == {"encoder": "ngrams", "seed": 3}
    content = torch.load(tmp_path / "p.pt", weights_only=True)
    state = content["state_dict"]
    for change in (
        {"keys.inner": state["keys.inner"].T},
        {"keys.inner_bias": torch.zeros(3)},
        {"keys.outer_bias": torch.zeros(())},
        {"keys.more": torch.zeros(2)},
        {"keys.inner": None},
    ):
        kept = {**state, **change}
        torch.save(
            {**content, "state_dict": {name: one for name, one in kept.items() if one is not None}}, tmp_path / "x.pt"
        )
        with pytest.raises(BadInput, match=r"x\.pt is not a projection that softdb train wrote"):
            load(tmp_path / "x.pt")
    assert torch.equal(KeyEncoder(D)(folded()[0]), folded()[0])


# -- the command -------------------------------------------------------------------------------------------------------


def lines(queries: Sequence[Any], wanted: list[Id], path: Path) -> Path:
    path.write_text(
        "".join(json.dumps({"query": q, "positives": p}) + "\n" for q, p in zip(queries, wanted, strict=True))
    )
    return path


def test_the_command_changes_the_keys_where_that_helps(path: Path, tmp_path: Path) -> None:
    mixed_ids(path).close()
    _, queries, wanted = folded()
    pairs, out = lines(queries.tolist(), wanted, tmp_path / "pairs.jsonl"), tmp_path / "p.pt"
    how = ("--keys", "--lr", 0.02, "--temperature", 0.3, "--batch-size", 64, "--epochs", 12)
    actual = json.loads(run("train", path, pairs, "--out", out, *how, "--json").stdout)
    assert actual["after"]["mrr_100"] > actual["before"]["mrr_100"]
    assert {"recall_1", "recall_10", "mrr_100"} <= actual["before"].keys()
    projection = load(out)
    with softdb.open(path, mode="r") as db:
        assert db.encoder_name == projection.name
        assert db.generation >= actual["generation"]
        nearest = db.search(projection.of(db, queries[:1]), 2).ids[0]
    shown = json.loads(
        run("search", path, json.dumps(queries[0].tolist()), "-k", 2, "--projection", out, "--json").stdout
    )
    assert [hit["id"] for hit in shown[0]] == nearest
    shown = run("reembed", path, "--projection", out).stdout
    assert "0 records embedded" in " ".join(shown.split())


def test_the_command_keeps_the_keys_without_a_gain(path: Path, tmp_path: Path) -> None:
    mixed_ids(path).close()
    keys, _, _ = folded()
    actual = lines(keys.tolist(), [f"r{i}" if i % 3 == 0 else i for i in range(N)], tmp_path / "pairs.jsonl")
    out = tmp_path / "p.pt"
    shown = " ".join(run("train", path, actual, "--out", out, "--keys", "--lr", 5.0, "--epochs", 1).stdout.split())
    assert "mrr_100 did not rise, so the keys are unchanged; to change them nevertheless: softdb reembed" in shown
    with softdb.open(path, mode="r") as db:
        assert db.encoder_name is None
        assert np.array_equal(np.asarray(db["r0"].key), keys[0].numpy())
    assert json.loads(run("reembed", path, "--projection", out, "--json").stdout)["embedded"] == N
    words = run("reembed", path, "--projection", out, "--encoder", "ngrams", code=1)
    assert "leave out --encoder, --field, --missing and --dim" in " ".join(words.output.split())


def test_text_queries_on_trained_keys_use_the_saved_file(path: Path, tmp_path: Path) -> None:
    encoder, words = (
        HashedNGrams(32),
        [f"{first}{last}" for first in ("schu", "we", "fi", "ma") for last in ("ber", "ster")],
    )
    with softdb.open(path, encoder=encoder) as db:
        db.insert(words, words, texts=words)
    pairs = lines(
        [f"{word} {i}" for word in words for i in range(3)],
        [word for word in words for _ in range(3)],
        tmp_path / "w.jsonl",
    )
    out = tmp_path / "p.pt"
    run("train", path, pairs, "--out", out, "--keys", "--patience", 0, "--epochs", 2, "--holdout", 0.3)
    run("reembed", path, "--projection", out)
    shown = json.loads(run("search", path, "weber 1", "-k", 1, "--projection", out, "--json").stdout)
    assert shown[0][0]["id"] == "weber"
    actual = run("search", path, "weber 1", code=1)
    assert "the keys of" in actual.output
    assert "--projection FILE.pt" in " ".join(actual.output.split())
