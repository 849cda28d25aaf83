"""Prompts to requests: encoding, chat templates, length rules, seeds, block names, errors."""

import threading
import time

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from engine.api.hashing import block_names
from engine.api.messages import (
    ChatPrompt,
    EngineLimits,
    Generate,
    TextPrompt,
    TokenPrompt,
    decoder,
    encoder,
)
from engine.api.sampling import SamplingParams, StructuredOutput, choice_seed
from tests.unit.tokenizers_for_tests import byte_fallback, byte_level, save, word_piece
from tokenizer_proc import chat as chat_module
from tokenizer_proc.bound import TokenBound, token_bound
from tokenizer_proc.encode import Encoder
from tokenizer_proc.errors import PromptError, TokenizerLoadError
from tokenizer_proc.loading import check_fits_model, load_tokenizer, vocabulary_size
from tokenizer_proc.prepare import prepare
from tokenizer_proc.vocabulary import Vocabulary

TOKENIZER = byte_level()
ENCODER = Encoder(TOKENIZER)
VOCAB = vocabulary_size(TOKENIZER)


def limits(**changes):
    values = {
        "block_size": 4,
        "num_blocks": 100,
        "max_model_len": 32,
        "max_num_seqs": 8,
        "vocab_size": VOCAB,
        "enable_prefix_caching": True,
        "eos_token_ids": [2],
        "dtype": "float32",
        "device": "cpu",
    }
    return EngineLimits(**(values | changes))


def tokens(n):
    return TokenPrompt(token_ids=(np.arange(n, dtype=np.int32) % 50 + 10).tobytes())


LIMITS = limits()


def make(
    prompt,
    limits=LIMITS,
    encoder=ENCODER,
    default_seed=0,
    want_text=False,
    salt="",
    clamp=False,
    **params,
):
    generate = Generate(
        req_id=10,
        prompt=prompt,
        params=SamplingParams(**params),
        arrival_ns=123,
        priority=3,
        cache_salt=salt,
        want_prompt_text=want_text,
        clamp_max_tokens=clamp,
    )
    return prepare(encoder, generate, limits, default_seed)


def error_of(*args, **kwargs):
    with pytest.raises(PromptError) as caught:
        make(*args, **kwargs)
    return caught.value


def chat(content="hi", role="user", **more):
    return ChatPrompt(messages=[{"role": role, "content": content}], **more)


# --- requests ---------------------------------------------------------------------------------------


