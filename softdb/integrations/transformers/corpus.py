"""The database of a corpus: its records, how far it is, and whether it is a model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from softdb import check
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.integrations.transformers.hidden import HiddenStates, context_of, forward, predicting, windows_of

__all__ = ["first_temperature", "records_of", "require_made_by", "unstored"]

COMMIT = 1 << 14  # tokens of whole texts that are stored together
SAMPLE = 256  # stored keys from whose distances the first temperature is taken
NEAR = 8  # the neighbour whose distance that is


def records_of(model: Any, head: Any, tokens: list[list[int]], size: int) -> tuple[Tensor, list[int]]:
    """Keys (m, d) and labels (m,) of some texts, in their order."""
    windows = windows_of(tokens, context_of(model))
    order = sorted(range(len(windows)), key=lambda i: len(windows[i].tokens))
    keys: list[Tensor] = [torch.empty(0)] * len(windows)
    for low in range(0, len(order), size):
        some = order[low : low + size]
        hidden, _ = forward(model, head, [windows[i].tokens for i in some], False)
        for i, states in zip(some, hidden, strict=True):
            keys[i] = predicting(states, windows[i]).float().cpu()
    return torch.cat(keys), [token for one in windows for token in one.tokens[one.first :]]


def unstored(db: SoftDB, tokens: list[list[int]], lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of texts that are stored together, without those that are in the database already."""
    low, start, stored = 0, 0, len(db)
    if stored > sum(lengths):
        raise BadInput(f"the database holds {stored} records but these texts make {sum(lengths)}; give another path")
    while low < len(tokens):
        high, end = low, start
        while high < len(tokens) and end - start < COMMIT:
            end, high = end + lengths[high], high + 1
        if stored < end > start:
            if stored > start:
                raise BadInput(f"the database was begun with other texts: {stored} records; give another path")
            yield low, high
            stored = len(db)
        elif end > start:
            labels = torch.tensor([token for one in tokens[low:high] for token in one[1:]])
            if not torch.equal(torch.as_tensor(db.get(range(start, end)).values), labels):
                raise BadInput(f"the database was begun with other texts: records {start} to {end}; give another path")
        low, start = high, end


def require_made_by(db: SoftDB, made: HiddenStates, head: Any) -> None:
    """BadInput where a database is not of this model's hidden states and vocabulary."""
    if not isinstance(db, SoftDB):
        raise BadInput(f"db is {check.shown(db)}; expected an open softdb database, or call from_corpus")
    classes, dim = head.weight.shape
    if db.dim != dim:
        raise BadInput(
            f"the model's hidden states are {dim} wide but the keys {db.dim}; give the database of this model"
        )
    if db.num_classes != classes:
        raise BadInput(
            f"the model tells {classes} tokens apart but num_classes of the database is {db.num_classes}; make it with "
            "from_corpus"
        )
    if not len(db):
        raise BadInput("the database holds no records, so it remembers nothing; make it with from_corpus")
    if db.encoder_name not in (None, made.name):
        raise BadInput(
            f"the keys are by {check.shown(db.encoder_name)}, the model is {check.shown(made.name)}, whose hidden "
            "states are others; give the model that made them, or build the database anew with from_corpus"
        )


def first_temperature(db: SoftDB) -> float:
    """The median squared distance of some records to the 8th nearest other one."""
    snapshot, _ = db.view()
    live = snapshot.live.nonzero()[0]
    some = live[torch.linspace(0, len(live) - 1, min(SAMPLE, len(live))).long().numpy()]
    found = -db.search(snapshot.keys_at(some).float(), NEAR + 1).scores[:, -1]
    return float(found.median()) or float(found.max()) or 1.0
