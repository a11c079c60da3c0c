"""Files that libraries read which are not made for strangers' files: each in a process of its own, with limits.

The process may crash, lie and take its time: it sends bytes of arrays and JSON of bounded sizes, never pickles.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np

from softdb.check import Array
from softdb.errors import BadInput
from softdb.formats import sandbox
from softdb.visible import visible

__all__ = ["parts"]

_PROGRAM = (
    "import sys; sys.path[:] = eval(sys.argv.pop()); import runpy; runpy.run_path(sys.argv.pop(), None, '__main__')"
)
_ROOT = str(Path(sandbox.__file__).parents[2])  # where softdb lies, however it is installed
_SLOW = "its reader did not answer in time"


def parts(path: Path, kind: str, size: int, name: str | None = None) -> Generator[Array, None, None]:
    """Yield the bytes of each part of a file or folder, as `softdb.formats.sandbox` sends them. Raises BadInput."""
    length = sum(part.stat().st_size for part in (path, *path.rglob("*")))
    seconds = sandbox.SECONDS + length // 1_000_000
    order = json.dumps([kind, str(path.absolute()), sandbox.room(length), seconds, size, name])
    try:
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _PROGRAM, order, sandbox.__file__, repr([*sys.path, _ROOT])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read by a process of its own ({error})") from None
    try:
        yield from _received(process, seconds + 5, 4 * (sandbox.BATCH + length))
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        text = f"{path.name} cannot be read ({error}); it is damaged, or of another version of its writer"
        raise BadInput(text) from None
    finally:
        process.kill()
        process.communicate()


def _received(process: subprocess.Popen[bytes], seconds: int, most: int) -> Iterator[Array]:
    while True:
        limit = time.monotonic() + seconds
        mark, length = sandbox.PART.unpack(_bytes(process, sandbox.PART.size, limit).data)
        if length > most:
            raise ValueError(f"a part of more than {most:,} bytes")
        part = _bytes(process, length, limit)
        if mark == sandbox.END:
            return
        if mark != sandbox.DATA:
            text = visible(part.tobytes().decode(errors="replace"))
            raise BadInput(text) if mark == sandbox.REFUSAL else ValueError(text)
        yield part


def _bytes(process: subprocess.Popen[bytes], count: int, limit: float) -> Array:
    buffer, done = np.empty(count, np.uint8), 0
    pipe, waiting = process.stdout.fileno(), select.poll()  # type: ignore[union-attr]
    waiting.register(pipe, select.POLLIN)
    while done < count:
        if not waiting.poll(max(0.0, limit - time.monotonic()) * 1000):
            raise ValueError(_SLOW)
        length = os.readv(pipe, [buffer[done:].data])
        if not length:
            code = process.wait(5)
            how = f"its reader ended by {signal.Signals(-code).name}" if code < 0 else f"its reader ended: {code}"
            raise ValueError(_SLOW if code == -signal.SIGPROF else how)
        done += length
    return buffer
