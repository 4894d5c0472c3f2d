"""Text to target token ids and back, and the chat template.

Built over the `tokenizers` library from GGUF metadata or from a Hugging Face directory. The chat template runs in
jinja's immutable sandbox: a template is foreign code. Byte-exact decoding (`decode_bytes`) is what streaming needs,
because one character can span tokens and one speculative step commits several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark.models.config import ModelConfigError, read_json
from dspark.models.gguf_source import GgufTokenizer

_CONTROL_TYPE = 3  # gguf token type of control tokens
_USER_DEFINED_TYPE = 4
# How a GGUF's text is split before the merges: GPT-2's expression, with or without single digits in front of it.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
_PROBE = "Hello w\u00f6rld,\n  2024 \u4f60\u597d"


class ChatTemplateError(ValueError):
    """The model's chat template refused the messages; the text is the template's own."""


def _byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: printable stand-in character -> byte (GPT-2's mapping)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    mapping = {chr(b): b for b in printable}
    spare = (b for b in range(256) if b not in printable)
    mapping.update({chr(256 + n): b for n, b in enumerate(spare)})
    return mapping


_BYTES = _byte_alphabet()


class ChatTokenizer:
    """A byte-level BPE tokenizer with a chat template. Immutable; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        bos_token: str,
        eos_token: str,
        eos_ids: Sequence[int],
        special_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = tokenizer.get_vocab_size()
        self.eos_ids = tuple(eos_ids)
        self._pieces = [self._piece(i) for i in range(self.vocab_size)]
        self._context = {"bos_token": bos_token, "eos_token": eos_token}
        self.has_chat_template = bool(template)
        self._template = _compile(template) if template else None

    def _piece(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None or token in self._special_ids:
            return b""
        if token not in self._added and all(c in _BYTES for c in text):
            return bytes(_BYTES[c] for c in text)
        return str(text).encode()

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The raw bytes of `ids`; special tokens give none, nor do the ids that pad the model's vocabulary."""
        return b"".join(self._pieces[i] for i in ids if i < self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render messages as the model was trained to see them. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._context, **kwargs
            )
        except (TemplateError, TypeError) as error:  # TypeError: a field that is not the text that the template adds to
            raise ChatTemplateError(str(error)) from None


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> str:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now(UTC).strftime(pattern)
    return environment


def _compile(template: str) -> Template:
    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise ModelConfigError(f"the model's chat template is not valid: {error}") from None


def from_gguf(meta: GgufTokenizer) -> ChatTokenizer:
    """Byte-level BPE from GGUF metadata. `smollm` splits numbers into digits before merging, as llama.cpp does.

    Raises ModelConfigError for a split that is not implemented: guessed, it would give other tokens without a sign.
    """
    if meta.pre not in _SINGLE_DIGITS:
        raise ModelConfigError(
            f"tokenizer.ggml.pre {meta.pre!r} is not supported (only {', '.join(_SINGLE_DIGITS)}): "
            "use the model's Hugging Face directory"
        )
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in meta.merges)]
    vocabulary = {token: i for i, token in enumerate(meta.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _SINGLE_DIGITS[meta.pre] else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [i for i, kind in enumerate(meta.token_types) if kind in (_CONTROL_TYPE, _USER_DEFINED_TYPE)]
    tokenizer.add_special_tokens([meta.tokens[i] for i in special])
    return ChatTokenizer(
        tokenizer,
        meta.chat_template,
        bos_token=meta.tokens[meta.bos_id],
        eos_token=meta.tokens[meta.eos_id],
        eos_ids=(meta.eos_id,),
        special_ids=frozenset(special),
    )


def from_directory(path: Path, eos_ids: Sequence[int]) -> ChatTokenizer:
    """A Hugging Face directory: ``tokenizer.json``, and ``tokenizer_config.json`` for the chat template."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelConfigError(f"{path} has no tokenizer.json: convert the tokenizer to the fast format first")
    tokenizer = Tokenizer.from_file(str(file))
    config_file = path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    template = config.get("chat_template") or ""
    standalone = path / "chat_template.jinja"
    if not template and standalone.is_file():
        template = standalone.read_text("utf-8")
    if not isinstance(template, str):
        raise ModelConfigError("tokenizer_config.json: chat_template is a list: keep the default template only")
    special = frozenset(i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special)
    chat = ChatTokenizer(
        tokenizer,
        template,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        eos_ids=eos_ids,
        special_ids=special,
    )
    if chat.decode(chat.encode(_PROBE)) != _PROBE:
        raise ModelConfigError(f"{file} does not give text back byte for byte: only byte-level BPE is supported")
    return chat


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("content", ""))
    return str(value or "")
