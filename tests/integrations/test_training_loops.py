"""Lightning's Trainer and accelerate's Accelerator train as a plain loop does. Lines of docs/works-with.md."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from worlds.towers import CASES, alike, batch, opened, tower, trained

from softdb.nn import EverySteps

EPOCHS = 3


def loader() -> DataLoader[Any]:
    """One batch, as `trained` takes it."""
    return DataLoader(TensorDataset(*batch()), len(batch()[0]))


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): one.detach().clone() for name, one in model.named_parameters()}


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning_module(case: str, path: Path | None = None, mode: str = "rw") -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = tower(case, opened(path, mode))

        def training_step(self, items: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(*items).mean()
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if case in ("nn.Memory", "nn.View, k"):
                self.model.layer.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def trainer(folder: Path, **words: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=folder, **quiet, **words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_lightning_trains_as_a_plain_loop(case: str, tmp_path: Path) -> None:
    module = lightning_module(case)
    trainer(tmp_path, enable_checkpointing=False, devices=1).fit(module, loader())
    alike(tensors(module.model), trained(tower(case), *batch(), EPOCHS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["nn.Memory", "nn.View, k"])
def test_lightning_steps_the_policy(case: str, tmp_path: Path) -> None:
    module = lightning_module(case)
    module.model.layer.policy = EverySteps(2)
    trainer(tmp_path, enable_checkpointing=False, devices=1).fit(module, loader())
    assert module.model.layer.steps == EPOCHS
    if case == "nn.View, k":  # of so few records a memory compares all
        assert module.model.layer.age == 1


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning_brings_a_memory_back(tmp_path: Path) -> None:
    """And the restored memory commits what the first has trained."""
    module = lightning_module("nn.Memory")
    fitted = trainer(tmp_path, enable_checkpointing=False, devices=1)
    fitted.fit(module, loader())
    fitted.save_checkpoint(tmp_path / "run.ckpt")
    other = lightning_module("nn.Memory", tmp_path / "db")
    other.load_state_dict(torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"])
    alike(tensors(other), tensors(module))
    assert other.model.layer.commit() == module.model.layer.report().uncommitted > 0


# -- accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_accelerate_trains_as_a_plain_loop(case: str) -> None:
    """A step of two halves of the batch, by gradient accumulation."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = tower(case)
    batches = DataLoader(TensorDataset(*batch()), 4)
    model, optimizer, items = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(EPOCHS):
            for x, right in items:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x, right).mean())
                    optimizer.step()
                    optimizer.zero_grad()
    alike(tensors(accelerator.unwrap_model(model)), trained(tower(case), *batch(), EPOCHS))


# -- two processes -----------------------------------------------------------------------------------------------------


def under_lightning(folder: Path) -> torch.nn.Module:
    module = lightning_module("nn.Memory", *place(folder))
    trainer(folder, enable_checkpointing=False, devices=2, strategy="ddp").fit(module, halves())
    trained_model: torch.nn.Module = module.model
    return trained_model


def under_accelerate(folder: Path) -> torch.nn.Module:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    plain = tower("nn.Memory", opened(*place(folder)))
    model, optimizer, items = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1), halves())
    for _ in range(EPOCHS):
        for x, right in items:
            accelerator.backward(model(x, right).mean())
            optimizer.step()
            optimizer.zero_grad()
    return plain


LOOPS = {"lightning": under_lightning, "accelerate": under_accelerate}


def place(folder: Path) -> tuple[Path, str]:
    """Path and mode of the database: the first process writes."""
    return folder / "db", "rw" if os.environ["RANK"] == "0" else "r"


def halves() -> DataLoader[Any]:
    """The batch in two halves, of which the loop gives each process one."""
    return DataLoader(TensorDataset(*batch()), 4)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_two_processes_train_a_memory_as_one(loop: str, tmp_path: Path) -> None:
    """Started by torchrun; the first process commits."""
    pytest.importorskip(loop)
    opened(tmp_path / "db").close()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    job = subprocess.run([*command, loop, tmp_path], env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr
    after = torch.load(tmp_path / "trained.pt")
    alike(after, trained(tower("nn.Memory"), *batch(), EPOCHS), 1e-4)
    with opened(tmp_path / "db") as db:
        torch.testing.assert_close(db.get(list(range(len(db)))).keys, after["layer.keys"])


if __name__ == "__main__":
    loop, folder = LOOPS[sys.argv[1]], Path(sys.argv[2])
    ended: Any = loop(folder)
    if os.environ["RANK"] == "0":
        assert ended.layer.commit() > 0
        torch.save(tensors(ended), folder / "trained.pt")
