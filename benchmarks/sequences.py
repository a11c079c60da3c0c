"""SASRec with its loss exchanged: one negative, some items, or every item in the denominator.

    python benchmarks/sequences.py --data beauty.txt --steps 2205 --out benchmarks/results/sequences-beauty-0.json
    python benchmarks/sequences.py --data https://… --loss full --seed 1 --steps 2205 --out sequences-beauty-1.json

SASRec (Kang and McAuley 2018, arXiv:1808.09781) predicts the next item of a sequence. Klenitskiy and Vasilev ("Turning
Dross Into Gold Loss", RecSys 2023, arXiv:2309.07602) train it on Amazon Beauty with several losses; this script follows
their protocol and settings. Only the loss differs between the runs of a file. With the state h of a position (d,), the
item rows e_i (n, d) and the next item y:

    bce        -log σ(h·e_y) - log σ(-h·e_j), j uniform among the training items that the sequence lacks
    torch      log Σ_i e^(h·e_i) - h·e_y over all n items, by torch's cross_entropy
    full       the same, by softdb.linear_cross_entropy
    drawn      the same, Σ estimated without bias from --draws items that a batch shares (max_draws=)
    truncated  the same, Σ over the --k items nearest to h, and y (k=)

The data are lines `user item`, each user's in the order of time, in a file or at an address that --data names; nothing
else is read from the network. Of each user the last item is for the test, the item before it for validation, and the
rest for training. In the evaluation every item competes except those in the user's history, and ties count against the
model. Validation is measured at step 0 and every --every steps on --validated users. The test, on all users, is of the
parameters with the best validation NDCG@10. Seconds are CPU time (user + system, one thread) of the training steps
alone. A run that --out already has is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
import urllib.request
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import provenance, write_json
from torch import Tensor, nn
from torch.nn import functional as F

import softdb

LOSSES = ("bce", "truncated", "drawn", "full", "torch")
NAMES = {  # in tables
    "bce": "one negative (`bce`)",
    "truncated": "{k:,} nearest items (`truncated`)",
    "drawn": "{draws:,} drawn items (`drawn`)",
    "full": "every item (`full`)",
    "torch": "every item, `cross_entropy` of torch",
}
PUBLISHED = {  # NDCG@10, recall@10 and the best epoch of Klenitskiy and Vasilev; drawn: 3,000 negatives a sequence
    "bce": ("0.0126", "0.0246", "26"),
    "drawn": ("0.0295", "0.0490", "8"),
    "full": ("0.0327", "0.0533", "6"),
    "torch": ("0.0327", "0.0533", "6"),
}
TOP = 10  # of recall and NDCG
USERS = 512  # evaluated at a time


@dataclass
class Settings:
    """Settings of a run; the defaults are those of Klenitskiy and Vasilev for Amazon Beauty."""

    loss: str
    seed: int
    steps: int
    every: int
    validated: int = 10_000
    batch: int = 128  # sequences
    length: int = 50  # items of a sequence: the latest
    dim: int = 64
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.1
    rate: float = 1e-3
    draws: int = 0
    k: int = 0


class Sequences:
    """The items of each user, in the order of time; item ids are 0 … n - 1."""

    def __init__(self, text: bytes) -> None:
        users, items = np.array(text.split(), np.int64).reshape(-1, 2).T
        names, items = np.unique(items, return_inverse=True)
        order = np.argsort(users, kind="stable")
        cuts = np.flatnonzero(np.diff(users[order])) + 1
        every = [torch.from_numpy(part) for part in np.split(items[order], cuts)]
        self.users = [items for items in every if len(items) >= 3]  # one item each to test, validate and train
        self.n, self.interactions = len(names), len(items)
        self.trained_items = torch.from_numpy(np.unique(np.concatenate([items[:-2] for items in self.users])))

    def padded(self, omitted: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the latest `length` items (users, length), padded at the end, and their numbers (users,).

        The `omitted` last items of each user are left out.
        """
        parts = [items[: len(items) - omitted][-length:] for items in self.users]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.tensor([len(part) for part in parts])


