"""Simulate the end of the process, for the checks that `aot` defers to it."""

import atexit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def end_of_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """Return a function that runs plurax's exit handlers and returns their warnings.

    It returns only warnings about files of this test, since other tests may have left programs too. It also runs after
    each test, so that nothing is left for the next one, nor for the actual end, when the directories are gone.
    """
    register, unregister = atexit.register, atexit.unregister
    registered: list[Callable[[], Any]] = []

    def register_here(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not fun.__module__.startswith("plurax."):
            return register(fun, *args, **kwargs)
        registered.append(lambda: fun(*args, **kwargs))
        return fun

    def unregister_here(fun: Callable[..., Any]) -> None:
        if fun.__module__.startswith("plurax."):
            registered.clear()
        else:
            unregister(fun)

    def end() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for run in [registered.pop() for _ in registered[:]]:
                run()
        return [message for message in (str(warning.message) for warning in caught) if str(tmp_path) in message]

    monkeypatch.setattr(atexit, "register", register_here)
    monkeypatch.setattr(atexit, "unregister", unregister_here)
    yield end
    end()
