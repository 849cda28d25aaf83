"""What servers and files of others hold, before it is believed or shown."""

import json
from typing import Any

DEEPEST = 64  # levels of nesting: what goes through such a tree later may recurse


def decode(text: str | bytes, strict: bool = False) -> Any:
    """JSON. Raises ValueError, also for what is nested too deeply; `strict`: for NaN and Infinity, too."""
    try:
        tree = json.loads(text, parse_constant=refuse if strict else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = containers([tree])
    for _ in range(DEEPEST):
        level = [inner for node in level for inner in containers(node)]
        if not level:
            return tree
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def containers(node: Any) -> list[Any]:
    """Objects and lists that are directly in one."""
    inner = node.values() if isinstance(node, dict) else node
    return [one for one in inner if isinstance(one, dict | list)]


def printable(text: str) -> str:
    """In one line, and nothing that a terminal would obey: such characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
