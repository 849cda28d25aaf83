"""The command line: argv -> ServerConfig + EngineConfig, both derived from their dataclasses.

Everything that can be refused without loading anything is refused here, within a second, as one
line on stderr and exit code 2.
"""

import argparse
import dataclasses
import difflib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from engine.api.config import ConfigError, EngineConfig, arg_of
from server.config import VERSION, ServerConfig, flag_name, with_environment
from server.config_file import TRUE_WORDS, file_tokens, read_config_file
from server.model_check import check_model
from server.settings_check import check_settings
from server.vllm_flags import FOREIGN_FLAGS, SYNONYMS

GROUPS = ("model", "http", "access", "device", "kv cache", "scheduler", "logging")

DESCRIPTION = """Serve a language model over HTTP with the OpenAI API. DIR is a directory of Hugging
Face weights; without one, a small default model is prepared once and served."""
EPILOG = """Flags take dashes or underscores, and "--flag value" or "--flag=value"."""


class HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """argparse names the choices of a wrong value, but not where the value is left out."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            if action.choices is not None:
                choices = ", ".join(repr(choice) for choice in action.choices)
                error.message = f"{error.message} (choose from {choices})"
            raise


def build_parser() -> Parser:
    parser = Parser(
        prog="serve.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help="the same as --model DIR")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or TOML file of flags; the command line wins"
    )
    parser.add_argument("--version", action="version", version=f"sluice {VERSION}")
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for config in (EngineConfig, ServerConfig):
        types = get_type_hints(config)
        for field in dataclasses.fields(config):
            add_flag(groups[arg_of(field).group], field, types[field.name])
    return parser


def add_flag(group: Any, field: "dataclasses.Field[Any]", kind: Any) -> None:
    spec = arg_of(field)
    is_list = field.default is dataclasses.MISSING
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
        shown = "on" if field.default else "off"
    else:
        options["type"] = str if is_list or kind is str else number_type(kind)
        options["metavar"] = spec.metavar
        options["nargs"] = spec.nargs
        if is_list:
            # given again, the flag adds to what it has
            options["action"] = "extend" if spec.nargs else "append"
        shown = "" if is_list or field.default == "" else str(field.default)
    if spec.choices is not None:
        options["choices"] = spec.choices
    text = spec.help + (f" [{shown}]" if shown else "")
    off = [alias for alias in spec.aliases if alias.startswith("--disable-")]
    same = [alias for alias in spec.aliases if alias not in off]
    group.add_argument(flag_name(field.name), *same, help=text.replace("%", "%%"), **options)
    if "off" in (spec.choices or ()):
        group.add_argument(
            f"--no-{flag_name(field.name)[2:]}",
            dest=field.name,
            action="store_const",
            const="off",
            default=argparse.SUPPRESS,
            help=f"the same as {flag_name(field.name)} off",
        )
    if off:
        group.add_argument(
            *off,
            dest=field.name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=f"the same as --no-{flag_name(field.name)[2:]}",
        )


def number_type(kind: type[int] | type[float]) -> Any:
    """A converter whose name argparse shows in "invalid integer value"."""

    def convert(text: str) -> int | float:
        return kind(text)

    convert.__name__ = "integer" if kind is int else "number"
    return convert


def parse(argv: Sequence[str]) -> tuple[ServerConfig, EngineConfig]:
    """Raises ConfigError with one helpful line; SystemExit for --help."""
    parser = build_parser()
    tokens = normalize(argv, parser)
    first, _ = parser.parse_known_args(tokens)
    given: dict[str, Any] = {}
    if first.config is not None:
        given.update(parse_config_file(first.config, parser))
    from_argv = parse_tokens(parser, tokens)
    if "directory" in from_argv:
        if from_argv.get("model", from_argv["directory"]) != from_argv["directory"]:
            raise ConfigError(
                f"two models are given: {from_argv['directory']} and --model {from_argv['model']}"
            )
        from_argv["model"] = from_argv.pop("directory")
    given.update(from_argv)
    return pick(ServerConfig, given), pick(EngineConfig, given)


def pick(config: Any, values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})


def parse_tokens(parser: Parser, tokens: list[str]) -> dict[str, Any]:
    known, rest = parser.parse_known_args(tokens)
    if rest:
        raise ConfigError(explain_unknown(rest[0], parser))
    values = vars(known)
    values.pop("config", None)
    if values.get("directory") is None:
        values.pop("directory", None)
    return values


def explain_unknown(token: str, parser: Parser) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}: the model directory is given once; see --help"
    name = token.partition("=")[0]
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "see --help for all flags"
    return f"unknown flag {name}: {hint}"


def normalize(argv: Sequence[str], parser: Parser) -> list[str]:
    """One spelling for argparse: dashes, on/off flags without a value, no flags of vLLM's."""
    switches = {
        option: action
        for option, action in parser._option_string_actions.items()
        if isinstance(action, argparse.BooleanOptionalAction)
    }
    tokens: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            tokens.append(token)
            continue
        name, equals, value = token.partition("=")
        name = name.replace("_", "-")
        if name in SYNONYMS and not equals:
            tokens.append(SYNONYMS[name])
        elif name in FOREIGN_FLAGS and name not in parser._option_string_actions:
            take_foreign(name, value if equals else None, rest)
        elif name in switches:
            word = value if equals else rest[0] if rest else ""
            if word.lower() in TRUE_WORDS and (equals or word.lower() in ("true", "false")):
                if not equals:
                    rest.pop(0)
                tokens.append(name if TRUE_WORDS[word.lower()] else negated(name))
            elif equals:
                raise ConfigError(f"{name} is on or off: {name}, {negated(name)}, or {name}=false")
            else:
                tokens.append(name)
        else:
            tokens.append(name + equals + value)
    return tokens


def negated(name: str) -> str:
    return "--" + name.removeprefix("--no-") if name.startswith("--no-") else "--no-" + name[2:]


def take_foreign(name: str, value: str | None, rest: list[str]) -> None:
    """Consume a flag of vLLM's if its value changes nothing here; else raise ConfigError."""
    flag = FOREIGN_FLAGS[name]
    if flag.takes_value and value is None:
        value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
    value = value or ""
    if value not in flag.accepted:
        shown = f"{name} {value}".rstrip()
        accepted = " or ".join(v for v in flag.accepted if v)
        only = f" (only {accepted} is accepted)" if accepted else ""
        raise ConfigError(f"{shown}: not available here: {flag.hint}{only}")


def parse_config_file(path: str, parser: Parser) -> dict[str, Any]:
    """The flags in a YAML or TOML file. Raises ConfigError that names the file."""
    try:
        tokens = file_tokens(read_config_file(Path(path)), parser._option_string_actions)
        values = parse_tokens(parser, normalize(tokens, parser))
        if "directory" in values:
            raise ConfigError("write the model as `model: DIR`")
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 2 wrong command, 75 cannot work here, 70 engine failure."""
    try:
        server, engine = parse(sys.argv[1:] if argv is None else argv)
        server = with_environment(server)
        check_settings(server, engine)
        check_model(engine)
        from server.launcher import serve  # after the checks: it imports the HTTP stack
        from server.progress import LogHandler

        logging.basicConfig(
            level=engine.log_level.upper(),
            format="%(asctime)s %(levelname)s server: %(message)s",
            handlers=[LogHandler(sys.stderr)],
        )
        return serve(server, engine)
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return error.exit_code
