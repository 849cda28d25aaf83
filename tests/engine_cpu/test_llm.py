"""The offline face: same names, rules and texts as over HTTP."""

import json
import os
import re
import signal
import threading

import pytest

from engine import LLM, SamplingParams, StructuredOutput
from engine.api.config import ConfigError
from tests.engine_cpu.tiny_models import make_tiny
from tokenizer_proc.errors import PromptError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with LLM(model, dtype="float32", cpu_threads=1, num_blocks=64, max_model_len=256) as llm:
        yield llm


def free_blocks(llm):
    return llm.engine.loop.scheduler.kv.pool.num_free


def test_results_come_in_the_order_of_the_prompts(llm):
    before = free_blocks(llm)
    texts = [f"number {i} of many" for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 7) for i in range(20)]
    outputs = llm.generate(texts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == texts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1 + i % 7 for i in range(20)]
    assert all(o.finished for o in outputs)
    assert free_blocks(llm) == before


def test_prompt_forms_are_equal(llm):
    text = "The capital of France"
    ids = llm.tokenizer.encode(text)
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}]
    texts = [llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms]
    texts.append(llm.generate([ids], GREEDY, use_tqdm=False)[0].outputs[0].text)
    texts.append(llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].text)
    assert len(set(texts)) == 1


def test_text_is_what_the_tokenizer_makes_of_the_ids(llm):
    out = llm.generate(
        "One two three",
        SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True),
        use_tqdm=False,
    )[0].outputs[0]
    expected = llm.tokenizer.decode(
        out.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert out.text == expected
    assert out.finish_reason == "length"


def test_n_choices_differ_and_repeat_by_seed(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, ignore_eos=True)
    first = llm.generate("Once", params, use_tqdm=False)[0].outputs
    again = llm.generate("Once", params, use_tqdm=False)[0].outputs
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 4
    assert [c.index for c in first] == [0, 1, 2, 3]


def test_stop_strings_cut_the_text(llm):
    whole = llm.generate(
        "Once upon", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    text = whole[0].outputs[0].text
    stop = text[10:13]
    out = llm.generate(
        "Once upon",
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop]),
        use_tqdm=False,
    )
    assert out[0].outputs[0].text == text[: text.index(stop)]
    assert out[0].outputs[0].finish_reason == "stop"
    assert out[0].outputs[0].stop_reason == stop


def test_logprobs_are_given_per_token(llm):
    out = llm.generate(
        "Once",
        SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, ignore_eos=True),
        use_tqdm=False,
    )[0].outputs[0]
    assert len(out.logprobs) == 5
    for entry, token_id in zip(out.logprobs, out.token_ids, strict=True):
        assert entry.chosen.token_id == token_id
        assert len(entry.top) == 3
        assert entry.top[0].logprob == entry.chosen.logprob  # greedy takes the best
    assert out.cumulative_logprob == pytest.approx(sum(e.chosen.logprob for e in out.logprobs))


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "Hello"}]
    out = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert out.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in two] == [out.outputs[0].text] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", {}, "empty_prompt"),
        ([5] * 300, {}, "context_length_exceeded"),
        ("a b", {"max_tokens": 300}, "context_length_exceeded"),
        ([5, 999], {}, "invalid_token_id"),
        ("a", {"logit_bias": {999: 1.0}}, "invalid_value"),
    ],
)
def test_prompts_that_cannot_run_are_refused_before_any_runs(llm, prompt, params, code):
    with pytest.raises(PromptError) as alone:
        llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    with pytest.raises(PromptError) as caught:
        llm.generate(["fine", prompt], [SamplingParams(), SamplingParams(**params)], use_tqdm=False)
    assert caught.value.code == code
    assert str(caught.value) == f"prompts[1]: {alone.value}", "of many, the one that is meant"
    assert not llm.engine.loop.has_work()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_model_len": 100_000}, "512"),
        ({"device": "cuda"}, "cpu"),
    ],
)
def test_settings_that_cannot_work_name_themselves(llm, settings, words):
    with pytest.raises(ConfigError, match=words):
        LLM(llm.config.model, **settings)


@pytest.mark.parametrize("length", [2, 3, 16, 17])
def test_the_shortest_sequences_are_served(llm, length):
    params = SamplingParams(max_tokens=length - 1, ignore_eos=True)
    with LLM(llm.config.model, max_model_len=length, num_blocks=4, cpu_threads=1) as short:
        out = short.generate([[5]], params, use_tqdm=False)
    assert len(out[0].outputs[0].token_ids) == length - 1


