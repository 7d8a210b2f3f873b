"""The tokenizer gives the vocabulary's size and the end of documents where the user does not."""

import os
import subprocess
import sys

import pytest

from mindspeed_ms.config import ConfigError, init_configs_from_args, init_configs_from_dict
from mindspeed_ms.config.arguments import argument_parser
from tests.config.test_commands import ROOT, run
from tests.preprocess.toy_tokenizer import toy_tokenizer

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --make-vocab-size-divisible-by 16".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    built = toy_tokenizer(folder)
    return built, ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder)]


def read(*words):
    return init_configs_from_args(argument_parser().parse_args([*MODEL, *words]))


def test_vocabulary_and_end_of_documents(tokenizer):
    built, words = tokenizer
    plain = read(*words, "--tensor-model-parallel-size", "2")
    assert plain.model_config.vocab_size == -(-built.vocab_size // 32) * 32
    assert (plain.dataset_config.vocab_size, plain.dataset_config.eos_token_id) == (built.vocab_size, 0)
    assert read(*words, "--eod-mask-loss").dataset_config.eos_token_id == built.eod != 0
    assert read(*words, "--eod-mask-loss", "--eos-token-id", "7").dataset_config.eos_token_id == 7
    masked = read(*words, "--eod-mask-loss", "--vocab-extra-ids", "3")
    assert masked.model_config.vocab_size == -(-built.vocab_size // 16) * 16
    assert init_configs_from_dict(masked.to_dict()) == masked


def test_what_the_user_gives_goes_before_the_files(tokenizer):
    _, words = tokenizer
    assert read(*words, "--padded-vocab-size", "4096").model_config.vocab_size == 4096
    assert read(*words, "--vocab-size", "4090").model_config.vocab_size == 4096
    # nothing is asked of the files: they need not be there
    assert read(*words[:3], "/nowhere", "--padded-vocab-size", "4096").model_config.vocab_size == 4096


def test_a_tokenizer_that_cannot_be_read():
    with pytest.raises(ConfigError, match=r"command line: --tokenizer-model = '/nowhere/x.model': .*no such file"):
        read("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/nowhere/x.model")
    with pytest.raises(ConfigError, match="GPT2BPETokenizer needs --vocab-file"):
        read("--tokenizer-type", "GPT2BPETokenizer")


def test_check_reads_it_quickly_without_mindspore(tokenizer):
    built, words = tokenizer
    code, out, err, seconds = run("check", *MODEL, *words)
    assert (code, err) == (0, "") and str(built.vocab_size) in out
    assert seconds < 1.0
    program = (
        "import sys\nfrom mindspeed_ms.config.__main__ import main\n"
        f"assert main({['check', *MODEL, *words]!r}) == 0\n"
        "assert not {'mindspore', 'numba', 'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ)
