"""Who may import whom (docs/design.md, "Who may import whom"), read from the syntax trees.

A rule names a part of the project and either all that it may import of the project (`allow`) or what
it must not (`forbid`). Imports inside functions and below TYPE_CHECKING count too, unless said.
"""

import sys
from dataclasses import dataclass, field

import pytest

from tests.contracts.source import PACKAGES, Import, Source, is_below, sources

HEAVY = ("torch", "transformers", "cupy", "safetensors", "gguf", "tokenizers")
STDLIB = tuple(sys.stdlib_module_names)


@dataclass(frozen=True)
class Rule:
    part: str
    why: str
    allow: tuple[str, ...] | None = None  # of the project's own modules
    third_party: tuple[str, ...] | None = None  # None: any
    forbid: tuple[str, ...] = ()
    exempt: dict[str, tuple[str, ...]] = field(default_factory=dict)  # module -> what it may too


RULES = [
    Rule(
        "server",
        "the server starts in a blink and has nothing in it that can crash",
        allow=("server", "engine.api"),
        forbid=HEAVY,
        # converts the default model in a process of its own
        exempt={"server.default_model": ("engine.weights.gguf",)},
    ),
    Rule(
        "tokenizer_proc",
        "clients know the engine by its messages",
        allow=("tokenizer_proc", "engine.api"),
        forbid=("torch", "cupy"),
    ),
    Rule(
        "engine",
        "the engine knows token ids, and none of its clients",
        forbid=("server", "tokenizer_proc", "transformers", "tokenizers", "scripts", "tests"),
        # the offline face tokenizes in its own process and may prepare the default model
        exempt={
            "engine.llm": ("tokenizer_proc",),
            "engine.offline": ("tokenizer_proc", "server.default_model"),
        },
    ),
    Rule(
        "engine.api",
        "what other processes import must stay light",
        allow=("engine.api",),
        third_party=("msgspec",),
        exempt={"engine.api.grammar": ("llguidance",)},  # not for the server
    ),
    *(
        Rule(
            part,
            "planning is plain Python: testable, simulatable, and free of devices",
            forbid=("torch", "cupy", "engine.runner", "engine.models", "engine.layers"),
            third_party=("numpy", "msgspec"),
        )
        for part in (
            "engine.scheduler",
            "engine.kv.block_pool",
            "engine.kv.host_tier",
            "engine.kv.manager",
            "engine.request",
            "engine.plan",
        )
    ),
    Rule(
        "engine.ops",
        "an operation is tensors in, tensors out",
        allow=("engine.ops",),
        third_party=("torch", "cupy", "numpy", "cuda"),
        # its result goes to the host, in the plan's own type
        exempt={"engine.ops.logprobs": ("engine.plan",)},
    ),
    Rule(
        "engine.models",
        "a model is a function of its inputs",
        forbid=("engine.scheduler", "engine.runner", "engine.loop", "engine.kv", "engine.request"),
    ),
    Rule(
        "engine.layers",
        "layers know tensors and weights",
        forbid=("engine.scheduler", "engine.runner", "engine.loop", "engine.models", "engine.kv"),
        # the settings of rotary embeddings, as config.json gives them: plain data
        exempt={"engine.layers.rotary": ("engine.models.rope",)},
    ),
    Rule(
        "engine.runner",
        "the runner executes plans and makes none",
        forbid=("engine.scheduler", "engine.loop", "engine.request"),
    ),
]


def in_project(module: str) -> bool:
    return any(is_below(module, package) for package in (*PACKAGES, "scripts", "tests"))


def complaint(rule: Rule, source: Source, imported: Import) -> str | None:
    module = imported.module
    if any(is_below(module, prefix) for prefix in rule.exempt.get(source.module, ())):
        return None
    broken = any(is_below(module, prefix) for prefix in rule.forbid)
    if in_project(module):
        # `from engine import api` imports the package `engine`, which every part may
        if rule.allow is not None and module not in PACKAGES:
            broken |= not any(
                is_below(module, prefix) or is_below(prefix, module) for prefix in rule.allow
            )
    elif rule.third_party is not None:
        top = module.partition(".")[0]
        broken |= top not in STDLIB and top not in rule.third_party
    if not broken:
        return None
    return f"{source.path}:{imported.line}: {rule.part} must not import {module} ({rule.why})"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.part)
def test_imports_obey_the_rules(rule: Rule) -> None:
    complaints = [
        text
        for source in sources()
        if is_below(source.module, rule.part)
        for imported in source.imports
        if (text := complaint(rule, source, imported)) is not None
    ]
    assert complaints == []


def importers(module: str) -> set[str]:
    return {
        source.module
        for source in sources()
        for imported in source.imports
        if is_below(imported.module, module) and not is_below(source.module, module)
    }


def test_only_the_engine_s_entries_drive_the_loop() -> None:
    assert importers("engine.loop") <= {"engine.build", "engine.main"}
    assert importers("engine.build") <= {"engine.main", "engine.offline"}


def test_nothing_imports_scripts_or_tests() -> None:
    assert importers("scripts") == set()
    assert importers("tests") == set()


def test_rules_name_parts_that_exist() -> None:
    """A renamed module must not slip out of its rule."""
    modules = {source.module for source in sources()}
    missing = [rule.part for rule in RULES if rule.part not in modules]
    assert missing == []


def test_the_reader_of_imports_sees_all_kinds() -> None:
    import ast

    text = (
        "import a.b, c\nfrom d import e\nfrom . import f\nfrom ..g import h\n"
        "if TYPE_CHECKING:\n    import i\nelse:\n    import j\ndef k():\n    import l\n"
    )
    source = Source("engine/kv/x.py", "engine.kv.x", text, ast.parse(text))
    runtime = {i.module for i in source.imports if not i.typing_only}
    assert runtime == {
        *("a.b", "c", "d", "d.e", "engine.kv", "engine.kv.f"),
        *("engine.g", "engine.g.h", "j", "l"),
    }
    assert {i.module for i in source.imports if i.typing_only} == {"i"}
