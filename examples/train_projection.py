"""A training loop to copy: learn a projection of the queries by gradients through the database.

    python examples/train_projection.py [FOLDER] [--plot PICTURE.png] [--quick]

The records are 20,000 dictionary definitions, the queries are words, and a word shall find its definitions. A linear
map of the queries is trained by the gradient of the retrieval log-likelihood over all records, which do not change. The
temperature T is learnt as in CLIP (Radford et al. 2021, section 2.5), by log 1 / T, where 1 / T ≤ 100. `softdb train`
is this loop with early stopping; write your own if the model is more than a matrix.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import torch
from shared import arguments, lines

import softdb
from softdb.data import load_wordnet
from softdb.nn.losses import retrieval_loss
from softdb.train import QueryProjection, ranking

EPOCHS, BATCH, SCALE, MAX_SCALE = 2, 256, 1 / 0.07, 100.0  # the scales: first and largest 1 / T


def main(folder: Path, picture: str | None, quick: bool) -> None:
    """Store the records, train, and measure with held-out words."""
    data = load_wordnet()
    queries, answers = torch.from_numpy(data.query_keys), [[data.ids[i] for i in rows] for rows in data.answers]
    held_out = torch.from_numpy(data.held_out)  # held-out words and training words share no definition
    train, test = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]

    with softdb.open(folder / "definitions", dim=queries.shape[1]) as db:
        db.upsert(data.ids, data.keys, payloads=data.payloads)

    with softdb.open(folder / "definitions", mode="r") as db:  # training does not write
        projection = QueryProjection(queries.shape[1])  # starts as the identity
        log_scale = projection.log_scale = torch.nn.Parameter(torch.tensor(math.log(SCALE)))  # as parameter it is saved
        adam, losses = torch.optim.Adam(projection.parameters(), lr=1e-3), list[float]()
        order, draws = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        first, checkpoint = 0, folder / "checkpoint.pt"
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            projection.load_state_dict(saved["projection"])
            adam.load_state_dict(saved["adam"])
            order.set_state(saved["order"]), draws.set_state(saved["draws"])
            first = saved["epoch"]

        for epoch in range(first, 1 if quick else EPOCHS):
            for batch in torch.split(train[torch.randperm(len(train), generator=order)], BATCH):
                projected, right = projection(queries[batch]), [answers[i] for i in batch.tolist()]
                # rtol estimates the sum over all records if an index makes that faster; otherwise it is exact
                loss = retrieval_loss(db, projected, right, temperature=(-log_scale).exp(), rtol=0.1, generator=draws)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                log_scale.data.clamp_(max=math.log(MAX_SCALE))
                losses.append(loss.item())
            state = {"projection": projection.state_dict(), "adam": adam.state_dict(), "epoch": epoch + 1,
                     "order": order.get_state(), "draws": draws.get_state()}  # fmt: skip
            torch.save(state, fresh := checkpoint.with_suffix(".new"))
            os.replace(fresh, checkpoint)  # atomic: a complete checkpoint exists at any moment
            print(f"epoch {epoch + 1}    last loss {losses[-1]:.2f}    temperature {math.exp(-log_scale.item()):.4f}")

        right, recalls = [answers[i] for i in test.tolist()], []
        for name, model in (("before", None), ("after", projection)):
            rank = ranking(db, queries[test], right, model)
            print(f"{name:10} recall@1 {rank.recall_1:.3f}  recall@10 {rank.recall_10:.3f}  MRR {rank.mrr_100:.3f}")
            recalls.append(rank.recall_10)
        assert recalls[1] > recalls[0] + 0.02
    if picture:
        lines(picture, losses, f"Held-out recall@10 rises from {recalls[0]:.3f} to {recalls[1]:.3f}", over=10)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(**arguments(__doc__, folder={"nargs": "?", "type": Path, "default": Path(scratch)}))