def test_a_missing_model_directory_is_named():
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        LLM("/nowhere/at/all")


def test_one_parameter_object_per_prompt_or_one_for_all(llm):
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_ctrl_c_leaves_a_usable_engine(llm):
    """Interrupted at any moment: KeyboardInterrupt, and the next batch runs as if nothing had been."""
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    before = free_blocks(llm)
    expected = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].text
    for delay in (0.02, 0.05, 0.11):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once"] * 400, long, use_tqdm=False)
        timer.join()
        assert llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].text == expected
        assert free_blocks(llm) == before


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        None,
        {"role": "user", "content": "one message, no list"},
        [{"role": "user"}],
        [{"role": "alien", "content": "x"}],
        [[]],
    ],
)
def test_conversations_are_checked(llm, messages):
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, use_tqdm=False)


def test_template_variables_are_a_dict(llm):
    with pytest.raises(ValueError, match="chat_template_kwargs is a dict, got 5"):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False, chat_template_kwargs=5)


def test_prompts_of_fractions_are_refused(llm):
    with pytest.raises(ValueError, match="whole numbers"):
        llm.generate([3.5], use_tqdm=False)


def test_prompt_logprobs_are_given_per_prompt_token(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    out = llm.generate("One two three", params, use_tqdm=False)[0]
    first, *others = out.prompt_logprobs
    assert first is None
    assert len(others) == len(out.prompt_token_ids) - 1
    for found, token_id in zip(others, out.prompt_token_ids[1:], strict=True):
        assert len(found) == (2 if found[token_id].rank <= 2 else 3)
        ranks = sorted((entry.rank, -entry.logprob) for entry in found.values())
        assert [rank for rank, _ in ranks[:2]] == [1, 2]
        assert ranks == sorted(ranks, key=lambda pair: pair[1])
        assert found[token_id].decoded_token == llm.tokenizer.decode([token_id])
    assert llm.generate("One two three", GREEDY, use_tqdm=False)[0].prompt_logprobs is None


def test_prompts_are_scored_without_generating(llm):
    """Log-likelihood of a text: the score of its tokens does not depend on what follows them."""
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    short = llm.generate("The capital of", score, use_tqdm=False)[0]
    long = llm.generate("The capital of France is Paris", score, use_tqdm=False)[0]
    assert (short.outputs[0].text, short.outputs[0].token_ids) == ("", [])
    assert short.outputs[0].finish_reason == "length"
    values = [
        [place[token].logprob for place, token in zip(o.prompt_logprobs[1:], ids, strict=True)]
        for o, ids in ((short, short.prompt_token_ids[1:]), (long, long.prompt_token_ids[1:]))
    ]
    assert values[1][: len(values[0])] == pytest.approx(values[0], abs=1e-4)
    assert all(value < 0 for value in values[1])


def test_equal_choices_are_computed_once(llm):
    params = SamplingParams(temperature=0.0, n=3, max_tokens=9, ignore_eos=True, logprobs=1)
    before = llm.engine.loop.scheduler.generation_tokens
    out = llm.generate("Once upon", params, use_tqdm=False)[0]
    assert llm.engine.loop.scheduler.generation_tokens == before + 9
    assert [c.index for c in out.outputs] == [0, 1, 2]
    assert {(c.text, tuple(c.token_ids), c.finish_reason) for c in out.outputs} == {
        (out.outputs[0].text, tuple(out.outputs[0].token_ids), "length")
    }
    assert len({c.cumulative_logprob for c in out.outputs}) == 1
    assert [len(c.logprobs) for c in out.outputs] == [9, 9, 9]


def test_long_prompts_are_truncated_if_asked(llm):
    ids = list(range(3, 303))
    params = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=20)
    out, whole = llm.generate([ids, ids[-20:]], params, use_tqdm=False)
    assert out.prompt_token_ids == whole.prompt_token_ids == ids[-20:]
    assert out.outputs[0].token_ids == whole.outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=-1)
    out = llm.generate([ids], params, use_tqdm=False)[0]
    assert len(out.prompt_token_ids) == 256 - 4
    with pytest.raises(PromptError, match="maximum context length is 256"):
        llm.generate([ids], GREEDY, use_tqdm=False)


