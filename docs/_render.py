"""Run the code of the guides, and write what it prints below each block.

    python docs/_render.py                  all guides
    python docs/_render.py start jacobians  these

The blocks marked "python", without a title, run from top to bottom in one namespace. What one prints follows it in a
block marked "text" and titled "Output", which nobody types by hand; where it holds times, its title says more than
"Output", and tests only run it. Where it holds figures of the compiler, its title ends with the version of JAX that it
was rendered with, such as "Output (jax 0.10.2)", and other versions only run it. Output that differs by rounding alone
stays, and so does a guide whose code fails.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

DOCS = Path(__file__).parent
BLOCK = re.compile(
    r'^```python\n(?P<code>.*?)^```\n(?:\n```text title="(?P<title>Output[^"]*)"\n(?P<output>.*?)^```\n)?',
    re.MULTILINE | re.DOTALL,
)
OF_A_VERSION = re.compile(r"\(jax (\d+\.\d+\.\d+)\)$")
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


class Page(NamedTuple):
    """A page after its code has run.

    Attributes:
      text: the page with what its blocks print.
      changes: what a block has printed, after what the page showed, where these differ by more than rounding.
      namespace: what the blocks define.
    """

    text: str
    changes: list[tuple[str, str]]
    namespace: dict[str, Any]


def agree(shown: str, printed: str) -> bool:
    """Return whether two outputs are the same words, with numbers equal up to rounding."""
    # Without spaces: how arrays are aligned depends on the last digits of their numbers.
    words = ["".join(NUMBER.sub("0", text).split()) for text in (shown, printed)]
    if words[0] != words[1]:
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    # What is rounding error itself may be any small number.
    return all(math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=2e-5) for a, b in pairs)


def run(page: str) -> Page:
    """Run the blocks of a page, and return it with their output."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    changes = []

    def with_output(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block["code"], namespace)
        title, shown = block["title"] or "Output", block["output"] or ""
        output = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
        version = OF_A_VERSION.search(title)
        if agree(shown, output):
            output = shown
        elif version:
            if ".".join(map(str, jax.__version_info__[:3])) != version[1]:
                output = shown
            else:
                changes.append((shown, output))
        elif title == "Output" or not (shown and output):
            changes.append((shown, output))
        source = f"```python\n{block['code']}```\n"
        return f'{source}\n```text title="{title}"\n{output}```\n' if output else source

    text = BLOCK.sub(with_output, page)
    return Page(text, changes, namespace)


def main(names: list[str]) -> None:
    """Run the guides of these names, or all."""
    paths = [DOCS / f"{name}.md" for name in names] or sorted(DOCS.glob("*.md"))
    if missing := [path.stem for path in paths if not path.exists()]:
        raise SystemExit(f"no guide is called {', '.join(missing)}; there are {[x.stem for x in DOCS.glob('*.md')]}")
    for path in paths:
        text = run(path.read_text()).text
        if text != path.read_text():
            new = path.with_name(f".{path.name}.new")
            new.write_text(text)
            new.replace(path)
            print(f"{path.stem}: written anew", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
