"""Look at a program, and rewrite it."""

from ._profile import Operation, Profile, profile

__all__ = ["Operation", "Profile", "profile"]