class Block(nn.Module):
    """Causal self-attention and a layer of two linear maps, each position by itself (equations 4 to 6 of the paper)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        d = settings.dim
        self.before, self.between = nn.LayerNorm(d, eps=1e-8), nn.LayerNorm(d, eps=1e-8)
        self.attention = nn.MultiheadAttention(d, settings.heads, settings.dropout, batch_first=True)
        self.inner, self.outer, self.dropout = nn.Linear(d, d), nn.Linear(d, d), nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # (b, t, d), (t, t) -> (b, t, d)
        """Return the states of the next layer."""
        queries = self.before(x)
        x = queries + self.attention(queries, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        x = self.between(x)
        hidden = self.dropout(self.inner(x)).relu()
        return torch.add(x, self.dropout(self.outer(hidden)))


class SASRec(nn.Module):
    """States of sequences; `items.weight` (n, d) has the rows that they are compared with."""

    def __init__(self, n: int, settings: Settings) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(n, settings.dim), nn.Embedding(settings.length, settings.dim)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.blocks))
        self.norm = nn.LayerNorm(settings.dim, eps=1e-8)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, items: Tensor) -> Tensor:  # (b, t) -> (b, t, d)
        """Return the state after each item. Padding at the end changes no state before it."""
        t = items.shape[1]
        x = self.dropout(self.items(items) * self.items.embedding_dim**0.5 + self.positions.weight[:t])
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)  # True = hidden
        for block in self.blocks:
            x = block(x, mask)
        states: Tensor = self.norm(x)
        return states


def one_negative(states: Tensor, weight: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
    """Return the binary cross-entropy of each position's next item and one other item."""
    right, wrong = ((states * F.embedding(items, weight)).sum(1) for items in (targets, negatives))
    return (F.softplus(-right) + F.softplus(wrong)).mean() / 2


def negatives_of(sequences: Tensor, real: Tensor, items: Tensor, draws: torch.Generator) -> Tensor:
    """Return an item for each position (b, t), uniform among those of `items` that the sequence (b, t + 1) lacks."""
    sequences = torch.where(real, sequences, -1)
    chosen = items[torch.randint(len(items), (len(sequences), sequences.shape[1] - 1), generator=draws)]
    while (clash := (chosen[:, :, None] == sequences[:, None, :]).any(2)).any():
        chosen[clash] = items[torch.randint(len(items), (int(clash.sum()),), generator=draws)]
    return chosen


