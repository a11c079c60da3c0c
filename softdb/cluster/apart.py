"""Build directories of shards in another process, so that the questions of this one do not wait for its threads."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

from softdb.errors import SoftDBError

_log = logging.getLogger("softdb")
LEAST = 50_000  # number of records from which on another process builds them: it takes seconds to start
PROGRAM = "import sys; from softdb.cluster.apart import build as b; sys.stdout.buffer.write(b(sys.stdin.buffer.read()))"


def built(arguments: tuple[Any, ...]) -> bool:
    """Build directories with arguments of `Hydrated`, at low priority; return False if the process did not work."""
    process = subprocess.run([sys.executable, "-c", PROGRAM], input=pickle.dumps(arguments), capture_output=True)
    if process.returncode:
        _log.warning("directories are built in this process: %s", process.stderr.decode(errors="replace")[-500:])
        return False
    if process.stdout:
        raise pickle.loads(process.stdout)
    return True


def build(sent: bytes) -> bytes:
    """Build directories in this process; return the pickled error of softdb, or nothing."""
    from softdb.cluster.hydrate import Hydrated

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
    os._exit(1)
