"""`benchmarks/sequences.py`: the split, the losses and the ranks are those of loops, and a run is written once."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HISTORIES = [[3, 1, 4, 0, 5], [9, 2, 6], [5, 3, 8, 9, 7, 2, 1], [3, 2, 3, 8], [4, 6]]  # the last has too few items


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, imported as its command imports it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("sequences")


@pytest.fixture
def data(bench: Any) -> Any:
    lines = [f"{user} {item + 100}" for user, items in enumerate(HISTORIES) for item in items]
    return bench.Sequences("\n".join(lines).encode())


def settings_of(bench: Any, loss: str = "torch", **others: Any) -> Any:
    return bench.Settings(loss, 0, **({"steps": 4, "every": 2, "validated": 3, "batch": 3, "dim": 8} | others))


def test_the_last_items_are_kept_from_training(bench: Any, data: Any) -> None:
    assert data.n == 10
    assert [items.tolist() for items in data.users] == HISTORIES[:4]
    padded, sizes = data.padded(2, 3)
    latest = [items[:-2][-3:] for items in HISTORIES[:4]]
    assert [row[:size] for row, size in zip(padded.tolist(), sizes.tolist(), strict=True)] == latest
    assert data.trained_items.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]


def test_a_state_depends_on_its_past_alone(bench: Any) -> None:
    model = bench.SASRec(10, settings_of(bench)).eval()
    items = torch.randint(10, (4, 9))
    changed = torch.cat([items[:, :6], (items[:, 6:] + 1) % 10], 1)
    before, after = model(items), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])
    torch.testing.assert_close(model(items[:, :6]), before[:, :6])
    swapped = items[:, [1, 0, *range(2, 9)]]  # the order of the past matters
    assert not torch.allclose(model(swapped)[:, 2:], before[:, 2:], atol=1e-3)


@pytest.mark.parametrize("loss", ["torch", "full"])
def test_the_loss_is_the_mean_over_all_next_items(bench: Any, data: Any, loss: str) -> None:
    trainer = bench.Trainer(data, settings_of(bench, loss, batch=4))
    trainer.model.eval()
    terms = []
    for items in HISTORIES[:4]:
        past = torch.tensor(items[:-2])
        if len(past) > 1:
            scores = trainer.model(past[None, :-1])[0] @ trainer.model.items.weight.T
            terms += (-scores.log_softmax(1)).gather(1, past[1:, None])[:, 0].tolist()
    assert len(terms) == 2 + 4 + 1
    assert trainer.loss().item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_one_negative_is_the_binary_cross_entropy(bench: Any) -> None:
    states, weight = torch.randn(6, 8), torch.randn(10, 8)
    pairs = torch.randint(10, (2, 6))
    logits = (states * weight[pairs]).sum(2)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0], [0.0]]).expand(2, 6))
    torch.testing.assert_close(bench.one_negative(states, weight, *pairs), expected)


def test_negatives_are_uniform_among_what_a_sequence_lacks(bench: Any) -> None:
    sequences, items = torch.tensor([[1, 2, 3], [5, 5, 0]]), torch.arange(8)
    real = torch.tensor([[True, True, True], [True, True, False]])
    draws = torch.Generator().manual_seed(0)
    chosen = torch.cat([bench.negatives_of(sequences, real, items, draws) for _ in range(2000)], 1)
    for row, present in zip(chosen, ({1, 2, 3}, {5}), strict=True):
        shares = row.bincount(minlength=8) / len(row)
        right = torch.tensor([0.0 if item in present else 1 / (8 - len(present)) for item in range(8)])
        assert (shares - right).abs().max() < 0.02
        assert all(shares[item] == 0 for item in present)


def test_ranks_are_those_of_sorted_scores_without_the_history(
    bench: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "TOP", 2)
    settings = settings_of(bench)
    model = bench.SASRec(data.n, settings).eval()
    torch.nn.init.normal_(model.items.weight)
    for omitted in (0, 1):
        gains, hits = [], []
        for items in HISTORIES[:4]:
            past, target = items[: len(items) - omitted - 1], items[-omitted - 1]
            scores = (model(torch.tensor([past]))[0, -1] @ model.items.weight.T).tolist()
            others = [score for item, score in enumerate(scores) if item not in past and item != target]
            rank = 1 + sum(score >= scores[target] for score in others)
            if target in past:  # it cannot be recommended again
                rank = data.n
            gains.append(1 / math.log2(1 + rank) if rank <= 2 else 0)
            hits.append(rank <= 2)
        report = bench.evaluated(model, data, settings, omitted, torch.arange(4))
        assert report == {"ndcg_10": round(sum(gains) / 4, 5), "recall_10": round(sum(hits) / 4, 5)}


def test_equal_scores_count_against_the_model(bench: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOP", 2)
    model = bench.SASRec(data.n, settings_of(bench)).eval()
    torch.nn.init.zeros_(model.items.weight)
    assert bench.evaluated(model, data, settings_of(bench), 0, torch.arange(4))["recall_10"] == 0


def test_a_run_is_written_once_and_others_are_added(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "sequences.txt", tmp_path / "result.json"
    file.write_text("\n".join(f"{user} {(user + step) % 20}" for user in range(60) for step in range(8)))

    def run(*losses: str, steps: str = "30") -> Any:
        words = ["--data", str(file), "--steps", steps, "--every", "10", "--out", str(out), "--draws", "8", "--k", "4"]
        monkeypatch.setattr(sys, "argv", ["sequences.py", *words, "--loss", *losses])
        bench.main()
        return json.loads(out.read_text())

    first = run("torch")["runs"]["torch"]
    result = run("torch", "bce", "drawn", "truncated", "full")
    assert result["runs"]["torch"] == first
    assert result["data"]["users"] == 60
    for loss, line in result["runs"].items():
        assert line["settings"]["loss"] == loss
        assert [point["step"] for point in line["curve"]] == [0, 10, 20, 30]
        assert line["curve"][-1]["seconds"] == line["seconds"]
        scores = {point["step"]: point["ndcg_10"] for point in line["curve"]}
        assert scores[line["best_step"]] == max(scores.values())
    assert first["curve"][-1]["loss"] < first["curve"][1]["loss"]
    assert [line.count("|") for line in capsys.readouterr().out.splitlines()[-5:]] == [10] * 5
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):  # runs of another length are not comparable
        run("bce", steps="40")
    assert "another number of steps; choose another --out" in capsys.readouterr().err


def test_data_come_from_a_file_or_from_the_address_that_is_passed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"https://example.org/a.txt": b"1 2"}
    monkeypatch.setattr(bench.urllib.request, "urlopen", lambda address: io.BytesIO(stored.pop(address)))
    (tmp_path / "here.txt").write_bytes(b"3 4")
    assert bench.read(str(tmp_path / "here.txt")) == b"3 4"
    assert bench.read("https://example.org/a.txt") == b"1 2"
    assert not stored
