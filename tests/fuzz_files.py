"""Damage every file that the library reads, in every way, and look at what its readers do: `make fuzz-files`.

For each format: every bit of JSON and headers is flipped, and 2,000 random bits of the rest; files are cut, enlarged,
exchanged with those of another save, replaced by links, pipes, devices and directories; and every value of the JSON is
replaced by others, with the checksum of the changed file. A reader may refuse such a file, by an error of ours, or
return what was written. It fails if it returns something else, raises any other error, waits, opens a file elsewhere,
or takes more memory than twice the size of the files and 64 MiB.

Values that were changed together with their checksum may be believed, as long as nothing else happens.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.ensemble import (
    Committee,
    Ensemble,
    Execution,
    Trainer,
    export,
    fleet,
    from_orbax,
    load,
    load_exported,
    load_member,
    save,
    to_orbax,
)
from plurax.ensemble._execution import autotune
from plurax.ensemble._execution.autotune import CandidateExecution, Tuning
from plurax.ensemble._fleet.group import Report
from plurax.ensemble._training.schedule import Schedule
from plurax.transforms._files.errors import Damaged, OtherVersion
from plurax.transforms._files.lock import locked
from plurax.transforms._runs.checkpoint import OtherStructure
from plurax.transforms.curvature import laplace
from plurax.transforms.modules import load_params, save_params
from plurax.transforms.privacy import DPSGD
from plurax.transforms.program import aot, capture, trace_diff

if __package__:
    from ._files import rewrite, with_checksum
else:  # as a script it is in no package, so that the type checker finds neither module nor one definition
    from _files import rewrite, with_checksum  # type: ignore[import-not-found,no-redef]

SECONDS = 10.0  # a reader that takes longer hangs
ROOM = 64 * 2**20
HUGE = 2**36  # bytes of a file that takes no room on the disk
ENDLESS = [Path("/dev/zero")]
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
Y = np.ones((3, 1), np.float32)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
      name: its name.
      write: writes one into a directory, with numbers that depend on a seed.
      read: returns all that is read from the directory.
      passed: the name of what the user passes the path of, which may be a link; empty for the directory.
      share: which part of the cases to run, since some readers are slow.
      only_reads: whether the reader leaves the files as they are.
    """

    name: str
    write: Callable[[Path, int], object]
    read: Callable[[Path], Any]
    passed: str = ""
    share: float = 1.0
    only_reads: bool = True


