"""Every flag says what it does and what it costs, on the screen and in docs/flags.md."""

import dataclasses
import re
from typing import Any

import pytest

from engine.api.config import EngineConfig, arg_of
from scripts import make_flags_doc
from server.cli import build_parser
from server.config import ServerConfig

FLAGS = [(c, f) for c in (ServerConfig, EngineConfig) for f in dataclasses.fields(c)]
every_flag = pytest.mark.parametrize(
    ("config", "flag"), FLAGS, ids=[f"{c.__name__}.{f.name}" for c, f in FLAGS]
)


@every_flag
def test_flag_has_help_and_group(config: type[Any], flag: "dataclasses.Field[Any]") -> None:
    arg = arg_of(flag)
    assert len(arg.help) >= 10
    assert arg.group
    assert arg.help[0] != " "
    assert not arg.help.endswith("."), "help texts are phrases: no full stop at the end"
    if arg.choices:
        assert flag.default in arg.choices


@every_flag
def test_flag_is_documented(config: type[Any], flag: "dataclasses.Field[Any]") -> None:
    text = make_flags_doc.TARGET.read_text(encoding="utf-8")
    assert f"`--{flag.name.replace('_', '-')}`" in text


def test_flags_page_is_up_to_date() -> None:
    text = make_flags_doc.TARGET.read_text(encoding="utf-8")
    assert text == make_flags_doc.render(), "run: python scripts/make_flags_doc.py"


def test_page_and_command_line_know_the_same_flags() -> None:
    text = make_flags_doc.TARGET.read_text(encoding="utf-8")
    documented = {name for name in re.findall(r"`(--[a-z-]+)", text) if name != "--flag"}
    accepted = {name for name in build_parser()._option_string_actions if name.startswith("--")}
    assert documented - {"--no-flag"} == accepted


def test_no_flag_exists_twice() -> None:
    """Server and engine share one command line."""
    spellings = [f.name for _, f in FLAGS]
    spellings += [
        alias.removeprefix("--").replace("-", "_") for _, f in FLAGS for alias in arg_of(f).aliases
    ]
    assert len(spellings) == len(set(spellings))
    assert len(FLAGS) <= 80, "each flag is a thing to know: find a default instead"
