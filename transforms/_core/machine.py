"""The machine, as far as times depend on it: the model of its processor, and its number of cores."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the model of the processor, where the system has it: JAX calls every model a "cpu"."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def cores() -> int:
    """Return how many cores this process may use."""
    # In a container or under `taskset` these are fewer than the machine has; macOS and Windows do not tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