@dataclass
class Outcomes:
    """The outcomes of one format."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fails(self, outcome: str, text: str) -> None:
        """Note a failure."""
        self.counts[outcome] += 1
        self.failures.append(text)


def model(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(2, 1, rngs=rngs)


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def apply(params: Any, x: Any) -> Any:
    return x @ params["w"]


def mean_squares(output: Any, y: Any) -> Any:
    return jnp.mean((output - y) ** 2)


@cache
def ensemble(seed: int) -> Any:
    return Ensemble.create(model, 2, seed=seed)


@cache
def trainer() -> Any:
    return Trainer(loss, optax.adam(0.1), strategy="vmap")


@cache
def state(seed: int) -> Any:
    return trainer().fit(trainer().init(ensemble(seed)), [(X, Y)] * 2, progress=False)[0]


@cache
def private(seed: int) -> Any:
    dp = DPSGD(
        loss, optax.sgd(0.1), num_examples=3, target_delta=0.1, l2_clip_norm=1.0, expected_batch_size=1.0,
        noise_multiplier=1.0, num_steps=4,
    )  # fmt: skip
    return dp, dp.init(model(nnx.Rngs(seed)), key=jax.random.key(seed))


@cache
def committee(seed: int) -> Any:
    return Committee([ensemble(seed), ensemble(seed + 5), model(nnx.Rngs(seed + 1))], [1.0, 2.0, 1.0, 3.0, 1.0])


def double(x: Any) -> Any:
    return 2 * x


def params(seed: int) -> Any:
    return {"w": jax.random.normal(jax.random.key(seed), (2, 1))}


@cache
def posterior(seed: int) -> Any:
    return laplace(apply, mean_squares, params(seed), (X, Y), prior_precision=1.0)


def read_posterior(path: Path) -> Any:
    of = type(posterior(0)).load(f"{path}/posterior.safetensors", apply, params(0))
    return jax.tree.leaves((of.params, of.curvature, of.prior_precision, of.mean_loss)), of.size


def tuning(seed: int) -> Any:
    chosen = Execution("vmap", seed + 1)
    return Tuning(chosen, (CandidateExecution(chosen, 1.5), CandidateExecution(Execution("map"))), "here", 2.0)


def read_tuning(path: Path) -> Any:
    autotune._remembered.clear()
    return repr(autotune.recall("key", path))


def write_schedule(path: Path, seed: int) -> None:
    Schedule(path, None).change(0, [(0, Execution("vmap", seed + 1)), (3, Execution("map"))], tuning(seed))


def read_schedule(path: Path) -> Any:
    found = Schedule(path, Execution("loop"))
    return repr([found.known, [found.at(i) for i in range(5)]])


def write_report(path: Path, seed: int) -> None:
    from dataclasses import asdict

    from plurax.ensemble._fleet import group

    report = Report(seed, 1.5, (0.5, float("nan")), 2, "here:1")
    group.write_document(path / "report.json", group._FORMAT, 1, asdict(report))


def fit(path: Path, seed: int = 0) -> Any:
    """Go on from the newest checkpoint that is whole: the result is always that of a run without interruption."""
    after, history = trainer().fit(
        trainer().init(ensemble(seed)), [(X, Y)] * 4, progress=False, checkpoint_dir=path / "run", checkpoint_every=1,
        checkpoint_keep=2, resume="auto" if seed == 0 else False,
    )  # fmt: skip
    return after, history


def write_run(path: Path, seed: int) -> None:
    trainer().fit(
        trainer().init(ensemble(seed)), [(X, Y)] * 2, progress=False, checkpoint_dir=path / "run", checkpoint_every=1
    )


def read_lock(path: Path) -> Any:
    with locked("load", path):
        return "held"


def write_lock(path: Path, seed: int) -> None:
    (path / "run.lock").write_text(json.dumps({"host": f"host{seed}", "process": 123}))


def claim(path: Path, seed: int = 0) -> Any:
    return fleet._claim(path, {"size": 4 + seed, "group_size": 2, "exchange_every": None})


def write_program(path: Path, seed: int) -> None:
    aot(double, path, key="1", verify=False)(X[: 1 + seed])


FORMATS = [
    Format(
        "ensemble",
        lambda path, seed: save(path / "a", ensemble(seed)),
        lambda path: load(path / "a", ensemble(0)),
        passed="a",
    ),
    Format(
        "member",
        lambda path, seed: save(path / "a", state(seed)),
        lambda path: load_member(path / "a", 1, state(0)),
        passed="a",
    ),
    Format(
        "state", lambda path, seed: save(path / "a", state(seed)), lambda path: load(path / "a", state(0)), passed="a"
    ),
    Format(
        "private state",
        lambda path, seed: private(seed)[0].save(path / "a", private(seed)[1]),
        lambda path: private(0)[0].load(path / "a", private(0)[1]),
        passed="a",
    ),
    Format(
        "committee",
        lambda path, seed: committee(seed).save(path / "a"),
        lambda path: [(x := Committee.load(path / "a", committee(0))).groups, x.weights],
        passed="a",
    ),
    Format(
        "export",
        lambda path, seed: export(
            ensemble(seed), path / "model.plurax", X[:1], platforms=("cpu",), kind="regression", outputs=("mean",)
        ),
        lambda path: [(x := load_exported(path / "model.plurax"))(X), repr(x.description), repr(x)],
        passed="model.plurax",
    ),
    Format(
        "capture",
        lambda path, seed: capture(path / "capture.json", [jnp.sin, jnp.cos, jnp.tan][seed], X, repeats=2),
        lambda path: repr(trace_diff(path / "capture.json", path / "capture.json").to_dict()),
        passed="capture.json",
    ),
    Format(
        "parameters",
        lambda path, seed: save_params(path / "a.safetensors", model(nnx.Rngs(seed))),
        lambda path: nnx.state(load_params(path / "a.safetensors", model(nnx.Rngs(9)))),
        passed="a.safetensors",
    ),
    Format(
        "posterior",
        lambda path, seed: posterior(seed).save(f"{path}/posterior.safetensors"),
        read_posterior,
        passed="posterior.safetensors",
    ),
    Format(
        "program",
        write_program,
        lambda path: aot(double, path, key="1", verify=False)(X[:1]),
        share=0.2,
        only_reads=False,
    ),
    Format("tune_cache", lambda path, seed: autotune.remember("key", tuning(seed), path), read_tuning),
    Format("executions", write_schedule, read_schedule),
    Format("report", write_report, lambda path: repr(Report.read(path))),
    Format("lock", write_lock, read_lock, only_reads=False),
    Format("fleet", claim, claim),
    Format("run", write_run, fit, share=0.1, only_reads=False, passed="run"),
    Format(
        "Orbax",
        lambda path, seed: to_orbax(path / "a", ensemble(seed)),
        lambda path: from_orbax(path / "a", ensemble(0)),
        share=0.02,
        passed="a",
    ),
]
# What these return for a file that they do not believe.
IGNORED = {"tune_cache": "None", "report": "None", "lock": "held"}


def said(result: Any) -> str:
    """Return a digest of what a reader returns."""
    sha = hashlib.sha256()
    leaves, structure = jax.tree.flatten(result)
    sha.update(str(structure).encode())
    for x in leaves:
        x = jax.random.key_data(x) if jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key) else x
        sha.update(f"{getattr(x, 'dtype', type(x))} {np.shape(x)}".encode())
        sha.update(np.asarray(x).tobytes() if hasattr(x, "dtype") else repr(x).encode())
    return sha.hexdigest()


# The beginnings of our errors.
OF_US = (
    r"(load|load_member|load_params|load_exported|\w+\.load|Committee|Trainer.fit|trace_diff|from_orbax|fit_fleet): "
)


class Hang(BaseException):
    """Raised in a reader that takes too long."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_opened: list[str] = []
