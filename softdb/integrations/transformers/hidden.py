"""Functions for the kNN-LM: tokens of texts, windows of tokens, hidden states, and the database that stores these."""

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

MAX_CONTEXT = 1024  # largest number of tokens in a window, also for models with a longer context
COMMIT = 1 << 14  # a commit stores whole texts until they have this number of tokens
SAMPLE = 256  # number of stored keys whose distances give the first temperature
NEAR = 8  # rank of the neighbour whose distance gives the first temperature


class Window(NamedTuple):
    """Tokens that pass through the model together. The window predicts its tokens from number `first` on."""

    tokens: list[int]
    first: int


class HiddenStates:
    """An encoder from a text to the model's hidden state after the text's last token. `name` identifies the model."""

    def __init__(self, model: Any, tokenizer: Any, head: torch.nn.Module) -> None:
        self.model, self.tokenizer, self.head = model, tokenizer, head
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in model.named_parameters():
            numbers = parameter.detach().reshape(-1)[:64].cpu().half()  # equal also for the model in half precision
            digest.update(name.encode() + numbers.numpy().tobytes())
        self.name = f"hidden states of {type(model).__name__} {digest.hexdigest()}"

    def __call__(self, texts: Sequence[str]) -> Tensor:  # (q, d)
        """Return the hidden states after q texts. Raises BadInput for a text without a token."""
        if self.tokenizer is None:
            raise BadInput("texts are given to a memory without a tokenizer; give tokenizer=, or hidden states")
        tokens = [ids[-context_of(self.model) :] for ids in tokens_of(texts, self.tokenizer, self.head)]
        if not all(tokens):
            raise BadInput("a text has no token, so no hidden state follows it; give texts with at least one token")
        hidden, _ = forward(self.model, self.head, tokens, False)
        return torch.stack([states[len(ids) - 1] for states, ids in zip(hidden, tokens, strict=True)]).float()


class _Reached(Exception):
    """Exception by which the hook ends a forward pass before the head, once the hidden states are known."""


@torch.no_grad()
def forward(model: Any, head: torch.nn.Module, tokens: list[list[int]], logits_too: bool) -> tuple[Tensor, Tensor]:
    """Return the hidden states (b, t, d) that enter the head and, if `logits_too`, the logits (b, t, v)."""
    caught: list[Tensor] = []

    def catch(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0].detach())
        if not logits_too:
            raise _Reached

    hook, logits = head.register_forward_pre_hook(catch), torch.empty(0)
    try:
        with evaluating(model), contextlib.suppress(_Reached):
            logits = model(**padded(tokens, model.device), use_cache=False).logits
    finally:
        hook.remove()
    return caught[0], logits


def head_of(model: Any, tokenizer: Any) -> Any:
    """Return the model's output head, with a weight (v, d). Raises BadInput if it has none."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise BadInput(f"{name} has an encoder and a decoder; give a causal model, such as AutoModelForCausalLM loads")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or not model.can_generate():
        raise BadInput(f"{name} has no output head that predicts the next token; load it with AutoModelForCausalLM")
    if tokenizer is not None and len(tokenizer) > len(weight):
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens but the head of {name} {len(weight)}; give the model's own "
            "tokenizer, or call resize_token_embeddings first"
        )
    return head


def context_of(model: Any) -> int:
    """Return the number of tokens in a window of a model."""
    return min(MAX_CONTEXT, int(getattr(model.config, "max_position_embeddings", None) or MAX_CONTEXT))


def tokens_of(texts: Any, tokenizer: Any, head: Any) -> list[list[int]]:
    """Return the token ids of texts, which may be token ids already. Raises BadInput."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise BadInput(f"texts are {check.shown(texts)}; expected a list of texts, or of lists of token ids")
    if any(isinstance(text, str) for text in texts):
        if tokenizer is None or not all(isinstance(text, str) for text in texts):
            missing = "no tokenizer is given" if tokenizer is None else "some are lists of token ids"
            raise BadInput(f"texts are given but {missing}; give tokenizer=, or token ids alone")
        texts = tokenizer(list(texts))["input_ids"] if texts else []
    tokens = [torch.as_tensor(text).reshape(-1).tolist() if len(text) else [] for text in texts]
    for number, ids in enumerate(tokens):
        wrong = [token for token in ids if not (isinstance(token, int) and 0 <= token < len(head.weight))]
        if wrong:
            raise BadInput(
                f"text {number} has the token {wrong[0]!r}; expected whole numbers from 0 to {len(head.weight) - 1}, "
                "the tokens of the model's head"
            )
    return tokens


