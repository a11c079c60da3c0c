"""The process that builds directories of shards for another process; see `apart.py`."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

from softdb.cluster.hydrate import Hydrated
from softdb.errors import SoftDBError


def build(sent: bytes) -> bytes:
    """Build directories in this process; return the pickled error of softdb, or nothing."""
    os.nice(10)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        Hydrated(*pickle.loads(sent)).close()
    except SoftDBError as error:
        return pickle.dumps(error)
    return b""


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, whose directories another process may open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