_watching = [False]


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watching[0] and event in ("open", "os.remove", "os.rename", "os.truncate") and isinstance(args[0], (str, Path)):
        _opened.append(os.fspath(args[0]))


sys.addaudithook(_watch)


def peak() -> int:
    """Return the largest memory of this process since `forget_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> int:
    """Begin to look for the largest memory anew, and return the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def is_ours(error: BaseException) -> bool:
    """Return whether an error is one that a user may meet: of ours, with a text, and of a kind that is documented."""
    if isinstance(error, (json.JSONDecodeError, UnicodeError)):
        return False
    if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and re.search(OF_US, f"{error}")):
        return True
    ours = isinstance(error, (Damaged, OtherVersion, OtherStructure)) or type(error) is ValueError
    return ours and any(
        word in f"{error}" for word in ("load", "Committee", "Trainer.fit", "trace_diff", "from_orbax", "fit_fleet")
    )


def spots(path: Path) -> int:
    """Return the number of bytes of the JSON or the header at the beginning of a file; 0 if there is none."""
    data = path.read_bytes()
    if data.startswith(b"{"):
        return data.find(b"\n") + 1 or len(data)
    if path.suffix == ".safetensors":
        return 8 + int.from_bytes(data[:8], "little")
    return 0


VALUES: list[Any] = [
    None, True, -1, -5, 0, 1, 7, 2**40, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../../elsewhere",
    "/etc/passwd", "float64", "O", "V4", "key<x>", [], {}, [[]], [-1], ["a"], {"a": 1}, "\ud800",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON."""
    if at:
        yield at
    for key, x in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(x, (*at, key))


def set_at(value: Any, at: tuple[Any, ...], new: Any) -> None:
    for key in at[:-1]:
        value = value[key]
    value[at[-1]] = new


def delete_at(value: Any, at: tuple[Any, ...]) -> None:
    for key in at[:-1]:
        value = value[key]
    del value[at[-1]]


def put(path: Path, at: tuple[Any, ...], text: str) -> None:
    """Put a text at a place of the JSON of a file that `json` would not write."""
    rewrite(path, partial(set_at, at=at, new="@here@"))
    path.write_bytes(with_checksum(path.read_bytes().replace(b'"@here@"', text.encode(), 1)))


TEXTS = [
    "1e999",
    "9" * 5000,
    "-Infinity",
    '"\\ud800"',
    '{"a": 1, "a": 2}',
    "[" + "{}," * 10**5 + "{}]",
    "'",
    '"' + '\\"' * 10**6,  # a string without an end
    '"' + '\\"' * 10**6 + '"',
    "[" + '"",' * 10**6 + '""]',
    '"🐁' + "x" * 10**6 + '"',
]
Case = tuple[str, Callable[[Path], object], bool]  # its name, what to do to a file, and whether its numbers may change


def raw(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def socket_at(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def cases(fmt: Format, file: Path, home: Path, other: Path, draw: random.Random, every: int) -> Iterator[Case]:
    """Yield what to do to a file of a format.

    Args:
      fmt: the format.
      file: the file.
      home: the directory of the files.
      other: the same file of another save.
      draw: the source of random numbers.
      every: of how many cases of the large groups to take one.
    """
    data, head = file.read_bytes(), spots(file)
    step = max(1, round(every / fmt.share))
    bits = [*range(draw.randrange(step), 8 * head, step)]
    rest = 8 * (len(data) - head)
    bits = [*bits, *(8 * head + draw.randrange(rest) for _ in range(2000 // step if rest else 0))]
    for bit in bits:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield "bit", partial(raw, data=bytes(flipped)), False
    for _ in range(max(20, 400 // step)):
        yield "cut", partial(raw, data=data[: draw.randrange(len(data))] if data else b"x"), False
    for tail in (b"\0", b"\n", b"{}", data, b"\0" * 10**6):
        yield "longer", partial(raw, data=data + tail), False
        yield "longer", partial(raw, data=tail + data), False
    yield "huge", partial(os.truncate, length=HUGE), False
    yield "zeros", partial(raw, data=bytes(len(data))), False
    for mate in [x for x in sorted(home.rglob("*")) if x.is_file() and x != file]:
        yield "exchanged", partial(raw, data=mate.read_bytes()), False
    if other.exists():
        yield (
            "of another save",
            partial(raw, data=other.read_bytes()),
            file.name == fmt.passed or len(list(home.rglob("*.*"))) == 1,
        )
    elsewhere = home.parent / "elsewhere"
    for target in (elsewhere / "same", elsewhere / "nothing", file, *ENDLESS, elsewhere / "pipe", elsewhere):
        yield f"link to {target.name}", partial(replaced, make=partial(link, target=target)), False
    yield "pipe", lambda path: replaced(path, os.mkfifo), False
    yield "socket", lambda path: replaced(path, socket_at), False
    yield "directory", lambda path: replaced(path, Path.mkdir), False
    if ENDLESS and os.geteuid() == 0:
        yield "device", lambda path: replaced(path, lambda path: os.mknod(path, stat.S_IFCHR | 0o600, 0x105)), False
    yield "gone", Path.unlink, False
    if not data.startswith(b'{"checksum"'):
        return
    entries = json.loads(data[:head])
    at = [place for place in places(entries) if place[0] not in ("checksum", "bytes", "plurax")]
    written = max(1, step // 4)
    for i, place in enumerate(at):
        for j, value in enumerate(VALUES):
            if (i * len(VALUES) + j) % written == 0:
                yield "value", partial(rewrite, change=partial(set_at, at=place, new=value)), True
        if i % max(1, step // 40) == 0:
            yield "value gone", partial(rewrite, change=partial(delete_at, at=place)), True
        if i % written == 0:
            depth = draw.choice([3, 90, 5000])
            yield "nested", partial(put, at=place, text="[" * depth + "]" * depth), True
            yield "text", partial(put, at=place, text=draw.choice(TEXTS)), True
    yield "unknown", partial(rewrite, change=lambda entries: entries.update(more=1)), True
    if head < len(data):
        yield "content", partial(rewrite, content=data[head:-9]), True
        yield "content", partial(rewrite, content=data[head:] + b"123456789"), True


def of_directory(entry: Path, mate: Path, elsewhere: Path) -> Iterator[Case]:
    """Yield what to do to a directory; `mate` is that of another save."""
    yield "gone", shutil.rmtree, False
    yield "file", partial(replaced, make=partial(raw, data=b"x")), False
    yield "pipe", partial(replaced, make=os.mkfifo), False
    yield "empty", partial(replaced, make=Path.mkdir), False
    for target in (elsewhere / "same", elsewhere / "nothing", entry, entry.parent):
        yield f"link to {target.name}", partial(relinked, target=target), False
    others = [x for x in sorted(entry.parent.iterdir()) if x.is_dir() and x != entry]
    for other in [*others, *([mate] if mate.is_dir() else [])]:
        yield f"exchanged with {other.name}", partial(exchanged, other=other), entry.parent.name == "template"


def relinked(path: Path, target: Path) -> None:
    shutil.rmtree(path)
    # What is in the template is meant to be the same place beside the changed directory.
    path.symlink_to(Path(str(target).replace("/template", "/home")))


def exchanged(path: Path, other: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(other, path)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(x): x.read_bytes() for x in directory.rglob("*") if x.is_file()}


def attack(fmt: Format, seed: int, every: int, until: float) -> Outcomes:
    """Run the cases of a format; return what happened."""
    report, draw = Outcomes(), random.Random(f"{seed} {fmt.name}")
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Of two saves, since a swap of equal bytes would show nothing.
        template, second, home = Path(root, "template"), Path(root, "second"), Path(root, "home")
        elsewhere = Path(root, "elsewhere")
        for path, which in ((template, 0), (second, 1)):
            path.mkdir()
            fmt.write(path, which)
        # A directory by itself is exchanged or linked; what lies on its way is not.
        names = [x.relative_to(template) for x in sorted(template.rglob("*"))]
        shutil.copytree(template, home)
        whole = said(fmt.read(home))
        for name in names:
            entry, mate, last = template / name, second / name, ""
            size = entry.stat().st_size if entry.is_file() else 0
            if entry.is_file():
                todo = cases(fmt, entry, template, mate, draw, every)
            else:
                todo = of_directory(entry, mate, elsewhere)
            for kind, change, may_differ in todo:
                if time.monotonic() > until:
                    report.counts["left out"] += 1
                    continue
                if not (fmt.only_reads and kind == last == "bit") or report.counts["refused"] % 100 == 0:
                    _reset(template, home, elsewhere, entry)
                    before = contents(elsewhere)
                last = kind
                change(home / name)
                damaged = (home / name).read_bytes() if kind == "bit" else b""
                _outcome(fmt, str(name), kind, home, whole, may_differ, size, report)
                newest = fmt.name == "run" and kind == "bit" and "step_00000002" in name.parts
                if newest and not any(x.read_bytes() == damaged for x in home.rglob(name.name)):
                    report.fails("LOST", f"{fmt.name}: {kind} of {name}: is not there any more")
                # Where the path that the user passes is a link, its target is the directory.
                if contents(elsewhere) != before and str(name) != fmt.passed:
                    report.fails("FILES ELSEWHERE", f"{fmt.name}: {kind} of {name}: wrote elsewhere")
        _without_handles(fmt, template, home, whole, report)
        _with_notes(fmt, template, home, report)
    return report


def _without_handles(fmt: Format, template: Path, home: Path, whole: str, report: Outcomes) -> None:
    """Read with few handles left: a reader raises what the system does, or returns what was written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(12) if fmt.name not in ("Orbax", "report") else ():
        shutil.rmtree(home)
        shutil.copytree(template, home)
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]  # those that are free between others
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
        for descriptor in taken[len(taken) - spare :]:
            os.close(descriptor)
        outcome = "MISJUDGED"
        try:
            detail: object = fmt.read(home)
            outcome = "same" if said(detail) == whole else outcome
        except OSError as error:
            outcome = "refused" if error.errno in (errno.EMFILE, errno.ENFILE) else outcome
            detail = error
        except Exception as error:  # whatever it is, it is not what the system raises
            detail = error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken[: len(taken) - spare]:
                os.close(descriptor)
        report.counts[outcome] += 1
        if outcome.isupper():
            report.failures.append(f"{fmt.name}: {spare} handles: {outcome}: {type(detail).__name__} {detail}"[:300])


