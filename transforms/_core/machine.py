"""The model of the processor and the number of cores, on which measured times depend."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the model of the processor if the system reports it; JAX calls every model "cpu"."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def cores() -> int:
    """Return how many cores this process may use."""
    # In a container or under `taskset` it may use fewer than the machine has; macOS and Windows do not report this.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
