"""The position of an operation in a model: the scopes in its name."""

from __future__ import annotations

import re

# The structure of a program adds names of its own to the scopes: calls, the bodies of loops, branches.
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit pjit remat rematted_computation
    shard_map
    """.split()  # noqa: SIM905 (words read better)
)
_BRANCH = re.compile(r"branch_\d+_fun")


def scope_of(op_name: str) -> tuple[str, str]:
    """Split a name such as `jit(f)/layer/while/body/mix/dot_general` into `dot_general` and `layer/mix`.

    The operation is empty where the name is that of a call alone.
    """
    *scopes, operation = _parts(op_name)
    return "" if operation.partition("(")[0] in _CALLS else operation, _without_structure(scopes)


def _parts(name: str) -> list[str]:
    """Split a name at the slashes that are not in parentheses, since `transpose(jvp(a/b))` is one part."""
    # By hand, since regular expressions do not count parentheses.
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_structure(parts: list[str]) -> str:
    """Join the parts that are scopes, without calls, loops and branches."""
    kept = []
    for i, part in enumerate(parts):
        before, after = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        # `while` and `body` are dropped only next to each other, since a user may name a scope `body`.
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
