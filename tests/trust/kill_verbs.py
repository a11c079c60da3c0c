"""Acts of a writer as a pure function of a seed, a number and the stored records.

An act does something to a database and says what is stored after it. Some leave the records as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from oracle import Id, Model, State, Truth, text_of

import softdb

DIM = 4
RICH = 1000  # records that an index takes at least
GROUPS = 6

Random = np.random.Generator
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"value_dim": 3, "metric": "l2"},
    {"num_classes": 5, "metric": "dot"},
    {"dtype": "float16", "metric": "l2"},
    {"value_dim": 2, "dtype": "float16", "metric": "dot"},
)


class World:
    """A database that acts happen to."""

    def __init__(self, path: Path, schema: dict[str, Any], relaxed: bool = False) -> None:
        self.path = path
        self.durability: Literal["full", "relaxed"] = "relaxed" if relaxed else "full"
        self.db = softdb.open(path, dim=DIM, durability=self.durability, **schema)

    def reopen(self) -> None:
        self.db.close()
        self.db = softdb.open(self.path, durability=self.durability)


class Act(NamedTuple):
    name: str
    do: Callable[[World], object]
    after: State


def truth(random: Random, schema: dict[str, Any], payload: Any, keyless: bool = False) -> Truth:
    """A record whose numbers are the same in either precision."""

    def numbers(width: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(width).astype(np.float16).astype(np.float32)

    value: Any = None
    if "value_dim" in schema:
        value = numbers(schema["value_dim"])
    elif "num_classes" in schema:
        value = int(random.integers(schema["num_classes"]))
    long = random.random() < 0.02
    text = "ß" * int(random.integers(20_000)) if long else f"text {random.integers(1000)}"
    kept = None if random.random() < 0.3 else text
    return Truth(None, None, payload, kept) if keyless else Truth(numbers(DIM), value, payload, kept)


def payload(random: Random, n: int) -> Any:
    text = "é" * int(random.integers(20_000)) if random.random() < 0.02 else "x"
    return {"g": int(random.integers(GROUPS)), "n": n, "text": text}


def columns(records: list[Truth]) -> dict[str, Any]:
    """Records as a verb takes them."""
    values = None if all(record.value is None for record in records) else [record.value for record in records]
    return {
        "keys": [record.key for record in records],
        "values": values,
        "payloads": [record.payload for record in records],
        "texts": [record.text for record in records],
    }


def some(random: Random, state: State, most: int) -> list[Id]:
    ids = list(state)
    return [ids[i] for i in random.permutation(len(ids))[: int(random.integers(1, most + 1))]]


def fresh(random: Random, n: int, most: int) -> list[Id]:
    count = int(random.integers(1, most + 1))
    return [f"{n}:{i}" if n % 2 else n * 100_000 + i for i in range(count)]


def put(verb: str, ids: list[Id], random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """An insert or an upsert."""
    few = 0.1 if len(ids) < 100 else 0.02  # without a key
    records = [truth(random, schema, payload(random, n), random.random() < few) for _ in ids]
    after = {**state, **dict(zip(ids, records, strict=True))}
    return Act(verb, lambda world: getattr(world.db, verb)(ids, **columns(records)), after)


def insert(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return put("insert", fresh(random, n, 150 if random.random() < 0.15 else 12), random, schema, n, state)


def upsert(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return put("upsert", some(random, state, 8) + fresh(random, n, 4), random, schema, n, state)


def update(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """Of some parts of some records."""
    ids = some(random, state, 8)
    given = [truth(random, schema, payload(random, n)) for _ in ids]
    valued = ["values"] if given[0].value is not None else []
    may = ["keys", "payloads", "texts", *valued]
    parts = {may[i] for i in random.permutation(len(may))[: int(random.integers(1, len(may) + 1))]}
    if "texts" in parts:
        parts.add("keys")  # where there is an encoder, a text alone would make the key anew
    if parts & {"keys", "values"} and any(state[one].key is None for one in ids):
        parts |= {"keys", *valued}  # such a record gets both or neither
    after = dict(state)
    for one, new in zip(ids, given, strict=True):
        old = state[one]
        after[one] = Truth(
            new.key if "keys" in parts else old.key,
            new.value if "values" in parts else old.value,
            new.payload if "payloads" in parts else old.payload,
            new.text if "texts" in parts else old.text,
        )
    arguments = {part: column for part, column in columns(given).items() if part in parts}
    return Act("update", lambda world: world.db.update(ids, **arguments), after)


def delete(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    ids = [*some(random, state, 10), "never stored"]
    after = {one: held for one, held in state.items() if one not in ids}
    return Act("delete", lambda world: world.db.delete(ids), after)


def delete_where(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    group = int(random.integers(GROUPS))
    where = {"g": group} if len(state) < RICH else {"$and": [{"g": group}, {"n": n - 1}]}
    after = {one: held for one, held in state.items() if not chosen(held, where)}
    return Act("delete where", lambda world: world.db.delete(where=where), after)


def chosen(held: Truth, where: dict[str, Any]) -> bool:
    return all(held.payload[name] == value for part in where.get("$and", [where]) for name, value in part.items())


def field(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    def do(world: World) -> None:
        if "g" in world.db.stats().fields:
            world.db.drop_field("g")
            world.db.drop_text_index()
        else:
            world.db.index_text()
            world.db.index_field("g")

    return Act("field", do, state)


def compact(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return Act("compact", lambda world: world.db.compact(), state)


def reembed(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """Reembed by an encoder that the next runs have, too, so that one run resumes another."""
    model, size = Model(f"m{n // 8}", DIM), max(8, len(state) // 4)
    return Act(
        "reembed", lambda world: world.db.reembed(model, field=text_of, batch_size=size), model.of(state, schema)
    )


def index(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    """An index of its own, where there are enough records for one."""
    if sum(held.key is not None for held in state.values()) < RICH:
        return insert(random, schema, n, state)
    queries = random.standard_normal((16, DIM))  # few: the time goes into the tuning
    return Act("index", lambda world: world.db.build_index("ivf", recall=0.5, k=5, queries=queries), state)


def snapshot(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return Act("snapshot", lambda world: world.db.snapshot(world.path.with_name(f"copy-{n}")), state)


def reopen(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    return Act("reopen", World.reopen, state)


def search(random: Random, schema: dict[str, Any], n: int, state: State) -> Act:
    queries = random.standard_normal((2, DIM))
    return Act("search", lambda world: world.db.search(queries, k=3).ids, state)


Maker = Callable[[Random, dict[str, Any], int, State], Act]
WEIGHTS: dict[Maker, int] = {
    insert: 6, upsert: 4, update: 4, delete: 3, delete_where: 1, field: 1, compact: 3, index: 1, snapshot: 1,
    reopen: 2, search: 1, reembed: 2,
}  # fmt: skip
MAKERS = [maker for maker, weight in WEIGHTS.items() for _ in range(weight)]
NEED_RECORDS = (upsert, update, delete)


def act(seed: int, n: int, schema: dict[str, Any], state: State) -> Act:
    """The n-th act of a writer's life."""
    random = np.random.default_rng((seed, n))
    maker = MAKERS[int(random.integers(len(MAKERS)))]
    if not state and maker in NEED_RECORDS:
        maker = insert
    return maker(random, schema, n, state)