def test_structured_output(llm):
    schema = '{"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 3}'
    params = SamplingParams(
        structured=StructuredOutput("json", schema), n=3, seed=4, max_tokens=250, logprobs=0
    )
    before = free_blocks(llm)
    [output, plain] = llm.generate(["a", "a"], [params, GREEDY], use_tqdm=False)
    for completion in output.outputs:
        values = json.loads(completion.text)
        assert len(values) in (2, 3)
        assert set(values) <= {1, 22}
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert len(completion.logprobs) == len(completion.token_ids)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert plain.outputs[0].text == llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert free_blocks(llm) == before


def test_bad_words_and_allowed_token_ids(llm):
    free = llm.generate("One two", GREEDY, use_tqdm=False)[0].outputs[0]
    word = max(re.findall("[a-z]+", free.text), key=len)
    params = SamplingParams(temperature=0.0, max_tokens=12, bad_words=[word])
    assert word not in llm.generate("One two", params, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(max_tokens=8, allowed_token_ids=[70, 71])
    assert set(llm.generate("One two", params, use_tqdm=False)[0].outputs[0].token_ids) <= {70, 71}


def test_constraints_that_cannot_work_are_refused(llm):
    for wrong, param in (
        ({"structured": StructuredOutput("regex", "(")}, "structured"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ):
        with pytest.raises(PromptError) as caught:
            llm.generate("x", SamplingParams(**wrong), use_tqdm=False)
        assert caught.value.param == param
    with pytest.raises(ValueError, match="allows no token"):
        SamplingParams(allowed_token_ids=[])


def generate_in_form(llm, kind, value):
    params = SamplingParams(structured=StructuredOutput(kind, value))
    llm.generate(["x", "y"], params, use_tqdm=False)


def test_a_lone_surrogate_in_structured_output_leaves_the_engine_as_it_was(llm):
    before = llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text
    values = ("json", '{"const": "\ud800"}'), ("json", '{"const": "\\ud800"}'), ("regex", "\ud800")
    for kind, value in (*values, ("choice", '["\ud800"]'), ("grammar", "\ud800")):
        with pytest.raises(ValueError, match=r"structured.* lone surrogate .*; remove it"):
            generate_in_form(llm, kind, value)
    assert not llm.engine.has_work()
    params = SamplingParams(structured=StructuredOutput("regex", "[0-9]"), max_tokens=2)
    assert llm.generate("x", params, use_tqdm=False)[0].outputs[0].text.isdigit()
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text == before


def test_shutdown_ends_the_processes_that_it_started(tmp_path):
    llm = LLM(make_tiny("llama", tmp_path), dtype="float32", cpu_threads=1, num_blocks=16)
    form = StructuredOutput("regex", "[0-9]")
    llm.generate("x", SamplingParams(max_tokens=2, structured=form), use_tqdm=False)
    renderers = llm.engine.pipeline.encoder.chat._renderer._idle
    pids = [
        process.pid for process in [*renderers, llm.engine.pipeline.constraints.checker.process]
    ]
    assert len(pids) == 2
    llm.shutdown()
    llm.shutdown()  # as at the end of a `with` block
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_why_a_completion_ended_with_an_error_is_told_beside_its_text(llm):
    before = free_blocks(llm)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    form = StructuredOutput("json", json.dumps(schema))
    params = [SamplingParams(max_tokens=20, structured=form), GREEDY]
    failed, fine = llm.generate(["a", "b"], params, use_tqdm=False)
    assert failed.finished
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error.startswith("structured: the form asked for is too large")
    assert failed.outputs[0].text in ("", "{"), "what was generated, and nothing else"
    assert (fine.outputs[0].finish_reason, fine.outputs[0].error) == ("length", None)
    assert free_blocks(llm) == before


def test_a_completion_given_up_on_its_way_keeps_its_text(llm):
    """All of it, with its log-probabilities: also what might have become a stop string."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    form = StructuredOutput(
        "grammar", f'start: "the EN" large\nlarge: %json {json.dumps(schema)}\n'
    )
    params = SamplingParams(max_tokens=20, structured=form, stop=["END"], logprobs=1)
    (output,) = llm.generate("a", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.finish_reason == "error"
    assert completion.text == "the EN"
    assert len(completion.logprobs) == len(completion.token_ids)
    total = sum(entry.chosen.logprob for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)
    assert total < 0
