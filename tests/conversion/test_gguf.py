"""GGUF files to Hugging Face folders: names, rows of query and key, metadata, tokenizer. Needs the extra `[gguf]`."""

import json

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.models.hugging_face.gguf_file import GgufModel
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from tests.conversion.test_hugging_face import convert, read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, tensors_of

gguf = pytest.importorskip("gguf", reason="needs the [gguf] extra")
CONFIG = {**CONFIGS["llama_linear"], "rope_scaling": None, "rope_theta": 5e5}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<|endoftext|>", "a", "b", "1", "2", "ab", "Ġ", "Ġa"]


def write_file(path, tensors, without=(), split="smollm", tokens=TOKENS, more=lambda writer: None):
    """A GGUF file as llama.cpp's converter makes it: rows of query and key of each head in pairs. `more` adds metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    more(writer)
    writer.add_token_list(tokens + [f"x{number}" for number in range(64 - len(tokens))])
    writer.add_token_types([3] + [1] * 63)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    for name, array in tensors.items():
        if name in without:
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = 4 if "q_proj" in name else 2
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        start, _, end = name.partition(".layers.")[2].partition(".")
        stem = (end or name).removesuffix(".weight")
        writer.add_tensor(f"blk.{start}.{NAMES[stem]}.weight" if end else f"{NAMES[stem]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_becomes_a_folder(tmp_path):
    from tokenizers import Tokenizer

    tensors = tensors_of(CONFIG)
    write_file(tmp_path / "tiny.gguf", tensors)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "hf", "--save-model-type", "hf")
    found = read_tensors(folder)
    assert {name: data for name, (_, _, data) in found.items()} == {name: array.tobytes() for name, array in tensors.items()}
    config = read_json(folder)
    assert config["rms_norm_eps"] == 1e-6 and config["rope_theta"] == 5e5 and config["tie_word_embeddings"] is False
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("ab a12<|endoftext|>").ids == [5, 7, 3, 4, 0]
    assert read_json(folder, "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    with CheckpointReader(folder, read_manifest(folder)) as reader:
        assert json.dumps(reader.manifest.args["model_config"]["num_query_groups"]) == "2"


def test_a_missing_tensor_is_named(tmp_path, capsys):
    write_file(tmp_path / "tiny.gguf", tensors_of(CONFIG), without=("model.layers.2.mlp.up_proj.weight",))
    convert(tmp_path / "tiny.gguf", tmp_path / "hf", "--save-model-type", "hf", code=2)
    assert "missing: blk.2.ffn_up.weight" in capsys.readouterr().err
    convert(tmp_path / "tiny.gguf", tmp_path / "native", "--save-model-type", "native", code=2)
    assert "converted to a Hugging Face folder first" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"more": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "has rope.scaling.type 'yarn'"),
        ({"tokens": ["a", "a"]}, "has 64 tokens, some of them twice"),
    ],
)
def test_metadata_that_is_refused(tmp_path, capsys, changes, text):
    write_file(tmp_path / "tiny.gguf", tensors_of(CONFIG), **changes)
    convert(tmp_path / "tiny.gguf", tmp_path / "hf", "--save-model-type", "hf", code=2)
    assert text in capsys.readouterr().err


def test_tensors_of_another_shape_are_refused(tmp_path, capsys):
    tensors = tensors_of(CONFIG)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].copy()
    write_file(tmp_path / "tiny.gguf", tensors)
    convert(tmp_path / "tiny.gguf", tmp_path / "hf", "--save-model-type", "hf", code=2)
    assert "tensor output_norm.weight has the shape [16], expected [32]" in capsys.readouterr().err


def test_tied_embeddings_and_an_unknown_tokenizer(tmp_path, capsys):
    write_file(tmp_path / "tiny.gguf", tensors_of(CONFIG), without=("lm_head.weight",), split="viking")
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "hf", "--save-model-type", "hf")
    assert "the tokenizer was left out" in capsys.readouterr().out
    assert read_json(folder)["tie_word_embeddings"] is True and not (tmp_path / "hf" / "tokenizer.json").exists()


def test_damaged_files_are_refused(tmp_path):
    """Cut off or with changed bytes anywhere in its header: an error that names the file, or values that are still read."""
    path = str(tmp_path / "model.gguf")
    write_file(path, tensors_of(CONFIG))
    with open(path, "rb") as file:
        content = file.read()
    broken, random, refused = str(tmp_path / "broken.gguf"), np.random.RandomState(0), 0
    for number in range(60):
        damaged = bytearray(content[: len(content) - 1000 * (number + 1)] if number < 8 else content)
        if number >= 8:
            damaged[random.randint(0, 3000)] ^= 1 << random.randint(0, 8)
        with open(broken, "wb") as file:
            file.write(damaged)
        try:
            GgufModel(broken)
        except CheckpointError as error:
            refused += 1
            assert broken in str(error)
    assert refused > 20