def windows_of(tokens: list[list[int]], context: int) -> list[Window]:
    """Split texts into windows that overlap by half a context; each token but a text's first is predicted once."""
    windows = []
    for ids in tokens:
        start, first = 0, 1
        while first < len(ids):
            windows.append(Window(ids[start : start + context], first - start))
            first = start + context
            start = first - context // 2
    return windows


def predicting(states: Tensor, window: Window) -> Tensor:  # (t, d) -> (m, d)
    """Return the hidden states before the m tokens that a window predicts."""
    return states[window.first - 1 : len(window.tokens) - 1]


def prompts_of(texts: Sequence[str], tokenizer: Any, head: Any) -> list[list[int]]:
    """Return the token ids of prompts, without the end-of-text token that a tokenizer may append."""
    end = tokenizer.eos_token_id
    return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in tokens_of(texts, tokenizer, head)]


def padded(tokens: list[list[int]], device: Any, left: bool = False) -> dict[str, Tensor]:  # b lists -> (b, t)
    """Return token ids and their mask for a model, padded on the right, or with `left` (to generate) on the left."""
    input_ids, mask = torch.zeros(2, len(tokens), max(map(len, tokens)), dtype=torch.int64)
    for ids, id_row, mask_row in zip(tokens, input_ids, mask, strict=True):
        used = slice(len(id_row) - len(ids), None) if left else slice(len(ids))
        id_row[used], mask_row[used] = torch.tensor(ids), 1
    return {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}


def records_of(model: Any, head: Any, tokens: list[list[int]], size: int) -> tuple[Tensor, list[int]]:
    """Return the keys (m, d) and labels (m,) of the records for texts, in the order of the texts' tokens."""
    windows = windows_of(tokens, context_of(model))
    order = sorted(range(len(windows)), key=lambda i: len(windows[i].tokens))
    keys: list[Tensor] = [torch.empty(0)] * len(windows)
    for low in range(0, len(order), size):
        batch = order[low : low + size]
        hidden, _ = forward(model, head, [windows[i].tokens for i in batch], False)
        for i, states in zip(batch, hidden, strict=True):
            keys[i] = predicting(states, windows[i]).float().cpu()
    return torch.cat(keys), [token for window in windows for token in window.tokens[window.first :]]


def unstored(db: SoftDB, tokens: list[list[int]], lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges (low, high) of texts that the database lacks; each range is for one commit. Raises BadInput."""
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
            labels = torch.tensor([token for ids in tokens[low:high] for token in ids[1:]])
            if not torch.equal(torch.as_tensor(db.get(range(start, end)).values), labels):
                raise BadInput(f"the database was begun with other texts: records {start} to {end}; give another path")
        low, start = high, end


def require_made_by(db: SoftDB, encoder: HiddenStates, head: Any) -> None:
    """Raise BadInput unless a database holds this model's hidden states and vocabulary."""
    if not isinstance(db, SoftDB):
        raise BadInput(f"db is {check.shown(db)}; expected an open softdb database, or call from_corpus")
    classes, dim = head.weight.shape
    if db.dim != dim:
        raise BadInput(
            f"the model's hidden states are {dim} wide but the keys {db.dim}; give the database of this model"
        )
    if db.num_classes != classes:
        differ = f"the model has {classes} tokens but num_classes of the database is {db.num_classes}"
        raise BadInput(f"{differ}; make it with from_corpus")
    if not len(db):
        raise BadInput("the database holds no records; make it with from_corpus")
    if db.encoder_name not in (None, encoder.name):
        raise BadInput(
            f"the keys are {check.shown(db.encoder_name)} but the model's are {check.shown(encoder.name)}; give the "
            "model that made them, or build another database with from_corpus"
        )


def first_temperature(db: SoftDB) -> float:
    """Return the median squared distance of a sample of records to their 8th nearest other record."""
    snapshot, _ = db.core.view()
    live = snapshot.live.nonzero()[0]
    sample = live[torch.linspace(0, len(live) - 1, min(SAMPLE, len(live))).long().numpy()]
    squares = -db.search(snapshot.keys_at(sample).float(), NEAR + 1).scores[:, -1]
    return float(squares.median()) or float(squares.max()) or 1.0
