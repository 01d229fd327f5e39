"""Draw a thumbnail for each example, and write docs/gallery.md, which shows them.

    python docs/_gallery.py            thumbnails and page
    python docs/_gallery.py agents     only the thumbnails of these examples, and the page

Titles and descriptions come from examples/README.md. A thumbnail shows the picture that an example draws,
docs/NAME.png, or else the first lines that it prints.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

ROOT = Path(__file__).parents[1]
SIZE = (480, 250)  # twice the width of a card, for screens with two pixels per CSS pixel
COLUMNS = 3

HEAD = """# Gallery

Each card shows the result of one example, a script that runs on its own. A picture links to the complete output and
its explanation, and the name below links to the code. `python docs/_gallery.py` writes this page.
"""


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site derive it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def examples(root: Path = ROOT) -> dict[str, tuple[str, str, str]]:
    """Return the title, the description and the anchor of each example, from the page of examples."""
    page = (root / "examples/README.md").read_text()
    shows = dict(re.findall(r"^\| \[`(\w+)\.py`\]\(#[^)]*\) \| (.*) \|$", page, flags=re.MULTILINE))
    headings = re.findall(r"^## (`(\w+)\.py`: (.*))$", page, flags=re.MULTILINE)
    return {name: (title[0].upper() + title[1:], shows[name], anchor(whole)) for whole, name, title in headings}


def card(name: str, title: str, shows: str, section: str) -> str:
    link = f"../examples/README.md#{section}"
    shows = shows[0].upper() + shows[1:]
    return (
        f"[![{title}](thumbs/{name}.png)]({link})<br>[**{title}**]({link})<br>{shows}<br>"
        f"[`{name}.py`](../examples/{name}.py)"
    )


def table(cards: list[str]) -> str:
    """Return a Markdown table of cards, whose cells the site lays out as a grid."""
    rows = [cards[i : i + COLUMNS] for i in range(0, len(cards), COLUMNS)]
    rows[-1] += [""] * (COLUMNS - len(rows[-1]))
    lines = ["| " + " | ".join(row).rstrip() + " |" for row in rows]
    return "\n".join(["| " * COLUMNS + "|", "| --- " * COLUMNS + "|", *lines]) + "\n"


def page(root: Path = ROOT) -> str:
    """Return docs/gallery.md: the examples with pictures, then those that only print."""
    found = examples(root)
    drawn = [name for name in found if (root / f"docs/{name}.png").exists()]
    printed = [name for name in found if name not in drawn]
    parts = [HEAD]
    for title, names in (("Pictures", drawn), ("Printed results", printed)):
        if names:
            parts.append(f"## {title}\n\n" + table([card(name, *found[name]) for name in names]))
    return "\n".join(parts)


def left_panels(picture: Image.Image) -> int:
    """Return the width of the panels on the left that fit a thumbnail: all of a wide row would be too small."""
    import numpy as np

    blank = (np.asarray(picture) > 250).all(axis=(0, 2))  # columns of pixels between panels
    narrow, wide = int(1.2 * picture.height), int(2.4 * picture.height)
    if picture.width <= wide:
        return picture.width
    gaps = [x for x in range(narrow, wide) if blank[x]]
    return gaps[-1] if gaps else picture.width


def thumbnail(name: str, root: Path = ROOT) -> None:
    """Draw docs/thumbs/NAME.png from the picture of an example, or from what it prints."""
    from PIL import Image, ImageDraw, ImageFont

    canvas = Image.new("RGB", SIZE, "white")
    drawn = root / f"docs/{name}.png"
    if drawn.exists():
        picture = Image.open(drawn).convert("RGB")
        picture = picture.crop((0, 0, left_panels(picture), picture.height))
        picture.thumbnail(SIZE, Image.Resampling.LANCZOS)
        canvas.paste(picture, ((SIZE[0] - picture.width) // 2, (SIZE[1] - picture.height) // 2))
    else:
        import matplotlib

        font = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"
        text = (root / "examples/README.md").read_text() + (root / "README.md").read_text()
        block = re.findall(rf"<!-- {name} -->\n```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]
        lines = block.splitlines()[1:18]
        write = ImageDraw.Draw(canvas).text
        write((14, 12), "\n".join(lines), fill="#24292f", font=ImageFont.truetype(str(font), 11), spacing=2)
    folder = root / "docs/thumbs"
    folder.mkdir(exist_ok=True)
    canvas.quantize(32, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or examples():
        thumbnail(name)
    (ROOT / "docs/gallery.md").write_text(page())