def _with_notes(fmt: Format, template: Path, home: Path, report: Outcomes) -> None:
    """Write over files among which there is one of the user."""
    for folder in [x.relative_to(template) for x in sorted(template.rglob("*")) if x.is_dir()]:
        shutil.rmtree(home)
        shutil.copytree(template, home)
        (home / folder / "notes.txt").write_text("mine")
        with suppress(Exception):
            fmt.write(home, 1)
        if not (home / folder / "notes.txt").exists():
            report.fails("LOST", f"{fmt.name}: notes of the user in {folder}")


def _reset(template: Path, home: Path, elsewhere: Path, entry: Path) -> None:
    """Begin a case with whole files, and with files elsewhere that no reader should open, nor change."""
    for path in (home, elsewhere):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, home)
    elsewhere.mkdir()
    os.mkfifo(elsewhere / "pipe")
    copy: Callable[..., object] = shutil.copyfile if entry.is_file() else shutil.copytree
    copy(entry, elsewhere / "same")


def _outcome(
    fmt: Format, name: str, kind: str, home: Path, whole: str, may_differ: bool, size: int, report: Outcomes
) -> None:
    case, low = f"{kind} of {name}", forget_peak()
    _opened.clear()
    _watching[0] = True
    try:
        with within(SECONDS):
            result = fmt.read(home)
    except Hang:
        outcome, detail = "HANGS", ""
    except BaseException as error:
        ours = is_ours(error)
        outcome, detail = "refused" if ours else "RAW ERRORS", f"{type(error).__name__}: {error}"[:300]
    else:
        digest, detail = said(result), f"{result}"[:200]
        ignored = isinstance(result, str) and result == IGNORED.get(fmt.name)
        ignored |= fmt.name == "executions" and "loop" in detail
        outcome = "same" if digest == whole else "ignored" if ignored else "believed" if may_differ else "SILENT"
    finally:
        _watching[0] = False
    # A run begins anew, and a program is compiled anew, so that both return the same without what they refuse.
    if (
        case.startswith("link to same")
        and outcome == "same"
        and not (name == fmt.passed or fmt.name in ("run", "program"))
    ):
        outcome = "FILES ELSEWHERE"
    allowed = 2 * size + ROOM
    if (more := peak() - low) > allowed:
        report.fails("MEMORY", f"{fmt.name}: {case}: {more / 2**20:.0f} MiB")
    if any("elsewhere" in path for path in _opened) and name != fmt.passed:
        opened = [x for x in _opened if "elsewhere" in x][:2]
        report.fails("FILES ELSEWHERE", f"{fmt.name}: {case}: opened {opened}")
    report.counts[outcome] += 1
    if outcome.isupper():
        report.failures.append(f"{fmt.name}: {case}: {outcome}: {detail}")


