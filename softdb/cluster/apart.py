"""Build directories of shards in another process, so that the questions of this one do not wait for its threads."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from softdb.errors import SoftDBError

_log = logging.getLogger("softdb")
LEAST = 50_000  # number of records from which on another process builds them: it takes seconds to start
PROGRAM = "import sys; from softdb.cluster.apart import build as b; sys.stdout.buffer.write(b(sys.stdin.buffer.read()))"


def built(make: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Call `make` in another process at low priority, and close the result; return False if that process failed.

    Raises the error of softdb that `make` raised.
    """
    order = pickle.dumps((make, arguments))
    process = subprocess.run([sys.executable, "-c", PROGRAM], input=order, capture_output=True)
    if process.returncode:
        _log.warning("directories are built in this process: %s", process.stderr.decode(errors="replace")[-500:])
        return False
    if process.stdout:
        raise pickle.loads(process.stdout)
    return True


def build(order: bytes) -> bytes:
    """Build directories for another process; return the pickled error of softdb, or nothing."""
    os.nice(10)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        make, arguments = pickle.loads(order)
        make(*arguments).close()
    except SoftDBError as error:
        return pickle.dumps(error)
    return b""


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, whose directories another process may open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
