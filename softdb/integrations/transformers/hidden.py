"""Tokens of texts, windows of them, what enters a model's output head there, and the database of these."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from softdb import check
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn.encoded import evaluating

Text: TypeAlias = "str | Sequence[int]"

LONGEST = 1024  # tokens in one window, of models that see more
COMMIT = 1 << 14  # tokens of whole texts that are stored together
SAMPLE = 256  # stored keys from whose distances the first temperature is taken
NEAR = 8  # the neighbour whose distance that is


class Window(NamedTuple):
    """Tokens that pass through the model together; of them those from `first` on are predicted here."""

    tokens: list[int]
    first: int


class HiddenStates:
    """Texts as the database's keys: the hidden state after the last token. Its name tells one model from another."""

    def __init__(self, model: Any, tokenizer: Any, head: torch.nn.Module) -> None:
        self.model, self.tokenizer, self.head = model, tokenizer, head
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in model.named_parameters():
            some = parameter.detach().reshape(-1)[:64].cpu().half()  # the same of a model in half precision
            digest.update(name.encode() + some.numpy().tobytes())
        self.name = f"hidden states of {type(model).__name__} {digest.hexdigest()}"

    def __call__(self, texts: Sequence[str]) -> Tensor:  # (q, d)
        """The hidden states after q texts. Raises BadInput for one without a token."""
        if self.tokenizer is None:
            raise BadInput("texts are asked of a memory without a tokenizer; give tokenizer=, or hidden states")
        tokens = [one[-context_of(self.model) :] for one in tokens_of(texts, self.tokenizer, self.head)]
        if not all(tokens):
            raise BadInput("a text has no token, so no hidden state follows it; give texts with one at least")
        hidden, _ = forward(self.model, self.head, tokens, False)
        return torch.stack([states[len(one) - 1] for states, one in zip(hidden, tokens, strict=True)]).float()


class _Reached(Exception):
    """The hidden states are there: the head need not be computed."""


@torch.no_grad()
def forward(model: Any, head: torch.nn.Module, tokens: list[list[int]], whole: bool) -> tuple[Tensor, Tensor]:
    """Hidden states (b, t, d) that enter the head, and, of the `whole` model, its logits (b, t, v); padded right."""
    caught: list[Tensor] = []

    def catch(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0].detach())
        if not whole:
            raise _Reached

    hook, logits = head.register_forward_pre_hook(catch), torch.empty(0)
    try:
        with evaluating(model), contextlib.suppress(_Reached):
            logits = model(**padded(tokens, model.device), use_cache=False).logits
    finally:
        hook.remove()
    return caught[0], logits


def head_of(model: Any, tokenizer: Any) -> Any:
    """The module that makes logits of hidden states, with a weight (v, d). Raises BadInput where there is none."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise BadInput(f"{name} has an encoder and a decoder; give a causal model, such as AutoModelForCausalLM loads")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or not model.can_generate():
        raise BadInput(f"{name} has no output head that tells the next token; load it with AutoModelForCausalLM")
    if tokenizer is not None and len(tokenizer) > len(weight):
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens but the head of {name} {len(weight)}; give the model's own, or "
            "resize_token_embeddings first"
        )
    return head


def context_of(model: Any) -> int:
    """Number of tokens that pass through the model together."""
    return min(LONGEST, int(getattr(model.config, "max_position_embeddings", None) or LONGEST))


def tokens_of(texts: Any, tokenizer: Any, head: Any) -> list[list[int]]:
    """Token ids of texts, or those given, checked."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise BadInput(f"texts are {check.shown(texts)}; expected a list of texts, or of lists of token ids")
    if any(isinstance(text, str) for text in texts):
        if tokenizer is None or not all(isinstance(text, str) for text in texts):
            missing = "no tokenizer is given" if tokenizer is None else "some are lists of token ids"
            raise BadInput(f"texts are given but {missing}; give tokenizer=, or token ids alone")
        texts = tokenizer(list(texts))["input_ids"] if texts else []
    found = [torch.as_tensor(text).reshape(-1).tolist() if len(text) else [] for text in texts]
    for number, ids in enumerate(found):
        wrong = [one for one in ids if not (isinstance(one, int) and 0 <= one < len(head.weight))]
        if wrong:
            raise BadInput(
                f"text {number} has the token {wrong[0]!r}; expected whole numbers from 0 to {len(head.weight) - 1}, "
                "which the model's head knows"
            )
    return found


def windows_of(tokens: list[list[int]], context: int) -> list[Window]:
    """Windows of texts; each token but a text's first is predicted in one of them, after half a context or more."""
    found = []
    for ids in tokens:
        start, first = 0, 1
        while first < len(ids):
            found.append(Window(ids[start : start + context], first - start))
            first = start + context
            start = first - context // 2
    return found


def predicting(states: Tensor, window: Window) -> Tensor:  # (t, d) -> (m, d)
    """Context before the tokens that a window predicts."""
    return states[window.first - 1 : len(window.tokens) - 1]


def prompts_of(texts: Sequence[str], tokenizer: Any, head: Any) -> list[list[int]]:
    """Token ids of prompts: without the end that a tokenizer may put after texts."""
    end = tokenizer.eos_token_id
    return [one[:-1] if len(one) > 1 and one[-1] == end else one for one in tokens_of(texts, tokenizer, head)]


def padded(tokens: list[list[int]], device: Any, left: bool = False) -> dict[str, Tensor]:  # b lists -> (b, t)
    """Arguments of a model, padded right, or left as generation needs them."""
    ids, mask = torch.zeros(2, len(tokens), max(map(len, tokens)), dtype=torch.int64)
    for one, places, there in zip(tokens, ids, mask, strict=True):
        part = slice(len(places) - len(one), None) if left else slice(len(one))
        places[part], there[part] = torch.tensor(one), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


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
    return torch.cat(keys), [token for window in windows for token in window.tokens[window.first :]]


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
        differ = f"the model tells {classes} tokens apart but num_classes of the database is {db.num_classes}"
        raise BadInput(f"{differ}; make it with from_corpus")
    if not len(db):
        raise BadInput("the database holds no records, so it remembers nothing; make it with from_corpus")
    if db.encoder_name not in (None, made.name):
        raise BadInput(
            f"the keys are by {check.shown(db.encoder_name)}, the model is {check.shown(made.name)}, whose hidden "
            "states are others; give the model that made them, or build the database anew with from_corpus"
        )


def first_temperature(db: SoftDB) -> float:
    """The median squared distance of some records to the 8th nearest other one."""
    snapshot, _ = db.core.view()
    live = snapshot.live.nonzero()[0]
    some = live[torch.linspace(0, len(live) - 1, min(SAMPLE, len(live))).long().numpy()]
    found = -db.search(snapshot.keys_at(some).float(), NEAR + 1).scores[:, -1]
    return float(found.median()) or float(found.max()) or 1.0