class Trainer:
    """A model with its optimiser and batches."""

    def __init__(self, data: Sequences, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.data, self.settings = data, settings
        self.model = SASRec(data.n, settings)
        self.adam = torch.optim.Adam(self.model.parameters(), settings.rate, fused=True)
        self.sequences, self.sizes = data.padded(2, settings.length + 1)
        self.order, self.draws = (torch.Generator().manual_seed(settings.seed + i) for i in (0, 1))
        self.waiting: list[Tensor] = []

    @property
    def epoch_steps(self) -> int:
        """Steps of one pass over the users."""
        return math.ceil(len(self.sizes) / self.settings.batch)

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        if not self.waiting:
            self.waiting = list(torch.split(torch.randperm(len(self.sizes), generator=self.order), self.settings.batch))
        chosen = self.waiting.pop()
        longest = int(self.sizes[chosen].max())
        sequences = self.sequences[chosen, :longest]
        real = torch.arange(longest) < self.sizes[chosen, None]
        states, targets = self.model(sequences[:, :-1])[real[:, 1:]], sequences[:, 1:][real[:, 1:]]
        weight = self.model.items.weight
        match self.settings.loss:
            case "bce":
                negatives = negatives_of(sequences, real, self.data.trained_items, self.draws)[real[:, 1:]]
                return one_negative(states, weight, targets, negatives)
            case "torch":
                return F.cross_entropy(states @ weight.T, targets)
            case "full":
                return softdb.linear_cross_entropy(states, weight, targets)
            case "drawn":
                draws = self.settings.draws
                return softdb.linear_cross_entropy(states, weight, targets, max_draws=draws, generator=self.draws)
            case _:
                return softdb.linear_cross_entropy(states, weight, targets, k=self.settings.k)

    def step(self) -> tuple[float, float]:
        """Take one step. Return its loss and its CPU seconds."""
        start = time.process_time()
        self.model.train()
        value = self.loss()
        self.adam.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        return value.item(), time.process_time() - start


@torch.no_grad()
def evaluated(model: SASRec, data: Sequences, settings: Settings, omitted: int, users: Tensor) -> dict[str, float]:
    """Return NDCG@10 and recall@10 of each user's item before the `omitted` last, among all items not in the history.

    A target has rank 1 + the number of other items with at least its score; NDCG@10 is 1 / log₂(1 + rank) of ranks
    up to 10.
    """
    model.eval()
    sequences, sizes = data.padded(omitted + 1, settings.length)
    ranks = []
    for part in torch.split(users[sizes[users].argsort()], USERS):
        states = model(sequences[part, : int(sizes[part].max())])
        scores = states[torch.arange(len(part)), sizes[part] - 1] @ model.items.weight.T
        if not scores.isfinite().all():
            raise FloatingPointError("evaluated: a score is not finite; lower --rate")
        histories = [data.users[user][: len(data.users[user]) - omitted - 1] for user in part.tolist()]
        places = torch.repeat_interleave(torch.arange(len(part)), torch.tensor([len(items) for items in histories]))
        scores[places, torch.cat(histories)] = -math.inf
        targets = torch.stack([data.users[user][-omitted - 1] for user in part.tolist()])
        ranks.append((scores >= scores.gather(1, targets[:, None])).sum(1))
    rank = torch.cat(ranks)
    near = rank <= TOP
    gains = torch.where(near, 1 / (1 + rank).double().log2(), 0.0)
    return {"ndcg_10": round(gains.mean().item(), 5), "recall_10": round(near.double().mean().item(), 5)}


def trained(data: Sequences, settings: Settings) -> dict[str, Any]:
    """Train with one loss and return settings, curve and the test of the best step."""
    trainer, curve, best = Trainer(data, settings), list[dict[str, Any]](), dict[str, Any]()
    validated = torch.randperm(len(data.users), generator=torch.Generator().manual_seed(0))[: settings.validated]
    seconds, losses = 0.0, list[float]()
    for step in range(settings.steps + 1):
        if step % settings.every == 0 or step == settings.steps:
            point: dict[str, Any] = {"step": step, "seconds": round(seconds, 1)}
            point |= {"loss": round(float(np.mean(losses)), 4)} if losses else {}
            point |= evaluated(trainer.model, data, settings, 1, validated)
            curve.append(point)
            losses = []
            print(settings.loss, settings.seed, point, flush=True)
            if point["ndcg_10"] > max((other["ndcg_10"] for other in curve[:-1]), default=-1.0):
                best = {"step": step, "state": deepcopy(trainer.model.state_dict())}
        if step < settings.steps:
            value, cost = trainer.step()
            seconds, losses = seconds + cost, [*losses, value]
    trainer.model.load_state_dict(best["state"])
    return {
        "settings": asdict(settings),
        "test": evaluated(trainer.model, data, settings, 0, torch.arange(len(data.users))),
        "best_step": best["step"],
        "epochs": round(settings.steps / trainer.epoch_steps, 2),
        "seconds": round(seconds, 1),
        "step_ms": round(1000 * seconds / max(1, settings.steps), 1),
        "curve": curve,
    }


def read(source: str) -> bytes:
    """Return the content of a file, or of an address that begins with https://."""
    if source.startswith("https://"):
        with urllib.request.urlopen(source) as answer:
            return bytes(answer.read())
    return Path(source).read_bytes()


def table(runs: dict[str, Any]) -> list[str]:
    """Return a row for each loss: the test, epochs until the best step, the same as published, seconds, ms a step."""
    rows = []
    for loss, run in ((loss, runs[loss]) for loss in LOSSES if loss in runs):
        settings, test, published = run["settings"], run["test"], PUBLISHED.get(loss, ("",) * 3)
        name = NAMES[loss].format(**settings)
        epochs = run["best_step"] / settings["steps"] * run["epochs"]
        cells = [f"{test['ndcg_10']:.4f}", f"{test['recall_10']:.4f}", f"{epochs:.0f}", *published]
        cells += [f"{run['seconds']:,.0f} s", f"{run['step_ms']:.0f} ms"]
        rows.append(f"| {' | '.join([name, *cells])} |")
    return rows


def main() -> None:
    """Run what the result file lacks, and write it after each run."""
    import pictures  # imports this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="PATH|https://…", help="lines `user item`")
    parser.add_argument("--loss", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=315, help="steps between measurements")
    parser.add_argument("--validated", type=int, default=10_000, help="users of the validation")
    parser.add_argument("--draws", type=int, default=3000, help="items drawn for a batch (loss drawn)")
    parser.add_argument("--k", type=int, default=128, help="nearest items of a position (loss truncated)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = read(args.data)
    data = Sequences(text)
    facts: dict[str, Any] = {"users": len(data.users), "items": data.n, "interactions": data.interactions}
    facts |= {"sha256": hashlib.sha256(text).hexdigest()}
    for loss in args.loss:
        before: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}, "data": facts}
        if before["data"] != facts or any(run["settings"]["steps"] != args.steps for run in before["runs"].values()):
            parser.error(f"{args.out} has runs of other data or another number of steps; choose another --out")
        if loss in before["runs"]:
            continue
        origin = provenance(["softdb", "torch", "numpy"])
        settings = Settings(loss, args.seed, args.steps, args.every, args.validated)
        settings.draws, settings.k = (args.draws if loss == "drawn" else 0), (args.k if loss == "truncated" else 0)
        run = trained(data, settings) | {key: origin[key] for key in ("date", "commit", "command")}
        result = json.loads(args.out.read_text()) if args.out.exists() else {}  # another process may have written
        runs = result.get("runs", {}) | {loss: run}
        write_json(args.out, origin | {"seed": args.seed, "data": facts, "runs": runs})
    result = json.loads(args.out.read_text())
    pictures.sequences(result, args.out.with_suffix(".png"))
    print("\n".join(table(result["runs"])), flush=True)


if __name__ == "__main__":
    main()
