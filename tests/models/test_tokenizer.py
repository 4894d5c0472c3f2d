"""Text to ids and back, byte for byte; special tokens; chat templates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dspark.models.config import ModelConfigError
from dspark.models.gguf_source import GgufTokenizer
from dspark.models.source import GgufSource, open_target
from dspark.models.tokenizer import ChatTemplateError, ChatTokenizer, from_directory, from_gguf
from dspark.proof.tiny_pair import byte_tokenizer, write_target

STRINGS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, trailing tab\t",
    "line\nline\r\n\r\n\n  indented\n",
    "def f(x: int) -> str:\n    return f\"{x:>8}\"  # it's\n",
    "2024 12,345.67 0x1F -3.14e-10",
    "\u00b2\u00bd \u0664\u0665\u0666",  # superscript, fraction, Arabic digits
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\u0000\u0007\u001b[0m",
    "it's we'll I'd they've DON'T",
    "a" * 300,
    "\ufeffBOM \u00a0nbsp \u2028 separator",
]


@pytest.mark.parametrize("text", STRINGS, ids=range(len(STRINGS)))
def test_text_comes_back_byte_for_byte(embedded_tokenizer: ChatTokenizer, text: str) -> None:
    ids = embedded_tokenizer.encode(text)
    assert embedded_tokenizer.decode_bytes(ids) == text.encode()
    assert embedded_tokenizer.decode(ids) == text


# SmolLM2's vocabulary has no token for these bytes: control characters, and the lead bytes of unassigned planes.
LACKING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40).filter(lambda t: not LACKING & set(t.encode()) and "<" not in t))
def test_any_text_comes_back(embedded_tokenizer: ChatTokenizer, text: str) -> None:
    assert embedded_tokenizer.decode_bytes(embedded_tokenizer.encode(text)) == text.encode()


def test_bytes_that_the_vocabulary_lacks_are_dropped(embedded_tokenizer: ChatTokenizer) -> None:
    valid = [*range(0x80), *range(0xC2, 0xF5)]
    samples = {b: (bytes([b]) if b < 0x80 else first_character(b)).decode() for b in valid}
    lost = {b for b, text in samples.items() if embedded_tokenizer.decode(embedded_tokenizer.encode(text)) != text}
    assert lost == LACKING


def first_character(lead: int) -> bytes:
    """The first UTF-8 character of a lead byte."""
    second = {0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80)
    return bytes([lead, second, 0x80, 0x80])[: 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4]


def test_digits_are_single_tokens(embedded_tokenizer: ChatTokenizer) -> None:
    pieces = [embedded_tokenizer.decode_bytes([i]) for i in embedded_tokenizer.encode("2024 12,345.67")]
    assert pieces == [b"2", b"0", b"2", b"4", b" ", b"1", b"2", b",", b"3", b"4", b"5", b".", b"6", b"7"]


def test_words_are_merged(embedded_tokenizer: ChatTokenizer) -> None:
    pieces = [embedded_tokenizer.decode_bytes([i]) for i in embedded_tokenizer.encode("The quick brown fox")]
    assert pieces == [b"The", b" quick", b" brown", b" fox"]


def test_a_character_can_span_tokens(embedded_tokenizer: ChatTokenizer) -> None:
    ids = embedded_tokenizer.encode("\U0001f9ff")
    assert len(ids) > 1
    assert "\ufffd" in embedded_tokenizer.decode(ids[:-1])
    assert embedded_tokenizer.decode(ids) == "\U0001f9ff"


def test_special_tokens_are_one_id_and_no_text(embedded_tokenizer: ChatTokenizer) -> None:
    ids = embedded_tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert embedded_tokenizer.decode_bytes(ids) == b"user\nhi"
    assert embedded_tokenizer.decode_bytes(list(range(17))) == b""
    assert embedded_tokenizer.decode_bytes([17]) != b""
    assert embedded_tokenizer.eos_ids == (2,)
    assert embedded_tokenizer.vocab_size == 49152


def test_ids_past_the_vocabulary_have_no_text(embedded_tokenizer: ChatTokenizer) -> None:
    """Models pad their vocabulary: a padding id may be sampled, and must not end the engine."""
    ids = embedded_tokenizer.encode("ok")
    assert embedded_tokenizer.decode_bytes([*ids, 49152, 60000]) == b"ok"


def test_the_embedded_chat_template(embedded_tokenizer: ChatTokenizer) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = [{"role": "user", "content": "Hi"}]
    plain = system + "<|im_start|>user\nHi<|im_end|>\n"
    assert embedded_tokenizer.apply_chat_template(user) == plain + "<|im_start|>assistant\n"
    assert embedded_tokenizer.apply_chat_template(user, add_generation_prompt=False) == plain
    own = [{"role": "system", "content": "Be brief."}, *user]
    assert embedded_tokenizer.apply_chat_template(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def small_gguf(**changes: object) -> GgufTokenizer:
    """Bytes, one merge and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "<|end|>", "<|user|>"]
    kinds = [1] * 257 + [3, 3]
    return replace(GgufTokenizer(tokens, ["h e"], kinds, "smollm", "", 258, 257), **changes)  # type: ignore[arg-type]


