"""Build directories of shards in another process, so that the questions of this one do not wait for its threads."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from typing import Any

_log = logging.getLogger("softdb")
LEAST = 50_000  # number of records from which on another process builds them: it takes seconds to start
PROGRAM = (
    "import sys; from softdb.cluster.builder import build as b; sys.stdout.buffer.write(b(sys.stdin.buffer.read()))"
)


def built(arguments: tuple[Any, ...]) -> bool:
    """Build directories with arguments of `Hydrated`, at low priority; return False if the process did not work."""
    process = subprocess.run([sys.executable, "-c", PROGRAM], input=pickle.dumps(arguments), capture_output=True)
    if process.returncode:
        _log.warning("directories are built in this process: %s", process.stderr.decode(errors="replace")[-500:])
        return False
    if process.stdout:
        raise pickle.loads(process.stdout)
    return True
