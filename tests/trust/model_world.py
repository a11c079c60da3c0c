"""What the model test is made of: kinds of databases, and ids, vectors, payloads and filters drawn from a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

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
TEXTS = ["de", "fr", "", "1999", "naïve 😀", "x' OR 1=1 --", "nul\0", 'say "so"', "\\", "\u2028", "de-AT", "1e400"]
NUMBERS = [0, 1, -1, 2020, 2020.5, 1999, 0.1, -0.0, 5e-324, 1.7976931348623157e308, 2**62, 2**63 - 1, -(2**63), 1e19]


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
                if kind.metric != "cosine":  # of which the length of so small a vector would be 0
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
        """The same numbers as someone might pass them."""
        forms: list[Callable[[Array], Any]] = [lambda a: a, lambda a: a.tolist(), torch.from_numpy]
        return None if array is None else self.random.choice(forms)(array)

    # -- payloads and filters ------------------------------------------------------------------------------------------

    def payloads(self, n: int) -> list[Any]:
        return [self.payload() for _ in range(n)]

    def payload(self) -> Any:
        """Any JSON value, mostly an object with fields that filters ask for."""
        if self.random.random() < 0.3:
            return self.value(3)
        return {name: self.value(1) for name in self.random.sample(FIELDS, self.random.randrange(4))}

    def value(self, depth: int) -> Any:
        """A JSON value."""
        case = self.random.randrange(8 if depth else 6)
        match case:
            case 0 | 1:
                return self.random.choice(NUMBERS)
            case 2:
                return self.number()
            case 3 | 4:
                return self.random.choice(TEXTS)
            case 5:
                return self.random.choice([None, True, False])
            case 6:
                return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return {self.random.choice([*FIELDS, *TEXTS]): self.value(depth - 1) for _ in range(self.random.randrange(3))}

    def number(self) -> int | float:
        """Of any size."""
        if self.random.random() < 0.5:
            return self.random.choice([1, -1]) * self.random.getrandbits(self.random.choice([8, 32, 53, 64, 200, 1100]))
        found: float = struct.unpack("<d", self.random.randbytes(8))[0]
        return found if np.isfinite(found) else 0.0

    def where(self, payloads: list[Any], depth: int = 2) -> dict[str, Any]:
        """A filter; its operands are often what is stored."""
        if depth and self.random.random() < 0.3:
            parts = [self.where(payloads, depth - 1) for _ in range(self.random.randrange(3))]
            name = self.random.choice(["$and", "$or", "$not"])
            return {name: self.where(payloads, depth - 1) if name == "$not" else parts}
        names = self.random.sample(FIELDS, self.random.choice([1, 1, 1, 2]))
        return {name: self.condition(self._stored(name, payloads)) for name in names}

    def condition(self, stored: Any) -> Any:
        """What may be asked of a field that holds such a value somewhere."""
        ordered = stored if _orderable(stored) else self.random.choice([one for one in NUMBERS if _orderable(one)])
        scalar = stored if stored is None or isinstance(stored, bool) else ordered
        return self.random.choice([
            scalar,
            {"$eq": scalar},
            {"$ne": scalar},
            {self.random.choice(["$gt", "$gte", "$lt", "$lte"]): ordered},
            {"$gte": ordered, "$lt": self.random.choice([one for one in (*NUMBERS, *TEXTS) if _orderable(one)])},
            {"$in": [scalar, self.random.choice(TEXTS), 2020, None]},
            {"$nin": [scalar, True]},
            {"$exists": self.random.random() < 0.5},
            {"$contains": scalar},
            {"$not": {"$eq": scalar}},
        ])  # fmt: skip

    def _stored(self, name: str, payloads: list[Any]) -> Any:
        found = [one[name] for one in payloads if isinstance(one, dict) and name in one]
        return self.random.choice(found) if found else self.random.choice([*NUMBERS, *TEXTS])


def _orderable(value: Any) -> bool:
    """Whether a filter may order by it: text, or a number of 64 bits."""
    if isinstance(value, str):
        return True
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


def as_filtered(payload: Any) -> Any:
    """A payload as filters see it: whole numbers beyond 64 bits are compared as floats."""
    if isinstance(payload, dict):
        return {name: as_filtered(one) for name, one in payload.items()}
    if isinstance(payload, list):
        return [as_filtered(one) for one in payload]
    if type(payload) is int and not -(2**63) <= payload < 2**63:
        try:
            return float(payload)
        except OverflowError:
            return float("inf") if payload > 0 else float("-inf")
    return payload