def test_a_text_prompt_becomes_one_request_with_block_names():
    prepared = make(TextPrompt(text="hello world again"), max_tokens=5, want_text=True, salt="s")
    [request] = prepared.requests
    ids = TOKENIZER.encode("hello world again")
    assert np.frombuffer(request.token_ids, np.int32).tolist() == ids
    assert request.block_names == block_names(request.token_ids, 4, "s")
    assert len(request.block_names) == 16 * (len(ids) // 4)
    assert (request.req_id, request.arrival_ns, request.priority) == (10, 123, 3)
    assert (request.cache_salt, request.params.max_tokens) == ("s", 5)
    assert prepared.num_prompt_tokens == len(ids)
    assert prepared.prompt_text == "hello world again"


def test_no_block_names_without_prefix_caching():
    prepared = make(tokens(8), limits(enable_prefix_caching=False))
    assert prepared.requests[0].block_names == b""
    assert prepared.prompt_text is None


def test_ids_given_as_prompt_are_echoed_as_text():
    ids = np.array(TOKENIZER.encode("a<|im_end|>b"), np.int32)
    prepared = make(TokenPrompt(token_ids=ids.tobytes()), want_text=True)
    assert prepared.prompt_text == "a<|im_end|>b"


def test_choices_share_prompt_and_names_but_not_seeds():
    requests = make(tokens(8), n=3, seed=5, temperature=0.5).requests
    assert [r.req_id for r in requests] == [10, 11, 12]
    assert len({r.token_ids for r in requests}) == len({r.block_names for r in requests}) == 1
    assert [r.params.seed % 2**64 for r in requests] == [choice_seed(5, i) for i in range(3)]
    assert {r.params.n for r in requests} == {1}


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_every_seed_survives_the_wire(seed):
    """Derived seeds use all 64 bits; the field is signed, so the bits are kept and not the value."""
    for request in make(tokens(4), n=20, seed=seed).requests:
        sent = decoder(SamplingParams).decode(encoder().encode(request.params))
        choice = request.req_id - 10
        assert sent.seed % 2**64 == choice_seed(seed, choice)


def test_without_a_seed_each_request_gets_a_fresh_one_or_the_servers():
    for seed in (None, -1):
        seeds = {make(tokens(4), seed=seed).requests[0].params.seed for _ in range(5)}
        assert len(seeds) == 5
        assert all(0 <= s < 2**63 for s in seeds)
        assert make(tokens(4), seed=seed, default_seed=9).requests[0].params.seed == 9
    assert make(tokens(4), seed=7, default_seed=9).requests[0].params.seed == 7


# --- lengths ------------------------------------------------------------------------------------------


def test_one_token_less_than_the_limit_leaves_one_token():
    assert make(tokens(31), max_tokens=None).requests[0].params.max_tokens == 1
    assert make(tokens(31), max_tokens=1).requests[0].params.max_tokens == 1


@pytest.mark.parametrize("length", [32, 33, 100])
def test_a_prompt_as_long_as_the_limit_is_refused_with_the_numbers(length):
    error = error_of(tokens(length), max_tokens=None)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert str(length) in error.message
    assert "32" in error.message


def test_too_many_tokens_asked_for_names_what_would_fit():
    assert make(tokens(20), max_tokens=12).requests[0].params.max_tokens == 12
    error = error_of(tokens(20), max_tokens=13)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    for number in ("32", "20", "13", "12"):
        assert number in error.message


class Refusing:
    """Stands for the Rust tokenizer where it must not be asked."""

    def encode_batch_fast(self, texts, add_special_tokens):
        raise AssertionError("encoded, although it can never fit")


def test_a_text_far_too_long_is_refused_before_it_is_encoded():
    bound = token_bound(Vocabulary(TOKENIZER))
    assert bound == TokenBound(14)
    encoder = Encoder(TOKENIZER, bound)
    encoder.backend = Refusing()
    text = "é" * (16 * 14 + 1)  # two bytes each: 32 of the longest tokens, and two bytes more
    error = error_of(TextPrompt(text=text), encoder=encoder)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "at least 33 tokens" in error.message
    assert error_of(chat(text), encoder=encoder).param == "messages"
    with pytest.raises(AssertionError):
        make(TextPrompt(text=text[1:]), encoder=encoder)


def test_others_run_while_a_long_prompt_is_encoded():
    """The tokenizer works without the interpreter's lock, so that all streams go on."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    encoded = []
    worker = threading.Thread(target=lambda: encoded.append(ENCODER.encode(TextPrompt(text=text))))
    worker.start()
    turns = 0
    while not encoded:
        time.sleep(0.001)
        turns += 1
    worker.join()
    assert turns > 10
    assert ENCODER.decode(encoded[0].token_ids.tolist()) == text


def test_the_bound_allows_for_text_that_makes_no_tokens():
    assert token_bound(Vocabulary(byte_fallback())) == TokenBound(10)
    assert token_bound(Vocabulary(word_piece())) is None
    composing, folding, greedy, splitting, lacking = (byte_level() for _ in range(5))
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    assert token_bound(Vocabulary(composing)) == TokenBound(4 * 14)
    folding.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.StripAccents()])
    greedy.backend_tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    splitting.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for tokenizer in (folding, greedy, splitting):
        assert token_bound(Vocabulary(tokenizer)) is None
    vocab = {name: i for name, i in TOKENIZER.get_vocab().items() if len(name) == 1 and name != "~"}
    lacking.backend_tokenizer.model = models.BPE(vocab=vocab, merges=[])
    bound = token_bound(Vocabulary(lacking))
    assert bound.dropped == b"~"
    assert bound.least_tokens(b"~" * 1000) == len(lacking.encode("~" * 1000)) == 0


def test_a_chat_too_long_blames_the_messages():
    assert error_of(chat("word " * 50), max_tokens=None).param == "messages"


def test_requests_larger_than_the_kv_cache_are_refused_at_once():
    small = limits(num_blocks=4)  # 16 tokens; the last generated token needs no KV
    assert make(tokens(10), small, max_tokens=7).requests[0].params.max_tokens == 7
    error = error_of(tokens(10), small, max_tokens=8)
    assert (error.status, error.code) == (400, "exceeds_kv_capacity")
    assert "5 KV blocks" in error.message
    assert "7" in error.message
    assert error_of(tokens(17), small, max_tokens=None).code == "exceeds_kv_capacity"


def test_an_open_ended_request_fills_the_kv_cache_at_most():
    small = limits(num_blocks=4)
    assert make(tokens(10), small, max_tokens=None).requests[0].params.max_tokens == 7
    assert make(tokens(10), max_tokens=None).requests[0].params.max_tokens == 22


def test_min_tokens_beyond_the_room_is_refused():
    error = error_of(tokens(30), max_tokens=None, min_tokens=3)
    assert (error.code, error.param) == ("context_length_exceeded", "min_tokens")


def test_an_empty_prompt_is_refused_unless_a_bos_token_is_added():
    assert error_of(TextPrompt(text="")).code == "empty_prompt"
    assert error_of(TokenPrompt(token_ids=b"")).code == "empty_prompt"
    with_bos = Encoder(byte_fallback())
    prepared = make(TextPrompt(text=""), limits(), with_bos)
    assert np.frombuffer(prepared.requests[0].token_ids, np.int32).tolist() == [1]


# --- ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1])
def test_prompt_ids_out_of_the_vocabulary_name_position_and_id(bad):
    ids = np.array([5, bad, 6], np.int32).tobytes()
    error = error_of(TokenPrompt(token_ids=ids))
    assert (error.status, error.code, error.param) == (400, "invalid_token_id", "prompt[1]")
    assert "prompt[1]" in error.message
    assert str(bad) in error.message


def test_ids_among_the_parameters_must_exist():
    for field in ("stop_token_ids", "allowed_token_ids"):
        error = error_of(tokens(4), **{field: [5, VOCAB]})
        assert (error.status, error.code, error.param) == (400, "invalid_token_id", f"{field}[1]")
    error = error_of(tokens(4), logit_bias={VOCAB: 1.0})
    assert (error.code, error.param) == ("invalid_value", "logit_bias")
    assert make(tokens(4), logit_bias={VOCAB - 1: 1.0}, stop_token_ids=[0]).requests


def test_a_lone_surrogate_is_refused():
    assert error_of(TextPrompt(text="a\ud800")).code == "invalid_unicode"


# --- encoding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
@pytest.mark.parametrize("special", [True, False])
def test_encoding_equals_transformers(tokenizer, special):
    for text in ("hello world", " 漢字 👩‍👩‍👧", "a<|im_end|>b </s>", "x\n\ny"):
        prompt = TextPrompt(text=text, add_special_tokens=special)
        ids = Encoder(tokenizer).encode(prompt).token_ids
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=special)


def test_truncation_settings_of_the_file_do_not_cut_prompts(tmp_path):
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Encoder(load_tokenizer(str(tmp_path)))
    assert len(loaded.encode(TextPrompt(text="one two three four five"))) > 3
    assert len(loaded.encode(TextPrompt(text="a"))) == 1


# --- chat -----------------------------------------------------------------------------------------------


def rendered(tokenizer, prompt):
    return Encoder(tokenizer).encode(prompt).text


def test_chat_is_rendered_by_the_template_and_encoded_with_its_special_tokens():
    encoded = ENCODER.encode(chat("hi"))
    assert encoded.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.token_ids[0] == TOKENIZER.convert_tokens_to_ids("<|im_start|>")


def test_generation_prompt_and_continued_messages():
    assert rendered(TOKENIZER, chat("hi", add_generation_prompt=False)).endswith("<|im_end|>\n")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    prompt = ChatPrompt(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered(TOKENIZER, prompt).endswith("<|im_start|>assistant\nWell, ")


def test_content_parts_are_joined_for_templates_that_want_strings():
    parts = [{"type": "text", "text": "one "}, {"type": "input_text", "text": "two"}]
    assert "user\none two<|im_end|>" in rendered(TOKENIZER, chat(parts))
    assert "user\n<|im_end|>" in rendered(TOKENIZER, chat([]))


PARTS_TEMPLATE = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"


def test_content_parts_are_passed_as_lists_to_templates_that_iterate():
    tokenizer = byte_level(chat_template=PARTS_TEMPLATE)
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert rendered(tokenizer, chat(parts)) == "[one][two]"
    assert rendered(tokenizer, chat("one")) == "[one]"


def test_both_forms_reach_templates_that_take_both():
    both = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer = byte_level(chat_template=both)
    assert rendered(tokenizer, chat("one")) == "one"
    assert rendered(tokenizer, chat([{"type": "text", "text": "one"}])) == "[one]"


def test_developer_is_system_unless_the_template_knows_it():
    assert "<|im_start|>system\nhi" in rendered(TOKENIZER, chat("hi", role="developer"))
    knows = "{% for m in messages %}{% if m['role'] == 'developer' %}DEV{% endif %}{% endfor %}"
    assert rendered(byte_level(chat_template=knows), chat("hi", role="developer")) == "DEV"


def test_arguments_of_tool_calls_reach_the_template_as_they_are():
    """The server has made objects of them, and left as text what it found too deep or no object."""
    template = (
        "{% for m in messages %}{{ m['tool_calls'][0]['function']['arguments'] }}{% endfor %}"
    )
    deep = '{"a":' + "[" * 600 + "]" * 600 + "}"
    for arguments, expected in (
        ({"city": "Oslo"}, "{'city': 'Oslo'}"),
        ("not json", "not json"),
        (deep, deep),
    ):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        prompt = ChatPrompt(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert rendered(byte_level(chat_template=template), prompt) == expected


def test_absent_content_is_empty():
    prompt = ChatPrompt(messages=[{"role": "assistant", "content": None}, {"role": "user"}])
    assert rendered(TOKENIZER, prompt).count("\n<|im_end|>") == 2


def test_template_variables_are_passed_and_reserved_names_refused():
    tokenizer = byte_level(
        chat_template="{% if think %}THINK{% endif %}{{ messages[0]['content'] }}"
    )
    prompt = chat("hi", chat_template_kwargs={"think": True})
    assert rendered(tokenizer, prompt) == "THINKhi"
    error = error_of(chat("hi", chat_template_kwargs={"tokenize": True, "chat_template": "x"}))
    assert (error.status, error.code) == (400, "invalid_value")
    assert "chat_template, tokenize" in error.message


def test_an_error_of_the_template_is_told_in_its_own_words():
    refusing = byte_level(chat_template="{{ raise_exception('roles must alternate') }}")
    error = error_of(chat("hi"), encoder=Encoder(refusing))
    assert (error.status, error.code, error.param) == (400, "invalid_messages", "messages")
    assert "roles must alternate" in error.message
    broken = byte_level(chat_template="{{ 1 / 0 }}")
    assert error_of(chat("hi"), encoder=Encoder(broken)).code == "invalid_messages"


def test_a_template_that_is_none_is_refused_at_the_start():
    with pytest.raises(TokenizerLoadError, match=r"error in line 2.*--chat-template"):
        Encoder(byte_level(chat_template="{% for m in messages %}\n{% endif %}"))


def test_a_template_without_end_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(chat_module, "OWN_TEMPLATE_SECONDS", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TokenizerLoadError, match=r"more than 0\.2 s"):
        Encoder(byte_level(chat_template=loop))


def test_templates_cannot_reach_python():
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    error = error_of(chat("hi"), encoder=Encoder(byte_level(chat_template=escape)))
    assert error.code == "invalid_messages"


def test_no_template_says_how_to_give_one():
    encoder = Encoder(byte_level(chat_template=None))
    assert encoder.chat.template_text == ""
    error = error_of(chat("hi"), encoder=encoder)
    assert error.status == 400
    assert "--chat-template" in error.message


def test_the_end_of_a_chat_is_told_and_decides_what_is_forced():
    thinking = "{{ messages[0]['content'] }}{% if think %}<think>\n{% endif %}"
    encoder = Encoder(byte_level(chat_template=thinking))
    plain, after = StructuredOutput("regex", "a"), StructuredOutput("regex", "b")
    for think in (False, True):
        generate = Generate(
            req_id=1,
            prompt=chat("x" * 100, chat_template_kwargs={"think": think}),
            params=SamplingParams(structured=plain),
            arrival_ns=1,
            reasoning_mark="<think>",
            structured_after_mark=after,
        )
        prepared = prepare(encoder, generate, limits(max_model_len=512, num_blocks=999))
        assert prepared.requests[0].params.structured == (after if think else plain)
        assert prepared.prompt_end.endswith("x<think>\n" if think else "xx")


def test_bos_is_never_doubled():
    template = "{{ messages[0]['content'] }}"
    with_bos = Encoder(byte_fallback(chat_template="{{ bos_token }}" + template))
    without = Encoder(byte_fallback(chat_template=template))
    for adapted, asked, expected in (
        (with_bos, True, 1),
        (with_bos, False, 1),
        (without, True, 1),
        (without, False, 0),
    ):
        ids = adapted.encode(chat("Hello", add_special_tokens=asked)).token_ids.tolist()
        assert ids.count(1) == expected


# --- loading --------------------------------------------------------------------------------------------


def test_a_saved_tokenizer_and_a_template_file_are_loaded(tmp_path):
    directory = save(byte_level(chat_template=None), tmp_path / "tokenizer")
    template = tmp_path / "chat.jinja"
    template.write_text("FILE {{ messages[0]['content'] }}", encoding="utf-8")
    assert Encoder(load_tokenizer(str(directory))).chat.template_text == ""
    loaded = Encoder(load_tokenizer(str(directory), str(template)))
    assert loaded.encode(chat("hi")).text == "FILE hi"


def test_missing_and_broken_tokenizers_say_what_was_looked_for(tmp_path):
    with pytest.raises(TokenizerLoadError, match=r"absent: no such directory"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(TokenizerLoadError, match=r"found none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(TokenizerLoadError, match=r"cannot be loaded .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    directory = save(byte_level(), tmp_path / "good")
    with pytest.raises(TokenizerLoadError, match=r"--chat-template .*absent\.jinja"):
        load_tokenizer(str(directory), str(tmp_path / "absent.jinja"))


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers():
    ordinary = vocabulary_size(TOKENIZER, with_added_tokens=False)
    check_fits_model(TOKENIZER, VOCAB)
    with pytest.raises(TokenizerLoadError, match=rf"{ordinary} token ids .* only {ordinary - 1}"):
        check_fits_model(TOKENIZER, ordinary - 1)


def test_added_tokens_beyond_the_embedding_are_refused_in_prompts_only(caplog):
    check_fits_model(TOKENIZER, VOCAB - 1)
    assert f"{VOCAB - 1} to {VOCAB - 1}" in caplog.text
    small = limits(vocab_size=VOCAB - 1)
    assert make(TextPrompt(text="fine"), small).requests
    last = TOKENIZER.convert_ids_to_tokens(VOCAB - 1)
    error = error_of(TextPrompt(text=f"a{last}"), small)
    assert (error.code, error.param) == ("invalid_token_id", "prompt")
