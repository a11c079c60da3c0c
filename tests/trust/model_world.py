"""What the model test is made of: kinds of databases, and ids, vectors, payloads and filters drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import json_drawn
import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

Id = int | str
Array = NDArray[Any]


class Kind(NamedTuple):
    """A kind of database."""

    dim: int
    value_dim: int | None
    num_classes: int | None
    dtype: str
    metric: str

    @property
    def schema(self) -> dict[str, Any]:
        """As `softdb.open` takes it."""
        return self._asdict()

    @property
    def has_values(self) -> bool:
        return self.value_dim is not None or self.num_classes is not None


KINDS = st.builds(
    lambda dim, values, dtype, metric: Kind(dim, values[0], values[1], dtype, metric),
    st.integers(1, 8),
    st.sampled_from([(None, None), (1, None), (3, None), (None, 2), (None, 7)]),
    st.sampled_from(["float32", "float16"]),
    st.sampled_from(["dot", "cosine", "l2"]),
)

ODD = [
    "", " ", "nul\0id", "\0", "naïve 😀", "é", "e\u0301", "'; DROP TABLE records; --", '"', "\\", "%", "null", "true",
    "1.0", "1e3", "-0", "9223372036854775807", "a" * 300, "\ufeff", "\x7f", "line\nbreak", "[1]", '{"a":1}', "\ud7ff",
]  # fmt: skip
POOL: list[Id] = [*range(-20, 40), *map(str, range(-5, 40)), -(2**63), 2**63 - 1, -(2**53) - 1, 2**53 + 1, *ODD]

FIELDS = ["year", "lang", "tags", "draft", "a.b", "", 'q"uote', "nul\0", "back\\slash", "é", "it's", "[0]", "new\nline"]
PLAIN_FIELDS = ["year", "lang", "tags", "draft", "a.b", "", "é", "it's", "[0]", "new\nline", "nowhere"]

WORDS = ["the", "fox", "Fox", "über", "e-mail", "don't", "Schulz", "猫", "x", "42", '"quoted"', "a:b", "foxes", "\n"]


class Draw:
    """Everything random of one operation: the same seed gives the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)

    # -- ids ---------------------------------------------------------------------------------------------------------

    def fresh(self, n: int, stored: Collection[Id]) -> list[Id]:
        """n ids that are not stored."""
        some: list[Id] = [one for one in self.random.sample(POOL, min(len(POOL), n + 5)) if one not in stored]
        while len(some) < n:
            number = self.random.getrandbits(63) - 2**62
            some += [one for one in (number, str(number)) if one not in stored]
        return some[:n]

    def some(self, n: int, stored: Collection[Id]) -> list[Id]:
        """Up to n stored ids."""
        return self.random.sample(list(stored), min(n, len(stored)))

    def shuffled(self, ids: list[Id]) -> list[Id]:
        return self.random.sample(ids, len(ids))

    # -- numbers -----------------------------------------------------------------------------------------------------

    def vectors(self, n: int, width: int, kind: Kind) -> Array:
        """(n, width) with ties, duplicates and zeros, and numbers as large and small as the answers can bear."""
        found = self.numbers.standard_normal((n, width))
        match self.random.randrange(5):
            case 0:
                found = self.numbers.integers(-2, 3, (n, width)) / 2  # ties, zero vectors
            case 1:
                found[self.numbers.integers(0, n, n // 2)] = found[0]
            case 2 if kind.metric != "l2":
                found *= 60_000 / np.abs(found).max() if kind.dtype == "float16" else 1e15
            case 3:
                found[self.numbers.random((n, width)) < 0.3] = -0.0
                if kind.metric != "cosine":  # a vector this small would have the length 0
                    found[self.numbers.random((n, width)) < 0.1] = 6e-8 if kind.dtype == "float16" else 1e-42
        return found

    def values(self, n: int, kind: Kind) -> Array | None:
        if kind.num_classes is not None:
            return self.numbers.integers(0, kind.num_classes, n)
        return None if kind.value_dim is None else self.vectors(n, kind.value_dim, kind)

    def queries(self, kind: Kind, keys: Array) -> Array:
        """(q, d) float32; some are stored keys."""
        found = self.numbers.standard_normal((self.random.choice([1, 1, 2, 5]), kind.dim))
        if len(keys) and self.random.random() < 0.4:
            found[0] = keys[self.random.randrange(len(keys))]
        if self.random.random() < 0.1:
            found[-1] = 0
        return found.astype(np.float32)

    def form(self, array: Array | None) -> Any:
        """Equal numbers in another type that a caller may pass."""
        forms: list[Callable[[Array], Any]] = [lambda a: a, lambda a: a.tolist(), torch.from_numpy]
        return None if array is None else self.random.choice(forms)(array)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def text(self, most: int = 8) -> str:
        """Words, the first ones often; without any it is empty."""
        return " ".join(self.random.choices(WORDS, range(len(WORDS), 0, -1), k=self.random.randint(0, most)))

    def texts(self, n: int) -> list[str | None]:
        return [self.text() if self.random.random() < 0.8 else None for _ in range(n)]

    def keyed(self, n: int) -> Array:
        """(n,) which of new records have a key: mostly all."""
        return self.numbers.random(n) < self.random.choice([1, 1, 1, 0.6, 0])

    def about_texts(self, tokenizer: str | None) -> dict[str, Any]:
        """A filter of texts."""
        word = self.random.choice([*WORDS, "", "o", "-ma"])
        asked: list[dict[str, Any]] = [{"$contains": word}, {"$startswith": word}, {"$not": {"$contains": word}}]
        asked += [{"$match": self.text(2) or "fox"}] * 3 if tokenizer else []
        return {"$text": self.random.choice(asked)}

    # -- payloads and filters ------------------------------------------------------------------------------------------

    def payloads(self, n: int) -> list[Any]:
        return [json_drawn.payload(self.random, FIELDS) for _ in range(n)]

    def where(self, payloads: list[Any]) -> dict[str, Any]:
        return json_drawn.where(self.random, FIELDS, payloads)
