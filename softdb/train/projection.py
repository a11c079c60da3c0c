"""Trained projection of queries, and its file."""

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
TRAINED = "softdb train"  # beginning of a trained encoder's name
BROKEN = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, MemoryError)


class QueryProjection(torch.nn.Linear):
    """A linear map of queries into the space of the keys, q' = W q + b, initially the identity.

    The records and their index stay unchanged, unless the projection also has `keys`, an encoder that was trained with
    it; `apply` applies that to the records. Cost d² a query.

    Args:
        dim: d, the width of queries and keys.
        bias: True: there is a bias b.
        hidden: width of the hidden layer of `keys`, a `KeyEncoder`; None: no `keys`.
        seed: seed for the initial parameters of `keys`.

    Raises BadInput for widths that are no whole numbers above 0, and a bias that is no bool.

    >>> QueryProjection(2)(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 4.0]
    """

    def __init__(self, dim: int, bias: bool = False, hidden: int | None = None, seed: int = 0) -> None:
        dim = check.integer(dim, "dim", 1, check.MAX_DIM)
        if not isinstance(bias, bool):
            raise BadInput(f"bias is {check.shown(bias)}; expected True or False")
        super().__init__(dim, dim, bias)
        self.keys = None if hidden is None else KeyEncoder(dim, hidden, seed)
        self.metadata: dict[str, Any] = {}  # facts about the training, if it came from a file

    def reset_parameters(self) -> None:
        """Reset the map to the identity."""
        torch.nn.init.eye_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    @property
    def name(self) -> str:
        """Name that a database stores for this encoder of keys; it contains a digest of all parameters."""
        digest = hashlib.blake2b(digest_size=8)
        for key, tensor in sorted(self.state_dict().items()):
            digest.update(key.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return f"{TRAINED} {digest.hexdigest()}"

    @torch.no_grad()
    def of(self, db: Verbs, queries: Vectors) -> Tensor:  # (q, d), or (…, d)
        """Check queries of `db`, (…, d) numbers or q texts, and project them. Raises BadInput for another width.

        Texts are not projected again if the database's encoder is a `TextTowers` of this projection.
        """
        vectors = db.core.as_queries(queries)
        if self.keys is not None and db.encoder_name == self.name and check.are_texts(queries):
            return vectors
        if vectors.shape[1] != self.in_features:
            raise BadInput(
                f"the projection expects queries of width {self.in_features}, but the database has {vectors.shape[1]}; "
                "use the projection that was trained for it"
            )
        with check.precise():
            projected: Tensor = self(vectors.float())
        return projected.reshape(*check.leading(queries, len(projected)), projected.shape[1])


def save(path: str | os.PathLike[str], projection: QueryProjection, metadata: dict[str, Any] | None = None) -> None:
    """Write a projection to a file, atomically.

    torch.load(path, weights_only=True) returns {"format", "state_dict", "metadata"}: a state_dict that also fits
    torch.nn.Linear if there are no `keys`, and facts about the training. Raises BadInput, before anything is written,
    for another module, and for metadata that is not JSON.
    """
    if not isinstance(projection, QueryProjection):
        raise BadInput(f"projection is {check.shown(projection)}; expected a QueryProjection, such as fit's projection")
    facts = {**projection.metadata, **(metadata or {})}
    check.json_text(facts, "metadata")
    write_whole(Path(path), packed({"format": FORMAT, "state_dict": projection.state_dict(), "metadata": facts}))


def load(path: str | os.PathLike[str]) -> QueryProjection:
    """Read a projection, with its `metadata`, from a file that `save` wrote. Raises BadInput for any other file.

    projection = softdb.train.load("projection.pt")
    db.search(projection(queries), k=10)
    """
    path = Path(path)
    content = unpacked(path, "projection")
    state: Any = content.get("state_dict") if content.get("format") == FORMAT else None
    if not _is_projection(state):
        raise BadInput(f"{path} is not a projection that softdb train wrote; give such a file")
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise BadInput(f"{path} holds NaN or infinity; train the projection anew, with a smaller rate")
    hidden = len(state["keys.inner"]) if "keys.inner" in state else None
    projection = QueryProjection(len(state["weight"]), "bias" in state, hidden)
    projection.load_state_dict(state)
    metadata = content.get("metadata")
    projection.metadata = metadata if isinstance(metadata, dict) else {}
    return projection


def _is_projection(state: object) -> bool:
    """Return True for the state_dict of a square linear map, with or without an encoder of keys."""
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) and x.is_floating_point() for x in state.values()):
        return False
    if not all(x.numel() * x.element_size() <= x.untyped_storage().nbytes() for x in state.values()):
        return False  # an expanded tensor: a small file would take gigabytes of memory
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    d, h = (shapes.get(name, ())[:1] or (0,) for name in ("weight", "keys.inner"))
    expected = {"weight": d + d} | ({"bias": d} if "bias" in shapes else {})
    if any(str(name).startswith("keys.") for name in shapes):
        expected |= {"keys.inner": h + d, "keys.inner_bias": h, "keys.outer": d + h, "keys.outer_bias": d}
    return shapes == expected and all(0 < size <= check.MAX_DIM for shape in shapes.values() for size in shape)


def packed(content: dict[str, Any]) -> bytes:
    """Serialize an object with torch.save."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def unpacked(path: Path, kind: str) -> dict[str, Any]:
    """Read a file with torch.load, only tensors and plain values. Raises BadInput unless the file holds a dict."""
    if not path.is_file():
        raise BadInput(f"{path} is not there; give the file of a {kind}")
    try:
        content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True, map_location="cpu")
    except (*BROKEN, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadInput(f"{path} cannot be read as a {kind} ({check.shown(reason)}); give another") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} is not the file of a {kind}; it holds a {type(content).__name__}")
    return content
