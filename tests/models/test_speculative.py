"""`--speculative-config`: parsing, resolution against a target, and identities of the pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.identity import compatibility, token_map_hash, tokenizer_hash
from dspark.models.config import DecoderConfig, ModelConfigError, from_hf
from dspark.models.drafter import DrafterCheckpoint
from dspark.models.source import GgufSource, open_target
from dspark.proof.tiny_pair import byte_tokenizer, hf_config, write_drafter, write_target
from dspark.speculative import SHIPPED_DRAFTER, SpeculativeConfig, parse, resolve
from tests.conftest import TinyPair

TARGET = from_hf(hf_config())


def test_what_vllm_users_write() -> None:
    config = parse('{"method": "dspark", "model": "/some/where", "num_speculative_tokens": 5}')
    assert config == SpeculativeConfig(method="dspark", model="/some/where", num_speculative_tokens=5)
    assert config.enabled
    assert (config.draft_temperature, config.draft_support) == (None, None)


def test_all_fields() -> None:
    config = parse('{"method": "dspark", "draft_temperature": 0.7, "draft_support": 256}')
    assert (config.draft_temperature, config.draft_support, config.num_speculative_tokens) == (0.7, 256, None)
    assert config.enabled


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the JSON"),
        ("{", "the JSON"),
        ("5", "the JSON"),
        ("{}", "method: Field required"),
        ('{"method": "eagle"}', "method: .*'dspark'"),
        ('{"method": "dspark", "num_spec_tokens": 5}', "num_spec_tokens: Extra inputs"),
        ('{"method": "dspark", "num_speculative_tokens": -1}', "num_speculative_tokens"),
        ('{"method": "dspark", "num_speculative_tokens": 33}', "num_speculative_tokens"),
        ('{"method": "dspark", "num_speculative_tokens": 2.5}', "num_speculative_tokens"),
        ('{"method": "dspark", "model": ""}', "model"),
        ('{"method": "dspark", "draft_temperature": -0.1}', "draft_temperature"),
        ('{"method": "dspark", "draft_support": 33}', "draft_support"),
    ],
)
def test_refusals_name_the_field(text: str, named: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"^--speculative-config: {named}"):
        parse(text)


def config_for(pair: TinyPair, **fields: object) -> SpeculativeConfig:
    return parse(json.dumps({"method": "dspark", "model": str(pair.drafter), **fields}))


def test_the_default_depth_is_the_block(tiny_pair: TinyPair) -> None:
    resolved = resolve(config_for(tiny_pair), str(tiny_pair.target), TARGET)
    assert resolved is not None
    assert resolved.depth == resolved.config.block_size == 4
    assert resolved.directory == tiny_pair.drafter
    assert (resolved.draft_temperature, resolved.draft_support) == (None, None)
    assert [resolved.support(t) for t in (0, 0.3, 0.84, 0.85, 1.0, 2.0)] == [1, 32, 32, 256, 256, 256]
    assert resolved.max_support == 256


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_depth_up_to_the_block(tiny_pair: TinyPair, depth: int) -> None:
    speculative = config_for(tiny_pair, num_speculative_tokens=depth, draft_temperature=0.5, draft_support=16)
    resolved = resolve(speculative, str(tiny_pair.target), TARGET)
    assert resolved is not None
    assert (resolved.depth, resolved.draft_temperature, resolved.draft_support) == (depth, 0.5, 16)
    assert [resolved.support(t) for t in (0, 0.3, 1.0)] == [1, 16, 16]
    assert resolved.max_support == 16


def test_a_depth_past_the_block_is_refused(tiny_pair: TinyPair) -> None:
    with pytest.raises(ModelConfigError, match="num_speculative_tokens 5 is larger than the drafter's block_size 4"):
        resolve(config_for(tiny_pair, num_speculative_tokens=5), str(tiny_pair.target), TARGET)


def test_depth_zero_reads_nothing_of_the_drafter(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    off = parse(json.dumps({"method": "dspark", "model": str(missing), "num_speculative_tokens": 0}))
    assert not off.enabled
    assert resolve(off, "any target", TARGET) is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    broken = off.model_copy(update={"model": str(tmp_path / "broken")})
    assert resolve(broken, "any target", TARGET) is None
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        resolve(off.model_copy(update={"num_speculative_tokens": 1}), "any target", TARGET)


def test_a_target_of_ones_own_needs_a_drafter_of_ones_own() -> None:
    with pytest.raises(ModelConfigError, match=r"model: no drafter ships for this target.*dspark train"):
        resolve(parse('{"method": "dspark"}'), "/models/mine", TARGET)


def test_the_embedded_target_has_a_drafter(embedded: GgufSource) -> None:
    resolved = resolve(parse('{"method": "dspark"}'), "embedded", embedded.config)
    assert resolved is not None
    assert resolved.directory == SHIPPED_DRAFTER
    assert resolved.depth == resolved.config.block_size
    checkpoint = DrafterCheckpoint(SHIPPED_DRAFTER)
    assert checkpoint.tensors["lm_head.weight"].shape == (resolved.config.draft_vocab_size, 576)


def test_a_drafter_of_another_target_is_refused(tiny_pair: TinyPair) -> None:
    other: DecoderConfig = replace(TARGET, vocab_size=500)
    with pytest.raises(ModelConfigError, match="vocab_size is 288, the target's is 500"):
        resolve(config_for(tiny_pair), "other", other)


def test_both_roles_compute_the_same_identity(tiny_pair: TinyPair) -> None:
    def one() -> object:
        source = open_target(str(tiny_pair.target))
        checkpoint = DrafterCheckpoint(tiny_pair.drafter)
        return compatibility(source, source.tokenizer(), tiny_pair.drafter, checkpoint.config)

    assert one() == one()


def test_identity_separates_what_must_not_be_mixed(tiny_pair: TinyPair, tmp_path: Path) -> None:
    source = open_target(str(tiny_pair.target))
    config = DrafterCheckpoint(tiny_pair.drafter).config
    mine = compatibility(source, source.tokenizer(), tiny_pair.drafter, config)
    target = open_target(str(write_target(tmp_path / "target", seed=4)))
    other_target = compatibility(target, target.tokenizer(), tiny_pair.drafter, config)
    assert other_target.target_identity != mine.target_identity
    assert other_target.tokenizer_hash == mine.tokenizer_hash
    drafter = write_drafter(tmp_path / "drafter", tiny_pair.target, seed=9)
    other_drafter = compatibility(source, source.tokenizer(), drafter, config)
    assert other_drafter.draft_identity != mine.draft_identity
    assert other_drafter.token_map_hash == mine.token_map_hash
    assert mine.tap_layers == (0, 2)
    assert mine.tap_width == 64


def test_the_token_map_hash_is_of_target_ids(tiny_pair: TinyPair, tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint(tiny_pair.drafter)
    before = token_map_hash(tiny_pair.drafter, checkpoint.config)
    tensors = load_file(str(tiny_pair.drafter / "model.safetensors"))
    tensors["d2t"][-1] += 1
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert token_map_hash(tmp_path, checkpoint.config) != before
    del tensors["d2t"]
    save_file(tensors, str(tmp_path / "model.safetensors"))
    identity = token_map_hash(tmp_path, checkpoint.config)
    save_file(tensors | {"d2t": torch.zeros(192, dtype=torch.int64)}, str(tmp_path / "model.safetensors"))
    assert token_map_hash(tmp_path, checkpoint.config) == identity


def test_the_tokenizer_hash_is_of_the_pieces(tiny_pair: TinyPair, tmp_path: Path) -> None:
    tokenizer = open_target(str(tiny_pair.target)).tokenizer()
    other = write_target(tmp_path)
    assert tokenizer_hash(open_target(str(other)).tokenizer()) == tokenizer_hash(tokenizer)
    byte_tokenizer(300).save(str(other / "tokenizer.json"))
    assert tokenizer_hash(open_target(str(other)).tokenizer()) != tokenizer_hash(tokenizer)


def test_a_drafter_without_weights_has_no_identity(tiny_pair: TinyPair, tmp_path: Path) -> None:
    source = open_target(str(tiny_pair.target))
    config = DrafterCheckpoint(tiny_pair.drafter).config
    with pytest.raises(ModelConfigError, match=r"has no model\.safetensors"):
        compatibility(source, source.tokenizer(), tmp_path, config)
