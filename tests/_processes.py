"""Processes of tests that run beside them."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any


class Process(subprocess.Popen[str]):
    """A process that writes to files: it would stop at a full pipe, which nobody reads before it ends."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed when read
        super().__init__(command, stdout=self._files[0], stderr=self._files[1], text=True, **options)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr."""
        assert input is None, "nothing is written to its stdin"
        self.wait(timeout)
        found = []
        for file in self._files:
            file.seek(0)
            found.append(file.read())
            file.close()
        return found[0], found[1]


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str, str]]:
    """Return the codes and outputs of processes that end within a time; kill those that do not."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
