"""Files that libraries read which are not made for strangers' files: each in a process of its own, with limits.

The process may crash, lie and take its time: what it sends is numbers and JSON of checked sizes, never pickles.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import MAX_DIM, Array
from softdb.errors import BadInput, MissingDependency
from softdb.formats import reader
from softdb.visible import visible

__all__ = ["GuardedKeys", "GuardedReader"]

_PROGRAM = (
    "import sys; sys.path[:] = eval(sys.argv.pop()); import runpy; runpy.run_path(sys.argv.pop(), None, '__main__')"
)
_ROOT = str(Path(reader.__file__).parents[2])  # where softdb lies, however it is installed
_SLOW = "its reader did not answer in time"
SLOWEST = 10_000_000  # bytes a second that a disk gives, at least


class GuardedReader:
    """A process that reads a file, and what that says of it: how many rows, the metric, the form of the vectors."""

    def __init__(self, path: Path, kind: str, needs: tuple[str, str] | None, name: str | None = None) -> None:
        """Open the file or folder; `needs` is a module and its extra."""
        if needs is not None and find_spec(needs[0]) is None:
            raise MissingDependency(f"{path.name} needs {needs[0]}; pip install 'softdb[{needs[1]}]'")
        self.path, self._size = path, sum(part.stat().st_size for part in (path, *path.rglob("*")))
        seconds = reader.SECONDS + self._size // SLOWEST
        fd = None
        try:
            fd = None if path.is_dir() else os.open(path, os.O_RDONLY)
            order = json.dumps([kind, str(path.absolute()), self._size, seconds, fd, name])
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _PROGRAM, order, reader.__file__, repr([*sys.path, _ROOT])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pipesize=1 << 20,
                pass_fds=() if fd is None else (fd,),
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise BadInput(f"{path.name} cannot be read by a process of its own ({error})") from None
        finally:
            if fd is not None:
                os.close(fd)
        weakref.finalize(self, _end, self._process)
        self.head, _ = self._reply(seconds)
        try:
            self.rows, self.width = int(self.head["rows"]), int(self.head["width"])
            self.metric, self.dtype = self.head["metric"], np.dtype(str(self.head["dtype"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self.unreadable(f"its reader answered otherwise: {error}") from None

    def read(self, start: int, stop: int, exact: int | None = None) -> tuple[Any, Array]:
        """JSON and bytes of the rows of a range; `exact`: how many bytes there must be."""
        with contextlib.suppress(BrokenPipeError):  # how the process has ended, the reply will tell
            self._process.stdin.write(reader.REQUEST.pack(start, stop, reader.SECONDS))  # type: ignore[union-attr]
        return self._reply(reader.SECONDS, exact)

    def _reply(self, seconds: int, exact: int | None = 0) -> tuple[Any, Array]:
        limit = time.monotonic() + seconds + 5  # the process ends itself after `seconds`, unless it was taken over
        lengths = reader.REPLY.unpack(self._bytes(reader.REPLY.size, limit).tobytes())
        if max(lengths) > (most := reader.BATCH * 4 + self._size * 4):
            raise self.unreadable(f"a batch of more than {most:,} bytes")
        text, numbers = self._bytes(lengths[0], limit), self._bytes(lengths[1], limit)
        try:
            told = json.loads(text.tobytes())
        except (ValueError, RecursionError) as error:
            raise self.unreadable(f"its reader answered otherwise: {error}") from None
        if isinstance(told, dict) and "error" in told:
            raise self.unreadable(visible(str(told["error"])))
        if isinstance(told, dict) and "refused" in told:
            raise BadInput(visible(str(told["refused"])))
        if exact is not None and numbers.size != exact:
            raise self.unreadable(f"{numbers.size:,} bytes of vectors where {exact:,} were expected")
        return told, numbers

    def _bytes(self, count: int, limit: float) -> Array:
        buffer, done = np.empty(count, np.uint8), 0
        pipe, waiting = self._process.stdout.fileno(), select.poll()  # type: ignore[union-attr]
        waiting.register(pipe, select.POLLIN)
        while done < count:
            if not waiting.poll(max(0.0, limit - time.monotonic()) * 1000):
                raise self.unreadable(_SLOW)
            part = os.readv(pipe, [buffer[done:].data])
            if not part:
                code = self._process.wait()
                how = f"its reader ended by {signal.Signals(-code).name}" if code < 0 else f"its reader ended: {code}"
                raise self.unreadable(_SLOW if code == -signal.SIGALRM else how)
            done += part
        return buffer

    def unreadable(self, what: str) -> BadInput:
        """End the process; the error that says so."""
        _end(self._process)
        return BadInput(f"{self.path.name} cannot be read ({what}); it is damaged, or of another version of its writer")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        pipe.close()  # type: ignore[union-attr]


class GuardedKeys:
    """Vectors in a file of one matrix, as an array that is sliced."""

    ndim = 2

    def __init__(self, source: GuardedReader) -> None:
        self._source, self.shape, self.dtype = source, (source.rows, source.width), source.dtype
        self.metric, self.row = source.metric, source.width * source.dtype.itemsize
        if not 0 < source.width <= MAX_DIM or source.dtype.kind not in "fiu" or source.rows < 0:
            raise source.unreadable(f"it holds vectors of {source.width:,} numbers of {source.dtype}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: slice | int) -> Array:
        if not isinstance(places, slice):
            vector: Array = self[places : places + 1][0]
            return vector
        start, stop, _ = places.indices(len(self))
        vectors = np.empty((max(0, stop - start), self.shape[1]), self.dtype)
        for first, last, part in self.parts(start, stop):
            vectors[first - start : last - start] = self.matrix(part)
        return vectors

    def matrix(self, part: Array) -> Array:
        """Bytes of vectors as these."""
        vectors: Array = part.view(self.dtype).reshape(-1, self.shape[1])
        return vectors

    def parts(self, start: int, stop: int, more: int = 0, size: int = MAX_DIM) -> Iterator[tuple[int, int, Array]]:
        """Ranges of at most `size` rows and not many bytes, and their bytes; after the vectors `more` bytes a row."""
        row = self.row + more
        step = max(1, min(size, reader.BATCH // row))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield first, last, self._source.read(first, last, (last - first) * row)[1]
