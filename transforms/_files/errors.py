"""The errors of files that cannot be used. What the operating system raises (`OSError`, `MemoryError`) is no damage."""

from __future__ import annotations


class Damaged(ValueError):
    """A file or a directory that is not what was written there."""


class OtherVersion(ValueError):
    """A file that is whole, but of another version of its format."""
