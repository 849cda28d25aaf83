"""What is always wrong, in every file: `global`, hidden settings, swallowed errors, endless files."""

import ast
import subprocess

import pytest

from tests.contracts.source import ROOT, Source, sources

MAX_LINES = 500

# Settings come from flags. These files may touch the environment, for the reason given.
ENVIRONMENT = {
    "server/config.py": "API keys; the environment of child processes",
    "server/default_model.py": "XDG_CACHE_HOME; TMPDIR of pip",
    # sets what libraries only read from the environment, before importing them
    "tokenizer_proc/loading.py": "TRANSFORMERS_VERBOSITY, TOKENIZERS_PARALLELISM",
    "engine/ops/kernel_cache.py": "XDG_CACHE_HOME",
}

ALL = sources("engine", "server", "tokenizer_proc", "scripts")
by_path = pytest.mark.parametrize("source", ALL, ids=lambda source: source.path)


@by_path
def test_no_global_statement(source: Source) -> None:
    lines = [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Global)]
    assert lines == [], "pass state explicitly"


@by_path
def test_no_bare_except(source: Source) -> None:
    lines = [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert lines == [], "name the exceptions: a bare except also swallows Ctrl-C"


def environment_uses(tree: ast.AST) -> list[int]:
    """Lines that read or write the environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for alias in node.names if alias.name in names]
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.path)
def test_environment_only_where_listed(source: Source) -> None:
    uses = environment_uses(source.tree)
    if source.path in ENVIRONMENT:
        assert uses, "it no longer touches the environment: take it off the list"
    else:
        assert uses == [], "settings come from flags"


def test_environment_checker_sees_uses() -> None:
    text = "import os\nos.environ['A']\nos.getenv('B')\nfrom os import environ\nx.path"
    assert environment_uses(ast.parse(text)) == [4, 2, 3]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.path)
def test_files_stay_readable(source: Source) -> None:
    lines = source.text.count("\n")
    assert lines <= MAX_LINES, f"{lines} lines: split it by idea"


def test_cuda_holds_cuda_sources_only() -> None:
    """A Python file there would turn `cuda` into a package that hides NVIDIA's own."""
    folder = ROOT / "cuda"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    wrong = [str(p.relative_to(ROOT)) for p in files if p.suffix not in {".cu", ".cuh"}]
    assert wrong == []


def test_no_weights_or_build_products_are_committed() -> None:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    large = [
        f"{p.name} {p.stat().st_size}" for p in files if p.is_file() and p.stat().st_size > 10**6
    ]
    assert large == []
