"""The README opens with two commands that work, and points only at files that exist."""

import re
from pathlib import Path

import pytest

from tests.contracts.source import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_blocks(text: str) -> list[str]:
    return [block.strip() for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)]


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    serve, test = code_blocks(text)[:2]
    assert serve.endswith("scripts/serve.py")
    assert "-r requirements.txt" in serve
    assert test.endswith("-m pytest")
    for command in (serve, test):
        assert "\n" not in command, "one line each, so that it can be pasted"
        assert command.startswith("python3 -m venv .venv && ")
    assert text.index(test) < 1200, "the commands come first"


def test_ci_runs_exactly_the_readme_s_test_command() -> None:
    test = code_blocks((ROOT / "README.md").read_text(encoding="utf-8"))[1]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == test
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run must be executable"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_direct_requirements_are_pinned(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "-r "))]
    assert wanted
    assert [
        line for line in wanted if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_point_at_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [
        link for link in links if link and "://" not in link and not (page.parent / link).exists()
    ]
    named = re.findall(
        r"`((?:engine|server|tokenizer_proc|scripts|tests|docs|deploy|cuda)/[^`\s]*)`", text
    )
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []
