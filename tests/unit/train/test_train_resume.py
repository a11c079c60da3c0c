"""Training a projection: interruption and resumption to the bit; errors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding
from worlds.trainings import SMALL, D, M, N, drawn, keys_of, same, world

from softdb.errors import BadInput
from softdb.train import fit

# -- resuming after a break --------------------------------------------------------------------------------------------


class Break(Exception):
    """The machine is taken away."""


def breaking(epoch: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, whole: int) -> None:
        if what.startswith(f"epoch {epoch},") and done % 2 == 0:
            raise Break

    return progress


@pytest.mark.parametrize("more", [{}, {"patience": 2, "temperature": "learn"}, {"bias": True, "k": 30}])
@pytest.mark.parametrize("epoch", [2, 4])
def test_a_resumed_run_is_bit_equal_to_one_without_a_break(more: dict[str, Any], epoch: int, tmp_path: Path) -> None:
    db, queries, positives = world()
    words, file = {**SMALL, **more}, tmp_path / "run.pt"
    whole = fit(db, queries, positives, **words)
    with pytest.raises(Break, match=r"^$"):
        fit(db, queries, positives, **words, checkpoint=file, progress=breaking(epoch))
    same(whole, fit(db, queries, positives, **words, checkpoint=file, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_resumed_run_continues_its_random_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = {**SMALL, "rtol": 0.3, "temperature": 0.2}
    given = drawn(monkeypatch)
    file = tmp_path / "run.pt"
    with pytest.raises(Break, match=r"^$"):
        fit(*given, **words, checkpoint=file, progress=breaking(3))
    same(fit(*given, **words), fit(*given, **words, checkpoint=file, resume=True))


def test_a_finished_run_has_the_temperature_of_its_best_epoch(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        **SMALL,
        "temperature": "learn",
        "patience": 1,
        "lr": 0.2,
        "checkpoint": tmp_path / "run.pt",
    }
    done = fit(*world(), **words)
    assert 0 < done.best < len(done.history)
    assert done.temperature == done.history[done.best - 1].temperature
    same(done, fit(*world(), **words, resume=True))


def test_a_finished_run_resumes_for_more_epochs(tmp_path: Path) -> None:
    db, queries, positives = world()
    file = tmp_path / "run.pt"
    fit(db, queries, positives, **{**SMALL, "epochs": 2}, checkpoint=file)
    same(fit(db, queries, positives, **SMALL), fit(db, queries, positives, **SMALL, checkpoint=file, resume=True))
    same(fit(db, queries, positives, **SMALL), fit(db, queries, positives, **SMALL, checkpoint=file, resume=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"temperature": 0.1}, r"temperature was 0\.05 and is now 0\.1"),
        ({"temperature": "learn"}, r"temperature was 0\.05 and is now 'learn'"),
        ({"rtol": 0.1}, r"rtol was None and is now 0\.1"),
        ({"patience": 3}, "patience was None and is now 3"),
        ({"batch_size": 63}, "batch_size was 64 and is now 63"),
        ({"bias": True}, "bias was False and is now True"),
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
    with pytest.raises(BadInput, match="another run: the pairs differ"):
        fit(db, queries * 1.001, positives, **words, resume=True)
    with pytest.raises(BadInput, match="another run: the pairs differ"):
        fit(db, queries, [*positives[1:], positives[0]], **words, resume=True)
    db.insert(["new"], torch.ones(1, D))
    with pytest.raises(BadInput, match="another run: generation was 1 and is now 2"):
        fit(db, queries, positives, **words, resume=True)
    names = [f"r{i}" if i % 3 == 0 else i for i in range(N)]
    for ids, keys in ((names, keys_of() * 2), ([names[-1], *names[:-1]], keys_of())):
        other_run = pytest.raises(BadInput, match="another run: the keys differ")
        with holding(keys, ids=ids) as other, other_run:
            fit(other, queries, positives, **words, resume=True)


def test_a_checkpoint_is_of_the_index_where_candidates_count(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="an index is built")
    db, queries, positives = world(M, 2000)
    words = {**SMALL, "epochs": 1}
    fit(db, queries, positives, **words, k=20, checkpoint=tmp_path / "k.pt")
    fit(db, queries, positives, **words, checkpoint=tmp_path / "exact.pt")
    db.build_index("ivf")
    with pytest.raises(BadInput, match="another run: the index differs"):
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


def test_a_checkpoint_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, queries, positives = world()
    said: list[object] = []

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with holding(keys_of(), ids=[f"r{i}" if i % 3 == 0 else i for i in range(N)], path=tmp_path / "db") as db:
        for name, message in (("run.pt", "cannot be written"), ("db/run.pt", "is inside the database")):
            with pytest.raises(BadInput, match=message):
                fit(db, queries, positives, checkpoint=tmp_path / name, progress=lambda *one: said.append(one))
    assert not said


def test_a_checkpoint_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, queries, positives = world()
    file = tmp_path / "run.pt"
    fit(db, queries, positives, **{**SMALL, "epochs": 1}, checkpoint=file)
    content = file.read_bytes()
    with pytest.raises(BadInput, match="exists already; continue from it with resume, or remove it"):
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
    with pytest.raises(BadInput, match="the 0 queries form 0 groups"):
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
    with holding(keys_of()) as db:
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


def test_a_nan_projection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    db, queries, positives = world()
    after = torch.optim.Adam.step

    def diverge(self: Any, *words: Any) -> None:
        after(self, *words)
        with torch.no_grad():
            self.param_groups[0]["params"][0][0, 0] = torch.inf

    monkeypatch.setattr(torch.optim.Adam, "step", diverge)
    with pytest.raises(BadInput, match="the projection became NaN or infinity; lower lr"):
        fit(db, queries, positives, **{**SMALL, "batch_size": M, "epochs": 1})


def test_a_nan_loss_is_named() -> None:
    db, queries, positives = world()
    with pytest.raises(BadInput, match=r"the loss became (inf|nan) in epoch 1; lower lr, or raise temperature"):
        fit(db, queries, positives, **SMALL, temperature=1e-39)