def test_gguf_merges_and_control_tokens() -> None:
    tokenizer = from_gguf(small_gguf())
    ids = tokenizer.encode("he<|end|>")
    assert ids == [256, 257]
    assert tokenizer.decode_bytes(ids) == b"he"


def test_gguf_split_without_digits() -> None:
    merged = small_gguf(tokens=[*small_gguf().tokens, "12"], merges=["h e", "1 2"], token_types=[1] * 257 + [3, 3, 1])
    assert len(from_gguf(merged).encode("12")) == 2
    assert len(from_gguf(replace(merged, pre="gpt-2")).encode("12")) == 1


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2"])
def test_gguf_with_another_split_is_refused(pre: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"tokenizer\.ggml\.pre '{pre}'.*Hugging Face directory"):
        from_gguf(small_gguf(pre=pre))


def test_no_template_is_a_template_error() -> None:
    tokenizer = from_gguf(small_gguf())
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content + '' }}{% endfor %}"
)


def test_a_template_refuses_roles() -> None:
    tokenizer = from_gguf(small_gguf(chat_template=ALTERNATING))
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(good) == "[user]a[assistant]b"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.apply_chat_template(good[::-1])


@pytest.mark.parametrize("content", [None, [], 5])
def test_a_message_that_the_template_cannot_render(content: object) -> None:
    with pytest.raises(ChatTemplateError, match=r"concatenate|unsupported operand"):
        from_gguf(small_gguf(chat_template=ALTERNATING)).apply_chat_template([{"role": "user", "content": content}])


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_are_sandboxed(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        from_gguf(small_gguf(chat_template=template)).apply_chat_template([])


def test_template_context_and_loop_controls() -> None:
    loop = "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}"
    tokenizer = from_gguf(small_gguf(chat_template="{{ bos_token }}" + loop + "{{ mood }}"))
    assert tokenizer.apply_chat_template([{}, {}, {}], mood="calm") == "<|user|>xcalm"


def test_a_template_with_a_syntax_error_is_a_config_error() -> None:
    with pytest.raises(ModelConfigError, match="chat template is not valid"):
        from_gguf(small_gguf(chat_template="{% for %}"))


def test_from_directory(tmp_path: Path) -> None:
    tokenizer = open_target(str(write_target(tmp_path))).tokenizer()
    assert tokenizer.eos_ids == (257,)
    ids = tokenizer.encode("<|user|>h\u00e9<|end|>")
    assert len(ids) == 5
    assert tokenizer.decode_bytes(ids) == "h\u00e9".encode()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert prompt == "<|user|>x<|end|><|assistant|>"


def test_from_directory_reads_a_template_file_and_token_objects(tmp_path: Path) -> None:
    byte_tokenizer(288).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert from_directory(tmp_path, (1,)).apply_chat_template([]) == "<s>|"


def test_from_directory_without_a_template(tmp_path: Path) -> None:
    byte_tokenizer(288).save(str(tmp_path / "tokenizer.json"))
    assert not from_directory(tmp_path, (1,)).has_chat_template


def test_added_text_tokens_are_text_and_not_stand_ins(tmp_path: Path) -> None:
    """An added token that is no special one is plain text, also where its characters are in the byte alphabet."""
    tokenizer = byte_tokenizer(288)
    tokenizer.add_tokens([AddedToken("<\u00e9tude>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = from_directory(tmp_path, (1,))
    ids = loaded.encode("a<\u00e9tude>b")
    assert len(ids) == 3
    assert loaded.decode_bytes(ids) == "a<\u00e9tude>b".encode()


def sentencepiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581": 0, "H": 1, "i": 2, "<unk>": 3}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def test_directories_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"no tokenizer\.json.*fast format"):
        from_directory(tmp_path, ())
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelConfigError, match="byte-level BPE"):
        from_directory(tmp_path, ())
    byte_tokenizer(288).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(ModelConfigError, match="chat_template is a list"):
        from_directory(tmp_path, ())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"tokenizer_config\.json cannot be read as JSON"):
        from_directory(tmp_path, ())


def test_the_gguf_metadata_is_read_whole(embedded: GgufSource) -> None:
    meta = embedded._file.tokenizer()
    assert (len(meta.tokens), len(meta.merges), meta.pre) == (49152, 48900, "smollm")
    assert (meta.bos_id, meta.eos_id) == (1, 2)
