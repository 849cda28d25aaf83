"""python -m tokenizer_proc.template_worker: renders chat templates in a process that can be killed.

A template is a program. In a sandbox it cannot reach Python, but it can run for ever, also in one
operation that no thread of its process gets past (`10 ** 10 ** 9`), and it can eat memory. So it runs
here, within limits (tokenizer_proc/limited_process.py).

    question   [template, variables]
    answer     ["text", text], ["syntax", line, why] or ["error", why]

The environment has what templates are written for: that of transformers' apply_chat_template.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenizer_proc.limited_process import answer_questions

MEMORY_BYTES = 2 << 30  # address space of this process


class GenerationTag(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it is only a bracket."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter: no escapes for HTML, and letters as they are."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


ENVIRONMENT = build_environment()


@lru_cache(16)
def compiled(template: str) -> Template:
    return ENVIRONMENT.from_string(template)


def render(question: tuple[str, dict[str, Any]]) -> list[Any]:
    template, variables = question
    try:
        text = compiled(template).render(variables)
        text.encode()  # what cannot be, no message can hold
        return ["text", text]
    except TemplateSyntaxError as error:
        return ["syntax", error.lineno, str(error.message)]
    except UnicodeEncodeError:
        return ["error", "it makes text that is not Unicode"]
    except MemoryError:
        return ["error", "it takes too much memory"]
    except RecursionError:
        return ["error", "it is nested too deeply"]
    except Exception as error:  # a template is data, perhaps of a request: it may raise anything
        return ["error", str(error) or type(error).__name__]


if __name__ == "__main__":
    answer_questions(render, MEMORY_BYTES)
