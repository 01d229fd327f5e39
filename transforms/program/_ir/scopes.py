"""Where in a model an operation is: the scopes that its name tells of."""

from __future__ import annotations

import re

# What the structure of a program adds to the names of scopes: calls, the bodies of loops, branches.
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit pjit remat rematted_computation
    shard_map
    """.split()  # noqa: SIM905 (words read better)
)
_BRANCH = re.compile(r"branch_\d+_fun")


def scope_of(op_name: str) -> tuple[str, str]:
    """The operation of JAX and its scopes, from a name such as `jit(f)/layer/while/body/mix/dot_general`.

    The operation is empty where the name is that of a call alone.
    """
    *scopes, operation = _parts(op_name)
    return "" if operation.partition("(")[0] in _CALLS else operation, _without_structure(scopes)


def _parts(name: str) -> list[str]:
    """A name at those of its strokes that are not in brackets."""
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_structure(parts: list[str]) -> str:
    kept = []
    for i, part in enumerate(parts):
        before, after = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        opens = (part == "while" and after in {"body", "cond"}) or (part == "cond" and _BRANCH.fullmatch(after))
        inside = (part in {"body", "cond"} and before == "while") or (_BRANCH.fullmatch(part) and before == "cond")
        outer, bracket, inner = part.removesuffix(")").partition("(")
        if opens or inside or outer in _CALLS:
            continue
        if bracket and part.endswith(")"):
            # A transform of scopes, such as `transpose(jvp(layer))`.
            inner = _without_structure(_parts(inner))
            part = f"{outer}({inner})" if inner else ""
        kept.append(part)
    return "/".join(filter(None, kept))
