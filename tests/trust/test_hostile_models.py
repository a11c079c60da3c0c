"""Hostile notes, models, weights and texts load and run nothing, and no terminal obeys them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_child import Nursery
from hostile_files import pickled
from worlds import holding

import softdb

pytest_plugins = ["hostile_world"]

# -- encoders and weights ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for sentence-transformers that records the models it would load."""
    import sys
    import types

    loaded: list[str] = []

    class Model:
        def __init__(self, path: str, **options: Any) -> None:
            assert not options.get("trust_remote_code"), "remote code is trusted"
            loaded.append(path)

        def get_sentence_embedding_dimension(self) -> int:
            return 4

        def encode(self, texts: list[str], **options: Any) -> Any:
            return np.ones((len(texts), 4), np.float32)

    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    return loaded


def model_folder(path: Path, mark: Path) -> Path:
    """A model folder that sentence-transformers would load and run."""
    path.mkdir(parents=True)
    (path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]')
    (path / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    (path / "pytorch_model.bin").write_bytes(pickled(mark))
    return path


NOTES = ("./model", "model", "db/model", "../db/model", "{db}/model", "{db}", "user/repository", "x; touch mark")


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("here", [".", "db"])
def test_a_note_in_the_directory_loads_no_model(
    goods: dict[str, Path], tmp_path: Path, note: str, here: str, no_models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from softdb.tools.cli.places import opened

    db = tmp_path / "db"
    shutil.copytree(goods["good"], db)
    model_folder(db / "model", tmp_path / "mark")
    name = note.format(db=db)
    with softdb.open(db) as handle:
        handle.core.store.note_encoder(name)
    monkeypatch.chdir(tmp_path / here)
    with pytest.raises(softdb.BadInput, match="load it with --encoder"):
        opened(db, True)
    assert no_models == []


def test_a_model_in_the_databases_own_directory_is_not_loaded_even_if_named(
    goods: dict[str, Path], tmp_path: Path, no_models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from softdb.tools.cli.places import opened

    db = tmp_path / "db"
    shutil.copytree(goods["good"], db)
    model_folder(db / "model", tmp_path / "mark")
    (tmp_path / "linked").symlink_to(db / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("db/model", "./db/model", "db/../db/model", str(db / "model"), "linked", "db"):
        with pytest.raises(softdb.BadInput, match="lies in the database's own directory"):
            opened(db, True, name)
    assert no_models == []
    model_folder(tmp_path / "mine", tmp_path / "mark")
    with opened(db, True, "./mine") as handle:
        handle.search("a text")
    assert no_models == [str(tmp_path / "mine")]  # what the user names is his to trust


@pytest.mark.parametrize("folder", ["all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_a_folder_beside_the_database_is_not_taken_for_the_demos_model(
    tmp_path: Path, folder: str, no_models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sentence-transformers looks in the working directory first and runs the code it finds there."""
    import importlib.util

    from softdb.tools.cli.places import named_encoder

    model_folder(tmp_path / folder, tmp_path / "mark")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(softdb.BadInput, match=r"is also a folder here; to load that folder, write it as \./"):
        named_encoder("demo", 4)(["a text"])
    assert no_models == []


def weights(mark: Path) -> dict[str, bytes]:
    """Files of weights with false claims."""
    import io

    import torch

    def saved(value: Any, **options: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file, **options)
        return file.getvalue()

    from hostile_files import Marker

    old = {"_use_new_zipfile_serialization": False}
    wide = torch.zeros(1).expand(3000, 3000)
    state = {"format": "softdb projection 1", "metadata": {}}
    return {
        "a pickle": pickled(mark),
        "code in a file of torch": saved({**state, "state_dict": Marker(mark)}),
        "code in an old file of torch": saved({**state, "state_dict": Marker(mark)}, **old),
        "a whole module": saved(torch.nn.Linear(2, 2)),
        "one number spread out": saved({**state, "state_dict": {"weight": wide}}),
        "cut short": saved({**state, "state_dict": {"weight": torch.eye(4)}})[:-30],
        "no weights": saved({**state, "state_dict": {"weight": "x"}}),
        "nothing": b"",
    }  # fmt: skip


@pytest.mark.parametrize("name", weights(Path("mark")))
@pytest.mark.parametrize("kind", ["projection", "checkpoint"])
def test_loading_weights_runs_no_code(
    tmp_path: Path, name: str, kind: str, asked: Nursery, tally: Counter[str]
) -> None:
    mark, file = tmp_path / "mark", tmp_path / "weights.pt"
    file.write_bytes(weights(mark)[name])
    ended = asked.run(f"hostile_child:{kind}", file)
    tally["hostile: files tried"] += 1
    tally["hostile: code runs"] += mark.exists()
    assert not mark.exists()
    assert ended.how == "BadInput", ended
    assert "weights.pt" in ended.told


def test_control_characters_of_a_database_do_not_reach_the_terminal(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from softdb.tools.cli.commands import app

    evil = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m\x85\u202egnp.exe\u2066\x7f\x00\r\n[red]b[/]"
    path, out = tmp_path / "db", tmp_path / "x.jsonl"
    fields = [evil.replace("\x00", "")]
    with holding(np.eye(2), payloads=[{evil: evil}, evil], ids=[evil, "b"], path=path, fields=fields) as db:
        db.core.store.note_encoder(evil.replace("\x00", ""))
    runner = CliRunner()
    arguments = [
        ("search", str(path), "[1, 0]"), ("search", str(path), "[1, 0]", "--json"), ("attend", str(path), "[1, 0]"),
        ("info", str(path)), ("info", str(path), "--json"), ("fields", str(path)), ("fields", str(path), "--json"),
        ("search", str(path), "a text"), ("search", str(path), "[1, 0]", "--where", json.dumps({evil: {evil: 1}})),
        ("fields", str(path), "--drop", "x"), ("export", str(path), str(out)),
    ]  # fmt: skip
    for line in arguments:
        result = runner.invoke(app, line, catch_exceptions=False)
        shown = result.output.replace("\n", "")
        assert not [one for one in shown if ord(one) < 32 or 127 <= ord(one) < 160 or one in "\u202e\u2066"], line
    (actual,) = json.loads(runner.invoke(app, ["search", str(path), "[1, 0]", "-k", "1", "--json"]).stdout)
    assert actual[0]["id"] == evil  # JSON says it all the same
    assert actual[0]["payload"] == {evil: evil}
    assert [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").split("\n")[1:3]] == [evil, "b"]
