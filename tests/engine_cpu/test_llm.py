"""The offline face: same names, rules and texts as over HTTP."""

import os
import signal
import threading

import pytest

from engine import LLM, SamplingParams
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
    with pytest.raises(PromptError) as caught:
        llm.generate(["fine", prompt], SamplingParams(**params), use_tqdm=False)
    assert caught.value.code == code
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
    "messages", ["hello", [{"role": "user"}], [{"role": "alien", "content": "x"}], [[]]]
)
def test_conversations_are_checked(llm, messages):
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, use_tqdm=False)


def test_prompts_of_fractions_are_refused(llm):
    with pytest.raises(ValueError, match="whole numbers"):
        llm.generate([3.5], use_tqdm=False)
