"""The project's own source files as syntax trees, for tests that hold for every file."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "server", "tokenizer_proc")


@dataclass(frozen=True)
class Import:
    module: str  # "a.b" for `import a.b`, `from a.b import c` gives "a.b" and "a.b.c"
    line: int
    typing_only: bool  # below `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Source:
    path: str  # from the repository's root
    module: str
    text: str
    tree: ast.Module

    @property
    def imports(self) -> list[Import]:
        found: list[Import] = []
        collect_imports(self.tree, self.package, False, found)
        return found

    @property
    def package(self) -> str:
        if self.path.endswith("/__init__.py"):
            return self.module
        return self.module.rpartition(".")[0]


def collect_imports(node: ast.AST, package: str, typing_only: bool, found: list[Import]) -> None:
    if isinstance(node, ast.Import):
        found += [Import(alias.name, node.lineno, typing_only) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:  # relative: resolve against the package
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1]
            module = ".".join([*base, module] if module else base)
        found.append(Import(module, node.lineno, typing_only))
        found += [Import(f"{module}.{a.name}", node.lineno, typing_only) for a in node.names]
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(node, ast.If) and mentions_type_checking(node.test)
        inside = typing_only or (guarded and child in getattr(node, "body", []))
        collect_imports(child, package, inside, found)


def mentions_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below `folders` (default: the three packages), in a stable order."""
    found = []
    for folder in folders or PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            text = path.read_text(encoding="utf-8")
            parts = relative.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source(str(relative), module, text, ast.parse(text, str(relative))))
    return tuple(found)


def is_below(module: str, prefix: str) -> bool:
    """Is `module` the package or module `prefix`, or in it?"""
    return module == prefix or module.startswith(prefix + ".")
