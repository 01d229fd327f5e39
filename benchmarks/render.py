"""Render the benchmark pages and their pictures from the JSON files in this folder, without measuring.

python benchmarks/render.py

Each file holds the versions, the device, and tables: rows, and comparisons with others' best. A run on an accelerator
has a separate file. A measured cell holds a median, and quartiles where they are known.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = (
    "ensemble",
    "jacobian",
    "sparse",
    "program",
    "compile",
    "privacy",
    "convolutions",
    "gradient_statistics",
    "curvature",
    "dpsgd",
    "sharing",
    "long_runs",
    "at_scale",
    "accelerators",
    "versions",
)
PAGES = ("README.md", "comparisons.md", *(f"{name}.md" for name in SCRIPTS))
# From the palette of Okabe and Ito, which color-blind readers can distinguish.
BLACK, ORANGE, SKY, GREEN, BLUE, RED = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
GRAY, PALE = "#777777", "#bbbbbb"


def number(value: Any) -> str:
    """Format a number with three significant digits; integers and values above a thousand have no fraction."""
    if isinstance(value, int) or value == 0:
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def shown(cell: Any) -> str:
    """Format a cell: a number, a median with its quartiles, or words."""
    if isinstance(cell, dict):
        spread = " to ".join(map(number, cell.get("quartiles", ())))
        return number(cell["median"]) + (f" ({spread})" if spread else "")
    if cell is None or isinstance(cell, str):
        return cell or ""
    return number(cell)


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as a Markdown table with a column for each key."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(shown(row.get(key)) for key in head) + " |" for row in rows]
    return "\n".join(lines)


def read(here: Path) -> dict[str, dict[str, Any]]:
    """Read the JSON files by name: the script, followed by the platform unless it is a CPU."""
    paths = [path for name in SCRIPTS for path in (here / f"{name}.json", *sorted(here.glob(f"{name}.*.json")))]
    return {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}


def section(found: dict[str, Any]) -> str:
    """Format the versions, the device and the tables of a file."""
    versions = [f"{name} {version}" if version else f"without {name}" for name, version in found["versions"].items()]
    device, cpu = found["device"], found["device"]["platform"] == "cpu"
    about = f"{', '.join(versions)}; {device['platform']} ({device['kind']}), {device['cores']} cores."
    where = "" if cpu else f", on {device['platform']}"
    parts = [f"## {title}{where}\n\n{table(one['rows'])}" for title, one in found["tables"].items()]
    return "\n\n".join([about, *parts])


def claims(files: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every comparison with the fastest alternative, our slowest first."""
    rows = []
    for name, found in files.items():
        for title, one in found["tables"].items():
            for claim in one["claims"]:
                what = "; ".join(filter(None, (title, claim["what"])))
                rows.append({"in": name} | claim | {"what": what})
    return sorted(rows, key=lambda row: -row["ours / other"]["median"])


def ends(row: dict[str, Any]) -> list[float]:
    """Return the quartiles of a comparison, or its median twice if it has none."""
    return row["ours / other"].get("quartiles") or [row["ours / other"]["median"]] * 2


