"""Several processes: DistributedDataParallel, fully_shard, and workers of a DataLoader. Lines of docs/works-with.md."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from worlds.towers import CASES, Tower, alike, batch, opened, stored, tower, trained

import softdb
from softdb.errors import BadInput
from softdb.nn import Memory

RANKS = 2


def shared(model: Tower, _: Any) -> torch.nn.Module:
    return DistributedDataParallel(model)


def sharded(model: Tower, mesh: Any) -> torch.nn.Module:
    """The model sharded by FSDP2, but for a memory, which DistributedDataParallel averages."""
    from torch.distributed.fsdp import fully_shard

    memory = getattr(model, "layer", None)
    ignored = set(memory.parameters()) if isinstance(memory, Memory) else None
    if isinstance(memory, Memory):
        with pytest.raises(BadInput, match=r"cannot be sharded.*ignored_params=set\(memory\.parameters\(\)\)"):
            fully_shard(Memory(opened(None), k=5), mesh=mesh)
        model.layer = DistributedDataParallel(memory)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


WRAPS: dict[str, Callable[[Tower, Any], torch.nn.Module]] = {"DDP": shared, "FSDP2": sharded}


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def in_rank(rank: int, folder: str) -> None:
    """One process: its half of the batch, and the parameters that each model ends with."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the optimiser's and torch's own
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    x, right = (column[rank::RANKS] for column in batch())
    results: dict[str, Any] = {}
    for name, wrap in WRAPS.items():
        for case in CASES:
            commits = case == "nn.Memory" and name == "DDP"
            db = opened(Path(folder) / "db", "rw" if rank == 0 else "r") if commits else opened(None)
            model = tower(case, db)
            after = trained(wrap(model, mesh), x, right)
            results[f"{name} {case}"] = {key.replace("module.", ""): whole(one) for key, one in after.items()}
            if commits:
                results["uncommitted"] = model.layer.report().uncommitted
                results["committed"] = model.layer.commit() if rank == 0 else None
                torch.distributed.barrier()
            db.close()
    torch.save(results, f"{folder}/rank-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder of the database that rank 0 committed to, and the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    opened(folder / "db").close()
    torch.multiprocessing.spawn(in_rank, (str(folder),), RANKS)  # type: ignore[attr-defined, no-untyped-call]
    return folder, [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]


@functools.cache
def alone(case: str) -> dict[str, Tensor]:
    """Parameters that one process ends with, on the whole batch."""
    return trained(tower(case), *batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case: str, name: str, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for results in ranks[1]:
        alike(results[f"{name} {case}"], alone(case), 1e-4)


@pytest.mark.slow
def test_rank_0_commits_what_both_have_trained(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    memory = (model := tower("nn.Memory")).layer
    trained(model, *batch())
    expected = memory.report().uncommitted
    assert [each["uncommitted"] for each in results] == [expected, expected]
    assert results[0]["committed"] == expected > memory.k
    with softdb.open(folder / "db", mode="r") as db:
        records = db.get(list(range(len(db))))
    assert records.values is not None
    for column, name in ((records.keys, "layer.keys"), (records.values, "layer.values")):
        torch.testing.assert_close(column, results[0]["DDP nn.Memory"][name])
        assert not torch.equal(column, stored()[name == "layer.values"])


# -- workers of a DataLoader -------------------------------------------------------------------------------------------


class Losses(Dataset[Any]):
    """Losses of each model for single inputs, computed where the item is read."""

    def __init__(self, models: list[Tower]) -> None:
        self.models = models

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        torch.set_num_threads(1)
        x, right = (column[i : i + 1] for column in batch())
        with torch.no_grad():
            return torch.stack([model(x, right)[0] for model in self.models])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_modules_answer_in_workers(start: str, tmp_path: Path) -> None:
    with opened(tmp_path / "db") as db:
        models = [tower(case, db) for case in CASES]
        loader = DataLoader(Losses(models), 4, num_workers=2, multiprocessing_context=start, timeout=120)
        actual = torch.cat(list(loader))  # (8, cases)
        with torch.no_grad():
            expected = torch.stack([model(*batch()) for model in models], 1)
    exact = [i for i, case in enumerate(CASES) if "rtol" not in case]
    torch.testing.assert_close(actual[:, exact], expected[:, exact], rtol=1e-4, atol=1e-5)
