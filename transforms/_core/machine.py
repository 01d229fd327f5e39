"""What the machine is, as far as times depend on it: the model of its processor, and how many cores there are."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def processor() -> str:
    """The model of the processor, where the system says it: to JAX a device of any is a "cpu"."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:  # no Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