def slower(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons whose whole interquartile range is more than a tenth above 1."""
    return [row for row in rows if ends(row)[0] > 1.1]


def faster(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparisons whose whole interquartile range is more than a tenth below 1."""
    return [row for row in rows if ends(row)[1] < 0.9]


def script(row: dict[str, Any]) -> str:
    """Return the script of a comparison; a file name ends with the platform unless it is a CPU."""
    return row["in"].partition(".")[0]


def count(rows: list[dict[str, Any]]) -> str:
    """Say how many comparisons are lost, won and drawn."""
    lost, won = len(slower(rows)), len(faster(rows))
    s = "" if len(rows) == 1 else "s"
    return f"{len(rows)} comparison{s}: {won} faster, {len(rows) - won - lost} about as fast, {lost} slower"


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparison with the largest gain of each table that has one."""
    best = {row["what"].partition(";")[0]: row for row in faster(rows)}  # rows are sorted by ratio: the last one stays
    return sorted(best.values(), key=lambda row: row["ours / other"]["median"])


def topic(rows: list[dict[str, Any]], most: int = 4) -> str:
    """Show comparisons of a topic without their times: the largest gains, and all that is slower."""
    keys = ("what", "ours", "fastest other", "ours / other")
    shown = [*gains(rows)[:most], *reversed(slower(rows))] or rows
    return table([{key: row[key] for key in keys} for row in shown])


def topics(rows: list[dict[str, Any]], titles: dict[str, str]) -> str:
    """Show a section for each topic that has comparisons."""
    parts = []
    for name, title in titles.items():
        of = [row for row in rows if script(row) == name]
        if of:
            parts.append(f"### {title}\n\n{count(of)}; [all tables, and what limits them]({name}.md).\n\n{topic(of)}")
    return "\n\n".join(parts)


def pages(here: Path = HERE) -> dict[str, str]:
    """Return each page by its file name, with the tables between its marks."""
    files = read(here)
    rows = claims(files)
    texts = {file: (here / file).read_text() for file in PAGES}
    titles = {name: texts[f"{name}.md"].splitlines()[0].removeprefix("# ") for name in SCRIPTS}
    between = {
        ("README.md", "summary"): f"{count(rows)}.",
        ("README.md", "topics"): topics(rows, titles),
        ("comparisons.md", "comparisons"): table(rows),
    }
    for name in SCRIPTS:
        found = [section(found) for stem, found in files.items() if stem.partition(".")[0] == name]
        between[f"{name}.md", name] = "\n\n".join(found)
    for (file, name), content in between.items():
        before, _, rest = texts[file].partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise ValueError(f"{file} has no marks for {name}; add the lines <!-- {name} --> and <!-- /{name} -->")
        texts[file] = f"{before}<!-- {name} -->\n{content}\n{end}{after}"
    return texts


def rows_of(tables: dict[str, Any], start: str) -> list[dict[str, Any]]:
    """Return the rows of the table whose title begins with `start`."""
    return next(one["rows"] for title, one in tables.items() if title.startswith(start))


def bars(axis: Any, cells: dict[str, tuple[dict[str, Any], str, str]], title: str) -> None:
    """Draw horizontal bars with quartiles from a cell, a color and a label for each name."""
    medians = [cell["median"] for cell, *_ in cells.values()]
    ends = [cell.get("quartiles") or [cell["median"]] * 2 for cell, *_ in cells.values()]
    errors = [
        [median - low for median, (low, _) in zip(medians, ends, strict=True)],
        [high - median for median, (_, high) in zip(medians, ends, strict=True)],
    ]
    colors = [color for _, color, _ in cells.values()]
    axis.barh(list(cells), medians, color=colors, xerr=errors, error_kw={"elinewidth": 1, "ecolor": GRAY})
    for place, ((_, _, words), (_, high)) in enumerate(zip(cells.values(), ends, strict=True)):
        axis.annotate(words, (high, place), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, 1.85 * max(high for _, high in ends))
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0)
    axis.spines["bottom"].set_visible(False)
    axis.set_ylim(len(cells) - 0.4, -0.6)


def draw_dpsgd(tables: dict[str, Any], plt: Any) -> Any:
    """Draw private and ordinary steps, by network and by library."""
    networks = ("MLP 784-512-256-10, batch 256", "CNN", "LSTM", "GPT")
    figure, axes = plt.subplots(1, len(networks), figsize=(10.6, 3.1), sharey=True, layout="constrained")
    for axis, network in zip(axes, networks, strict=True):
        title = next(title for title in tables if title.startswith(f"Private steps: {network}"))
        rows = rows_of(tables, title)
        cells = {}
        for name, start, color in (
            ("JAX, ordinary", "ordinary step", PALE),
            ("Plurax", "DPSGD.step", BLUE),
            ("jax-privacy", "jax-privacy", ORANGE),
            ("PyTorch, ordinary", "torch, ordinary", PALE),
            ("Opacus", "Opacus", RED),
        ):
            found = [row for row in rows if row[""].startswith(start)]
            if found:
                best = min(found, key=lambda row: row["ms"]["median"])
                times = "" if color == PALE else f", ×{number(best['time / ordinary step']['median'])}"
                cells[name] = (best["ms"], color, f"{number(best['ms']['median'])} ms{times}")
        bars(axis, cells, f"{network.split()[0]}, batch {title.partition('batch ')[2].partition(',')[0]}")
    figure.suptitle("Time of a DP-SGD step including noise (×: median ratio to an ordinary step of the same library)")
    return figure


def draw_ensemble(tables: dict[str, Any], plt: Any) -> Any:
    """Draw the time per member over the number of members, and the candidates of auto."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    styles = {"loop by hand (ms per member)": ("s--", GRAY), "a step (ms per member)": ("o-", BLUE)}
    for kind in ("MLP", "LeNet5"):
        rows = rows_of(tables, f"{kind}: time of a training step per")
        sizes = [row["members"] for row in rows]
        for key, (style, color) in styles.items():
            cells = [row[key] for row in rows]
            ends = [cell.get("quartiles") or [cell["median"]] * 2 for cell in cells]
            axes[0].plot(sizes, [cell["median"] for cell in cells], style, color=color)
            axes[0].fill_between(sizes, *zip(*ends, strict=True), color=color, alpha=0.2, linewidth=0)
            words = f"{kind}, {'a loop in raw JAX' if color == GRAY else 'Plurax'}"
            place = (sizes[len(sizes) // 2], cells[len(sizes) // 2]["median"])
            lift = 8 if color == GRAY else -16
            axes[0].annotate(words, place, xytext=(0, lift), textcoords="offset points", ha="center", color=color)
    axes[0].set(xscale="log", yscale="log", xlabel="members")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low / 1.6, high * 1.6)  # room for the labels
    axes[0].set_title("Training step: ms per member", loc="left", fontsize=10)
    axes[0].set_xticks(sizes, [str(size) for size in sizes])
    ticks = [x for power in range(-3, 4) for x in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    ticks = [x for x in ticks if low / 1.6 <= x <= high * 1.6]
    axes[0].set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes[0].minorticks_off()
    for axis, kind in zip(axes[1:], ("MLP", "LeNet5"), strict=True):
        rows = [
            row for row in rows_of(tables, f"{kind}, 10 members, batch 64: candidates of auto") if row["ms"] is not None
        ]
        cells = {
            row[""].replace(", convolutions as matrix products", "\nas matrix products"): (
                {"median": row["ms"]},
                BLUE if row["note"] == "chosen" else PALE,
                f"{number(row['ms'])} ms" + (", chosen" if row["note"] == "chosen" else ""),
            )
            for row in rows
        }
        bars(axis, cells, f"Candidates of auto: {kind}, 10 members")
    return figure


def draw_jacobian(tables: dict[str, Any], plt: Any) -> Any:
    """Draw memory and time of a Jacobian: dense, within budgets (a line marks each budget), and in chunks."""
    rows = {row[""]: row for row in rows_of(tables, "A perceptron's Jacobian")}
    budgets = [int(found[1]) if (found := re.search('memory_budget="(\\d+)MiB"', name)) else 0 for name in rows]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
    memory, times = {}, {}
    for (name, row), budget in zip(rows.items(), budgets, strict=True):
        color = BLUE if re.match("memory_budget|chunk_size", name) else PALE
        held = row["temporaries (MiB)"]
        words = "unknown" if held is None else number(held) + f" (budget {budget})" * bool(budget)
        memory[name] = {"median": held or 0, "quartiles": [held or 0, max(held or 0, budget)]}, color, words
        times[name] = row["ms"], color, f"{number(row['ms']['median'] / 1e3)} s"
    bars(axes[0], memory, "Temporaries (MiB), without the 64 MiB result")
    bars(axes[1], times, "Time")
    axes[1].tick_params(labelleft=False)
    return figure


def draw_sparse(tables: dict[str, Any], plt: Any) -> Any:
    """Draw the time of the others relative to ours, by problem."""
    rows = rows_of(tables, "Sparse Jacobians")
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    marks = {"dense": (GRAY, "s", -0.3), "sparsejac": (ORANGE, "^", 0.0), "asdex": (RED, "o", 0.3)}
    for name, (color, mark, lift) in marks.items():
        for place, row in enumerate(rows):
            cell = row.get(f"{name} / ours")
            if cell:
                ends = cell.get("quartiles") or [cell["median"]] * 2
                axis.plot(ends, [place + lift] * 2, color=color, linewidth=1.5)
                label = name if name == "dense" else f"{name} (sparse)"
                axis.plot(cell["median"], place + lift, mark, color=color, label=label if place == 0 else None)
                words = number(cell["median"]) if cell["median"] > 1.5 else ""  # no room for labels close to 1
                offset = {"xytext": (6, 0), "textcoords": "offset points"}
                axis.annotate(words, (ends[1], place + lift), **offset, va="center", color=color, fontsize=8)
    axis.axvline(1, color=BLUE, linewidth=1.5)
    axis.annotate("Plurax", (1, -0.75), xytext=(-4, 0), textcoords="offset points", color=BLUE, ha="right", va="center")
    axis.set_yticks(range(len(rows)), [row["problem"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -1)
    axis.set_xscale("log")
    axis.set_xticks([0.5, 1, 10, 100, 1000], ["0.5", "1", "10", "100", "1,000"])
    axis.minorticks_off()
    axis.set_title("Time of a compiled Jacobian or Hessian, relative to Plurax", loc="left", fontsize=10)
    axis.legend(loc="center", bbox_to_anchor=(0.42, 0.6), frameon=False)
    return figure


def draw_compile(tables: dict[str, Any], plt: Any) -> Any:
    """Draw compiling and running 48 blocks, and the first result of a process."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 2.9), layout="constrained")
    rows = rows_of(tables, "Layers, value")
    head = next(iter(rows[0]))
    colors = {"loop": PALE, "nnx.scan": ORANGE, "scan_layers": BLUE, "remat=True": BLUE, "remat=dots_saveable": BLUE}
    names = {name: name.replace("remat=", "scan_layers,\nremat=") for name in colors}
    by_name = {row[head]: row for row in rows}
    for axis, key, unit, title in (
        (axes[0], "compile (s)", "s", f"{head} of a transformer: compile time"),
        (axes[1], "step (ms)", "ms", "Step time: value and gradient"),
    ):
        cells = {
            names[name]: (by_name[name][key], color, f"{number(by_name[name][key]['median'])} {unit}")
            for name, color in colors.items()
        }
        bars(axis, cells, title)
    axes[1].set_yticks([])
    first = [row for row in rows_of(tables, "Time to the first result") if "CNN" in row["program"]]
    cells = {
        row["compiled by"].replace(", enable", ",\nenable"): (
            row["first result (ms)"],
            BLUE if row["compiled by"].startswith("aot") else PALE,
            f"{number(row['first result (ms)']['median'])} ms",
        )
        for row in first
    }
    bars(axes[2], cells, "First gradient of a CNN in a new process")
    return figure


# For each picture, its function and the file with its data.
PICTURES = {
    "dpsgd": (draw_dpsgd, "dpsgd"),
    "ensemble": (draw_ensemble, "ensemble"),
    "jacobian": (draw_jacobian, "jacobian"),
    "sparse": (draw_sparse, "sparse"),
    "compile": (draw_compile, "compile"),
}


def digest(name: str, here: Path = HERE) -> str:
    """Return the digest of a picture's data file, which the picture stores."""
    return hashlib.sha256((here / f"{PICTURES[name][1]}.json").read_bytes()).hexdigest()


def draw(name: str, here: Path = HERE) -> None:
    """Draw a picture and store the digest of its file in it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    function, file = PICTURES[name]
    with mpl.rc_context({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure = function(json.loads((here / f"{file}.json").read_text())["tables"], plt)
        figure.savefig(here / f"{name}.png", dpi=100, metadata={"Source": digest(name, here)})
        plt.close(figure)


def main(here: Path = HERE) -> None:
    for file, text in pages(here).items():
        (here / file).write_text(text)
    for name in PICTURES:
        draw(name, here)


if __name__ == "__main__":
    main()