BAD = ("SILENT", "RAW ERRORS", "HANGS", "FILES ELSEWHERE", "MEMORY", "LOST", "MISJUDGED")
FINE = ("same", "refused", "ignored", "believed", "left out")


def main(arguments: list[str] | None = None) -> int:
    """Print a table of what happened; return how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="end after about so long")
    parser.add_argument("--every", type=int, default=1, help="take one of so many bits and values")
    parser.add_argument("--show", type=int, default=20, help="how many failures to show")
    parser.add_argument("formats", nargs="*", help="some of the formats")
    chosen = parser.parse_args(arguments)
    print("format".ljust(14), *(name.rjust(12) for name in (*BAD, *FINE)))
    failures: list[str] = []
    logging.disable(logging.CRITICAL)
    os.environ["TQDM_DISABLE"] = "1"
    formats = [fmt for fmt in FORMATS if not chosen.formats or fmt.name in chosen.formats]
    end = time.monotonic() + chosen.seconds
    for i, fmt in enumerate(formats):
        until = time.monotonic() + (end - time.monotonic()) / (len(formats) - i)
        report = attack(fmt, chosen.seed, chosen.every, until)
        print(fmt.name.ljust(14), *(f"{report.counts[name]:12,}" for name in (*BAD, *FINE)), flush=True)
        failures += report.failures
    print(*failures[: chosen.show], sep="\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(1, main()))
