"""The projection that is trained, and its file."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softdb import check
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.store.files import write_whole
from softdb.train.keys import KeyEncoder
from softdb.typing import Vectors

FORMAT = "softdb projection 1"
TRAINED = "softdb train"  # of the names of encoders
BROKEN = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, MemoryError)


class QueryProjection(torch.nn.Linear):
    """A linear map of the queries in the space of the keys, q' = W q + b, which begins as the identity.

    The records stay what they are and so does their index, unless it has `keys`, too: an encoder that was trained with
    it and is applied to the records by `apply`. Cost d² a query.

    Args:
        dim: d, the width of queries and keys.
        bias: whether there is a b.
        hidden: the width of the layer inside `keys`, a `KeyEncoder`; None: there is none.
        seed: of `keys` at first.

    >>> QueryProjection(2)(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 4.0]
    """

    def __init__(self, dim: int, bias: bool = False, hidden: int | None = None, seed: int = 0) -> None:
        dim = check.integer(dim, "dim", 1, check.MAX_DIM)
        if not isinstance(bias, bool):
            raise BadInput(f"bias is {check.shown(bias)}; expected True or False")
        super().__init__(dim, dim, bias)
        self.keys = None if hidden is None else KeyEncoder(dim, hidden, seed)
        self.metadata: dict[str, Any] = {}  # how it was trained, where it came from a file

    def reset_parameters(self) -> None:
        """Make it the identity again."""
        torch.nn.init.eye_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @property
    def name(self) -> str:
        """Return the name of the encoder by `keys` that a database notes: it tells these numbers from any others."""
        digest = hashlib.blake2b(digest_size=8)
        for key, one in sorted(self.state_dict().items()):
            digest.update(key.encode() + one.detach().cpu().contiguous().numpy().tobytes())
        return f"{TRAINED} {digest.hexdigest()}"

    @torch.no_grad()
    def of(self, db: Verbs, queries: Vectors) -> Tensor:  # (q, d)
        """Queries as `db` is asked them, (q, d) numbers or q texts, projected. Raises BadInput for another width.

        Texts that are asked of a database with an encoder of these two (`TextTowers`) come projected from it.
        """
        asked = db.core.as_queries(queries)
        if self.keys is not None and db.encoder_name == self.name and check.are_texts(queries):
            return asked
        if asked.shape[1] != self.in_features:
            raise BadInput(
                f"the projection is of queries {self.in_features} wide but this database is {asked.shape[1]} wide; use "
                "the one that was trained for it"
            )
        with check.precise():
            return self(asked.float())  # type: ignore[no-any-return]


def save(path: str | os.PathLike[str], projection: QueryProjection, metadata: dict[str, Any] | None = None) -> None:
    """Write a projection to a file, which appears whole or not at all.

    What torch.load(path, weights_only=True) gives is {"format", "state_dict", "metadata"}: the state_dict of the
    module, or of a torch.nn.Linear, and plain facts about the training. Raises BadInput, before anything is written,
    for metadata that is not JSON.
    """
    facts = {**projection.metadata, **(metadata or {})}
    check.json_text(facts, "metadata")
    write_whole(Path(path), packed({"format": FORMAT, "state_dict": projection.state_dict(), "metadata": facts}))


def load(path: str | os.PathLike[str]) -> QueryProjection:
    """The projection of a file that `save` wrote, with its `metadata`. Raises BadInput where it is none.

    projection = softdb.train.load("projection.pt")
    db.search(projection(queries), k=10)
    """
    path = Path(path)
    found = unpacked(path, "projection")
    state: Any = found.get("state_dict") if found.get("format") == FORMAT else None
    if not _is_projection(state):
        raise BadInput(f"{path} is not a projection that softdb train wrote; give such a file")
    weight = state["weight"]
    if not all(bool(one.isfinite().all()) for one in state.values()):
        raise BadInput(f"{path} holds NaN or infinity; train the projection anew, with a smaller rate")
    projection = QueryProjection(
        len(weight), "bias" in state, len(state["keys.inner"]) if "keys.inner" in state else None
    )
    projection.load_state_dict(state)
    metadata = found.get("metadata")
    projection.metadata = metadata if isinstance(metadata, dict) else {}
    return projection


KEYS = {"inner": "hd", "inner_bias": "h", "outer": "dh", "outer_bias": "d"}


def _is_projection(state: object) -> bool:
    """Return True if something is the state_dict of a square linear map, with or without an encoder of keys."""
    if not isinstance(state, dict) or "weight" not in state:
        return False
    keys = {name for name in state if str(name).startswith("keys.")}
    if not {"weight", "bias"} >= set(state) - keys or keys not in (set(), {f"keys.{name}" for name in KEYS}):
        return False
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in state.values()):
        return False
    if not all(one.numel() * one.element_size() <= one.untyped_storage().nbytes() for one in state.values()):
        return False  # a few bytes that stand for gigabytes
    sizes = {"d": len(state["weight"]) if state["weight"].ndim == 2 else 0}
    sizes["h"] = len(state["keys.inner"]) if keys and state["keys.inner"].ndim else 0
    shapes = {"weight": "dd", "bias": "d", **{f"keys.{name}": shape for name, shape in KEYS.items()}}
    fits = all(tuple(one.shape) == tuple(sizes[axis] for axis in shapes[name]) for name, one in state.items())
    return fits and all(0 < size <= check.MAX_DIM for axis, size in sizes.items() if axis == "d" or keys)


def packed(content: dict[str, Any]) -> bytes:
    """Return the bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def unpacked(path: Path, what: str) -> dict[str, Any]:
    """Return the contents of a file by torch.load, weights and plain numbers only. Raises BadInput for another file."""
    if not path.is_file():
        raise BadInput(f"{path} is not there; give the file of a {what}")
    try:
        found = torch.load(io.BytesIO(path.read_bytes()), weights_only=True, map_location="cpu")
    except (*BROKEN, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"{path} cannot be read as a {what} ({check.shown(reason)})") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path} is not the file of a {what}; it holds a {type(found).__name__}")
    return found
