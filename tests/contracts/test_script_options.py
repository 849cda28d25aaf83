"""Every option of a script says what it does: by its help text, read from the syntax trees."""

import ast
import re

import pytest

from tests.contracts.source import Source, sources

LEAST_LETTERS = 10
PARSED = [source for source in sources("scripts") if "add_argument" in source.text]


def options_of(tree: ast.AST) -> list[ast.Call]:
    """Calls of `add_argument`, by that name or by one that it was given in the file (`add = ...`)."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_add_argument(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            is_add_argument(node.func)
            or (isinstance(node.func, ast.Name) and node.func.id in names)
        )
    ]


def is_add_argument(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "add_argument"


def complaints(tree: ast.AST) -> list[str]:
    """Options without a help text that says something, by their names and lines."""
    found = []
    for call in options_of(tree):
        texts = [keyword.value for keyword in call.keywords if keyword.arg == "help"]
        if not texts:
            found.append(f"{ast.unparse(call.args[0])} in line {call.lineno}: no help")
        elif not is_text(texts[0]):
            found.append(f"{ast.unparse(call.args[0])} in line {call.lineno}: says too little")
    return found


def is_text(value: ast.expr) -> bool:
    """A phrase, as far as it can be read here: one made elsewhere is taken for one."""
    if isinstance(value, ast.Constant):
        return (
            isinstance(value.value, str)
            and len(value.value) >= LEAST_LETTERS
            and value.value[0] != " "
            and not value.value.endswith(".")
            and not re.search(r"%(?![%(])", value.value.replace("%%", ""))  # --help would raise
        )
    return not (isinstance(value, ast.Attribute) and value.attr == "SUPPRESS")


@pytest.mark.parametrize("source", PARSED, ids=lambda source: source.path)
def test_every_option_has_a_help_text(source: Source) -> None:
    assert options_of(source.tree), "options are added in a way that this test does not see"
    assert complaints(source.tree) == []


def test_checker_sees_what_is_missing() -> None:
    text = """
parser.add_argument("--a")
add = group.add_argument
add("--b", help="short")
add("--c", help=argparse.SUPPRESS)
add("--d", help="ends with a full stop.")
add("--h", help="which 5% of them to take")
add("--e", help="what it does and costs")
add("--i", help="5%% of them (default: %(default)s)")
add("--f", help=f"one of {NAMES}")
other("--g")
"""
    told = complaints(ast.parse(text))
    assert sorted(line[:4] for line in told) == ["'--a", "'--b", "'--c", "'--d", "'--h"]
