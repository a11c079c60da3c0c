"""Views whose encoder takes the texts of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb.database.reembedding import texts_at
from softdb.errors import BadInput, StaleRead
from softdb.nn import View, retrieval_loss
from softdb.text import HashedNGrams
from softdb.train import ranking

TEXTS = [f"{animal} number {i}" for i in range(20) for animal in ("whale", "heron", "otter")]


class OfTexts(torch.nn.Module):
    """Hashed n-grams through a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = HashedNGrams(32), torch.nn.Linear(32, 6, bias=False)

    def forward(self, texts: Sequence[str]) -> Tensor:
        found: Tensor = self.linear(torch.from_numpy(self.inner(texts)))
        return found


def with_texts(**words: Any) -> softdb.SoftDB:
    return holding(torch.randn(len(TEXTS), 2), payloads=[{"text": "payload", "name": text} for text in TEXTS], **words)


@pytest.mark.parametrize(
    ("kept", "field"),
    [(TEXTS, None), (None, "name"), (TEXTS, lambda record: record.payload["name"])],
    ids=["texts", "field", "callable"],
)
def test_the_loss_is_that_of_the_encoded_texts(kept: Any, field: Any) -> None:
    torch.manual_seed(0)
    encoder, queries = OfTexts(), torch.randn(3, 6)
    keys = encoder(TEXTS)
    wanted = ((queries @ keys.T).logsumexp(1) - (queries * keys[[5, 0, 7]]).sum(1)).mean()
    wanted.backward()
    gradient = encoder.linear.weight.grad
    encoder.linear.weight.grad = None
    with with_texts(texts=kept) as db:
        view = View(db, encoder, texts=True, field=field)
        loss = retrieval_loss(view, queries, [5, 0, 7])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(encoder.linear.weight.grad, gradient)
        near = (queries @ encoder(TEXTS).T).topk(4).indices
        assert view.search(queries, 4).rows.tolist() == near.tolist()


def test_ranks_are_by_the_vectors_as_they_were_indexed() -> None:
    torch.manual_seed(0)
    encoder = OfTexts()
    with with_texts(texts=TEXTS) as db:
        view = View(db, encoder, texts=True, metric="cosine")
        view.reindex()
        queries = encoder(TEXTS).detach()
        assert ranking(view, queries, list(range(len(TEXTS)))).recall_1 == 1
        with torch.no_grad():
            encoder.linear.weight.normal_()
        assert view.indexed_nearest(queries, 1)[:, 0].tolist() == list(range(len(TEXTS)))
        db.delete([3])
        assert 3 not in view.indexed_nearest(queries, 60).flatten().tolist()
        assert (view.indexed_nearest(queries, 60)[:, -1] == -1).all()
        view.reindex()
        assert ranking(view, queries[4:], list(range(4, len(TEXTS)))).recall_1 < 0.5


def test_missing_texts_are_reported() -> None:
    with with_texts() as db:
        with pytest.raises(BadInput, match="record 0 has no text: its field 'gloss' is None"):
            View(db, OfTexts(), texts=True, field="gloss").attend(torch.ones(1, 6))
        with pytest.raises(BadInput, match="field is 3"):
            View(db, OfTexts(), texts=True, field=3)  # type: ignore[arg-type]
        rows = db.core.locate([1, 2])[1]
        db.delete([2])
        with pytest.raises(StaleRead, match="1 of 2 records were deleted"):
            texts_at(db.core, rows)
