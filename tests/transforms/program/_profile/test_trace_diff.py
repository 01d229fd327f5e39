"""Differences between two programs: exact counts, and durations above their noise."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.transforms._files.document import write_document
from plurax.transforms.program import Capture, TraceDiff, capture, trace_diff
from plurax.transforms.program._profile.capture import count_operations

CATEGORIES = ("added", "deleted", "increased", "decreased", "unchanged")


def layers(extra: int | None = None, leave_out: int | None = None) -> Callable[..., jax.Array]:
    """Return four layers; one may have an extra product or no `tanh`."""

    def network(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer{i}"):
                x = x @ w
                if i == extra:
                    x = x @ ws[0]
                if i != leave_out:
                    x = jnp.tanh(x)
        return x

    return network


WS = [jnp.eye(24) * 0.9] * 4
X = jnp.ones((16, 24))


def named(rows: tuple[Any, ...]) -> list[tuple[str, str, int]]:
    return [(row.op, row.scope, row.diff_counts) for row in rows]


def captured(
    counts: dict[tuple[str, str], int],
    seconds: dict[tuple[str, str], list[float]],
    program: str = "p",
    machine: str = "m",
) -> Capture:
    return Capture("f", counts, seconds, program, machine)


def by_duration(control: list[float], test: list[float], **other: Any) -> TraceDiff:
    """Compare two programs with one operation, given its seconds in some runs."""
    key = ("dot_general", "layer")
    return TraceDiff(
        captured({key: 1}, {key: control}, "p"), captured({key: 1}, {key: test}, **{"program": "q", **other})
    )


def test_an_injected_product_is_found_in_its_scope() -> None:
    found = trace_diff(layers(), layers(extra=2), WS, X, repeats=5)
    assert ("dot_general", "layer2", 1) in named(found.increased)
    assert named(found.added) == named(found.deleted) == []
    counts = {(row.op, row.scope): (row.control_counts, row.test_counts) for row in found.differences()}
    assert counts["dot_general", "layer2"] == (1, 2)
    assert all(row.counts_change_categories == "=" for row in found.differences() if row.scope != "layer2")


def test_swapped_programs_give_a_decrease() -> None:
    found = trace_diff(layers(extra=2), layers(), WS, X, repeats=3)
    assert ("dot_general", "layer2", -1) in named(found.decreased)


def test_what_one_of_them_alone_runs_is_added_or_deleted() -> None:
    found = trace_diff(layers(leave_out=1), layers(leave_out=3), WS, X, repeats=3)
    assert named(found.added) == [("tanh", "layer1", 1)]
    assert named(found.deleted) == [("tanh", "layer3", -1)]


@pytest.mark.slow
def test_identical_programs_give_nothing_twenty_times() -> None:
    for _ in range(20):
        found = trace_diff(layers(), layers(), WS[:2], X, repeats=2)
        assert found.same_program
        assert [len(getattr(found, name)) for name in CATEGORIES] == [0, 0, 0, 0, 4]


def test_identical_functions_with_other_scopes_and_lines_are_compared_by_scope() -> None:
    def scoped(name: str) -> Callable[..., jax.Array]:
        def call(x: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                return jnp.sinh(x) @ x

        return call

    found = trace_diff(scoped("old"), scoped("new"), jnp.ones((8, 8)), repeats=2)
    assert {row.scope for row in found.added} == {"new"}
    assert {row.scope for row in found.deleted} == {"old"}
    assert {row.category for row in found.differences("op")} == {"unchanged"}


def test_scans_count_as_often_as_they_turn() -> None:
    def turns(n: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=n)[0]

    found = trace_diff(turns(5), turns(7), X, repeats=2)
    assert ("sin", "", 2) in named(found.increased)


def test_unused_results_do_not_count() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        jnp.exp(x) @ x.T
        return jnp.sin(x)

    assert [row.op for row in trace_diff(jnp.sin, wasteful, X, repeats=2).differences()] == ["sin"]


def test_dead_outputs_of_calls_and_loops_do_not_count() -> None:
    both = jax.jit(lambda x: (jnp.sin(x), jnp.tanh(x @ x)))

    def carried(x: jax.Array) -> jax.Array:
        def turn(carry: Any, _: None) -> Any:
            used, unused, chained = carry
            return (jnp.sin(used) + chained, jnp.tanh(unused), chained * 2.0), jnp.exp(used)

        return jax.lax.scan(turn, (x, x, x), None, length=3)[0][0]

    counts = count_operations(jax.make_jaxpr(lambda x: both(x)[0])(jnp.eye(3)).jaxpr)
    assert counts == {("sin", ""): 1}
    assert count_operations(jax.make_jaxpr(carried)(X).jaxpr) == {("sin", ""): 3, ("add", ""): 3, ("mul", ""): 3}


def test_branches_count_once_and_loops_without_iterations_do_not() -> None:
    def branches(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0.0, jnp.sin, jnp.cos, x)

    counts = count_operations(jax.make_jaxpr(branches)(X).jaxpr)
    assert (counts["sin", ""], counts["cos", ""]) == (1, 1)

    def never(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=0)[0] + 1.0

    assert count_operations(jax.make_jaxpr(never)(X).jaxpr) == {("add", ""): 1}


def test_operations_of_each_device_count() -> None:
    mesh = jax.make_mesh((1,), ("d",))

    def sharded(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: jnp.tanh(jnp.tanh(x)), mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    assert count_operations(jax.make_jaxpr(sharded)(x).jaxpr) == {("tanh", ""): 2}


@pytest.mark.slow
def test_variable_names_and_lines_do_not_change_the_program() -> None:
    one, other = jax.jit(lambda a: jnp.fft.fft(a)), jax.jit(
        lambda another: jnp.fft.fft(another)
    )  # fmt: skip
    assert trace_diff(one, other, X, repeats=2).same_program
    assert trace_diff(
        jax.jit(lambda a: jnp.sin(a @ a.T)), jax.jit(lambda b: jnp.sin(b @ b.T)), X, repeats=2
    ).same_program
    assert not trace_diff(lambda a: jnp.sin(a + 1.0), lambda a: jnp.sin(a + 2.0), X, repeats=2).same_program


def test_a_longer_duration_is_called_above_the_noise_only() -> None:
    steady, wandering = [1.00, 1.02, 1.01, 1.03, 0.99], [0.5, 1.0, 1.5, 2.0, 2.5]
    assert by_duration(steady, [2.0 * x for x in steady]).increased
    assert by_duration([2.0 * x for x in steady], steady).decreased
    assert by_duration(steady, [1.3 * x for x in wandering]).unchanged
    assert by_duration(steady, steady[::-1]).unchanged
    # Changes below a tenth are ignored.
    assert by_duration([1.0] * 5, [1.09] * 5).unchanged
    assert by_duration([1.0] * 5, [1.12] * 5).increased


def test_the_same_program_has_no_change_on_the_same_machine() -> None:
    assert by_duration([1.0] * 5, [2.0] * 5, program="p").unchanged
    assert by_duration([1.0] * 5, [2.0] * 5).increased


@pytest.mark.slow
def test_a_machine_is_identified_by_its_processor_and_available_cores(tmp_path: Path, monkeypatch: Any) -> None:
    machines = set()
    for model, cores in (("one", {0, 1}), ("another", {0, 1}), ("another", {1})):
        monkeypatch.setattr(Path, "read_text", lambda _, model=model: f"flags : fma\nmodel name\t: {model}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        machines.add(capture(tmp_path / "capture.json", jnp.sin, X, repeats=2).machine)
    assert len(machines) == 3


def test_durations_of_other_machines_are_not_compared() -> None:
    assert by_duration([1.0] * 5, [2.0] * 5, machine="other").unchanged


def test_changes_below_one_percent_of_the_call_are_ignored() -> None:
    long, short = ("dot_general", "a"), ("add", "b")
    runs = [captured({long: 1, short: 1}, {long: [1.0] * 5, short: [x] * 5}, str(x)) for x in (0.001, 0.003, 0.1)]
    assert [row.category for row in TraceDiff(runs[0], runs[1]).differences()] == ["unchanged", "unchanged"]
    assert [row.op for row in TraceDiff(runs[0], runs[2]).increased] == ["add"]


def test_one_outlier_does_not_count_as_noise() -> None:
    runs = [1.0] * 10
    assert by_duration([*runs[1:], 50.0], [2.0 * x for x in runs]).increased


def test_captures_compare_as_functions(tmp_path: Path) -> None:
    control, test = tmp_path / "control.json", tmp_path / "test.json"
    written = capture(control, layers(), WS, X, repeats=3)
    capture(test, layers(extra=2), WS, X, repeats=3)
    found = trace_diff(control, str(test))
    assert found.control == written
    assert ("dot_general", "layer2", 1) in named(found.increased)
    again = trace_diff(control, control)
    assert named(again.unchanged) == [(op, scope, 0) for op, scope in sorted(written.counts)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control.json", "test.json"]


def test_a_failed_capture_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    capture(path, jnp.sin, X, repeats=2)
    before = path.read_text()
    with pytest.raises(TypeError, match="fun must be a function"):
        capture(path, 3, X)
    with pytest.raises(ValueError, match="capture: repeats must be at least 2, but got 1"):
        capture(path, jnp.cos, X, repeats=1)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(FileExistsError):
        capture(path / "capture.json", jnp.sin, X, repeats=2)


def test_the_columns_are_those_of_holistic_trace_analysis() -> None:
    found = json.loads(json.dumps(by_duration([1.0] * 5, [2.0] * 5).to_dict()))
    (row,) = found["operations"]
    assert row["name"] == "layer/dot_general"
    names = ["control_counts", "test_counts", "control_total_duration", "test_total_duration", "diff_counts"]
    names += ["diff_duration", "counts_change_categories"]
    assert [row[name] for name in names] == [1, 1, 1e6, 2e6, 0, 1e6, "="]


def test_operations_add_up_by_scope_and_by_operation() -> None:
    found = trace_diff(layers(), layers(extra=2), WS, X, repeats=2)
    by_op = {row.op: (row.control_counts, row.test_counts, row.scope) for row in found.differences("op")}
    assert by_op["dot_general"] == (4, 5, "")
    by_scope = {row.scope: row.category for row in found.differences(["scope"])}
    assert by_scope["layer2"] == "increased"


def test_tables_show_what_differs() -> None:
    found = by_duration([0.001] * 5, [0.002] * 5)
    lines = found.table().splitlines()
    assert lines[0] == "control f (1 ms), test f (2 ms): medians of 5 and 5 calls"
    assert lines[1] == "added: 0, deleted: 0, increased: 1, decreased: 0, unchanged: 0"
    assert " ".join(lines[-1].split()) == "increased dot_general layer 1 -> 1 1 ms -> 2 ms +1 ms 0 us"
    same = by_duration([0.001] * 5, [0.002] * 5, program="p")
    assert str(same).splitlines()[0].endswith("the compiled programs are the same")
    assert len(same.table().splitlines()) == 2
    assert "unchanged  dot_general" in same.table(unchanged=True)
    assert "durations are not compared, on m, and on n" in by_duration([1.0] * 5, [1.0] * 5, machine="n").heading()


def test_plots_have_two_bars_for_each_operation() -> None:
    found = by_duration([0.001] * 5, [0.002] * 5)
    ax = found.plot_durations()
    assert [patch.get_width() for patch in ax.patches] == pytest.approx([1.0, 2.0])
    assert [patch.get_width() for patch in found.plot_counts(ax=ax).patches[2:]] == [1, 1]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    path.write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"trace_diff: '.*capture.json' is not a capture \(it does not begin as",
    ):
        trace_diff(path, path)
    write_document(path, "plurax other", 1, {})
    with pytest.raises(ValueError, match="is not a capture .it is a plurax other, not a plurax capture."):
        trace_diff(path, path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="is not a capture"):
        trace_diff(path, path)
    with pytest.raises(FileNotFoundError):
        trace_diff(tmp_path / "none", path)
    row = {"op": "sin", "scope": "", "count": 1, "seconds": [1.0]}
    content = {"name": "f", "program": "p", "machine": "m"}
    for rows, said in (
        ([row | {"count": 2.7}], r"`capture.operations\[0\].count` is 2.7, but must be of type int"),
        ([row | {"count": -1}], ".*op='sin'.* needs a count and seconds that are finite"),
        ([row | {"seconds": "12"}], r"`capture.operations\[0\].seconds` is '12', but must be of type list"),
        ([row | {"seconds": [float("nan")]}], ".*op='sin'.* needs a count and seconds that are finite"),
        ([row | {"seconds": [-1.0]}], ".*op='sin'.* needs a count and seconds that are finite"),
        ([row, row], "an operation is repeated"),
        ([row | {"op": 3}], r"`capture.operations\[0\].op` is 3, but must be of type str"),
        ([row, row | {"op": "cos", "seconds": [1.0, 2.0]}], ".* or operations have different numbers of runs"),
    ):
        write_document(path, "plurax capture", 1, {**content, "operations": rows})
        with pytest.raises(ValueError, match=f"is not a capture .{said}"):
            trace_diff(path, path)
    write_document(path, "plurax capture", 1, {**content, "machine": None, "operations": [row]})
    with pytest.raises(ValueError, match="`capture.machine` is None, but must be of type str"):
        trace_diff(path, path)
    with pytest.raises(TypeError, match="trace_diff: control and test must both be functions, or both be paths"):
        trace_diff(path, jnp.sin, X)
    with pytest.raises(TypeError, match="trace_diff: captures take no arguments"):
        trace_diff(path, path, X)
    with pytest.raises(TypeError, match="trace_diff: test must be a function"):
        trace_diff(jnp.sin, 3, X)
    with pytest.raises(ValueError, match="trace_diff: repeats must be at least 2, but got 1"):
        trace_diff(jnp.sin, jnp.sin, X, repeats=1)
    found = by_duration([1.0], [1.0])
    with pytest.raises(ValueError, match="by must be one or more of op, scope, but got None"):
        found.table(by=None)
    with pytest.raises(
        ValueError, match="sort must be one of 'change', 'duration', 'count', 'op', 'scope', but got 'size'"
    ):
        found.table(sort="size")
    with pytest.raises(ValueError, match="by must be one or more of op, scope, but got 'line'"):
        found.table(by="line")
    for draw in (found.plot_counts, found.plot_durations):
        with pytest.raises(ValueError, match="TraceDiff: top must be at least 1"):
            draw(top=0)
        with pytest.raises(ValueError, match="by must be one or more of op, scope, but got 'line'"):
            draw(by="line")
