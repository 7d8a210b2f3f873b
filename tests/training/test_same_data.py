"""Fingerprints of tokenizer and data: what a checkpoint keeps, what is refused where a run starts from it, new_dataset."""

import re
import shutil

import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, StoredTensor
from mindspeed_ms.training import gpt_datasets, same_data
from mindspeed_ms.training.text_datasets import TextDatasets
from tests.config.samples import with_settings
from tests.preprocess.toy_tokenizer import write_tokenizer
from tests.training import tiny
from tests.training.test_gpt_datasets import files

D, T, M = "dataset_config", "training_config", "model_config"


def config(folder, **settings):
    """AllConfig; names without a section are those of dataset_config."""
    paths = {path if "." in path else f"{D}.{path}": value for path, value in settings.items()}
    size = {f"{M}.vocab_size": 320, f"{T}.output_dir": str(folder)}
    return init_configs_from_dict(with_settings({**size, **paths}))


def fingerprint(all_config):
    indexed = gpt_datasets.names_indexed_files(all_config)
    return gpt_datasets.fingerprint(all_config) if indexed else TextDatasets(all_config).fingerprint()


def refused(saved, own, all_config, resumes=True):
    """Text of the error of a start from a checkpoint with the fingerprint `saved`; None if it is accepted."""
    manifest = Manifest.from_bytes(Manifest(3, fingerprint=saved).to_bytes(), "manifest")
    try:
        same_data.check("run/iter_0000003", manifest, own, all_config, resumes)
    except CheckpointError as error:
        assert "\n" not in str(error) and "run/iter_0000003" in str(error)
        return str(error)
    return None


@pytest.fixture
def blend(tmp_path):
    x, y = files(tmp_path), files(tmp_path, "y", 20)
    return {"data_path": ["0.3", x, "0.7", y], "tokenizer_type": "NullTokenizer", "vocab_size": 300}


def test_the_same_data_under_other_names(tmp_path, blend):
    saved = fingerprint(config(tmp_path, **blend))
    for ending in ("bin", "idx"):
        shutil.copy(tmp_path / f"x.{ending}", tmp_path / f"moved.{ending}")
    data_path = ["3", str(tmp_path / "moved"), "7", blend["data_path"][3]]
    own = config(tmp_path, **{**blend, "data_path": data_path, "split": "969, 30, 1"})
    assert refused(saved, fingerprint(own), own) is None
    assert [part["weight"] for part in saved["data"]["parts"]] == [0.3, 0.7]
    assert saved["data"]["parts"][0]["documents"] == 60 and saved["data"]["parts"][0]["tokens"] == 60 * 41


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_path": "reordered"}, "data_path was 0.3 of .*x .*and 0.7 of .*y .*, is 0.7 of .*y .*and 0.3 of .*x "),
        ({"data_path": "weights"}, "data_path was 0.3 of .*, is 0.4 of "),
        ({"data_path": "unweighted"}, "data_path was 0.3 of "),
        ({"data_path": "swapped"}, "data_path was 0.3 of .*x .*, is 0.3 of .*x "),
        ({"split": "90,5,5"}, "split was 96.9,3,0.1 per cent, is 90,5,5 per cent"),
        ({f"{M}.seq_length": 4}, "seq_length was 32, is 4"),
        ({"mock_data": True, "data_path": None}, "data_path was indexed: .*, is mock: made-up"),
    ],
)
def test_other_data_is_refused_unless_it_is_meant(tmp_path, blend, change, words):
    saved = fingerprint(config(tmp_path, **blend))
    _, x, _, y = blend["data_path"]
    paths = {"reordered": ["0.7", y, "0.3", x], "weights": ["0.4", x, "0.6", y], "unweighted": [x, y]}
    if change.get("data_path") == "swapped":  # one token of the same files
        content = bytearray((tmp_path / "x.bin").read_bytes())
        content[100] ^= 1
        (tmp_path / "x.bin").write_bytes(content)
        change = {}
    elif change.get("data_path"):
        change = {"data_path": paths[change["data_path"]]}
    own = config(tmp_path, **{**blend, **change})
    text = refused(saved, fingerprint(own), own)
    assert text and re.search(words, text), text
    assert "--new-dataset" in text and "was trained on other data" in text
    assert refused(saved, fingerprint(own), own, resumes=False) is None  # only weights are taken
    own.training_config.new_dataset = True
    assert refused(saved, fingerprint(own), own) is None


def test_another_tokenizer_is_refused_for_weights_too(tmp_path, blend):
    write_tokenizer(tmp_path)
    one = {**blend, "tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": str(tmp_path)}
    saved = fingerprint(config(tmp_path, **one))
    assert saved["tokenizer"]["vocab_size"] > 256
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|im_end|>"', '"<|im_eng|>"'))  # of the same size
    config_path = tmp_path / "tokenizer_config.json"
    config_path.write_text(config_path.read_text().replace("<|im_end|>", "<|im_eng|>"))
    for other in (one, blend):
        own = config(tmp_path, **other, **{f"{T}.new_dataset": True})
        for resumes in (True, False):
            text = refused(saved, fingerprint(own), own, resumes)
            assert "was trained with another tokenizer" in text and "load_strict" in text
    own = config(tmp_path, **one, **{f"{T}.load_strict": False})
    assert refused(saved, fingerprint(own), own) is None


def test_a_text_that_grows(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of the text\n" for number in range(400)))
    own = config(tmp_path, data_path=[str(text)])
    saved = fingerprint(own)
    assert refused(saved, fingerprint(config(tmp_path, data_path=[str(text)])), own) is None
    cut = config(tmp_path, data_path=[str(text)], split="90,10,0")
    assert "split was not given, is 90,10,0" in refused(saved, fingerprint(cut), cut)
    text.write_text(text.read_text() + "and quite other words, quite other words\n" * 200)
    message = refused(saved, fingerprint(own), own)
    assert "another tokenizer" in message and "data_path names the BPE" in message
    kept = message.partition("--tokenizer-name-or-path ")[2].partition(" ")[0]
    same = config(tmp_path, data_path=[str(text)], tokenizer_name_or_path=kept)
    assert "data_path was the train part of" in refused(saved, fingerprint(same), same)
    same.training_config.new_dataset = True
    assert refused(saved, fingerprint(same), same) is None  # what the message says works


def test_before_the_start(tmp_path, blend):
    """The checkpoint of the folder is found as a training would find it."""
    from mindspeed_ms.core.dist_checkpointing import folders

    for iteration, seq_length in ((2, 4), (4, 32)):
        saved = fingerprint(config(tmp_path, **blend, **{f"{M}.seq_length": seq_length}))
        folders.publish(
            tmp_path / "run", folders.prepare(str(tmp_path / "run"), iteration), Manifest(iteration, fingerprint=saved)
        )
    folders.job_lock.release()

    def check(**training):
        own = config(tmp_path / "run", **blend, **{f"{T}.{name}": value for name, value in training.items()})
        same_data.check_before_start(own, fingerprint(own))

    check(resume_training=True)
    check()
    check(load_checkpoint=str(tmp_path / "nothing"))
    for training in ({"resume_training": True, "ckpt_step": 2}, {"resume_training": True, "load_checkpoint": "iter_0000002"}):
        if "load_checkpoint" in training:
            training["load_checkpoint"] = str(tmp_path / "run" / training["load_checkpoint"])
        with pytest.raises(CheckpointError, match="seq_length was 4, is 32"):
            check(**training)


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(same_data.logger, "warning", lambda text, *values: found.append(text % values))
    return found


@pytest.mark.parametrize(("rows", "words"), [(8, "8 rows are untrained"), (18, "2 rows are left out"), (16, None)])
def test_other_padding_is_named(tmp_path, warnings, rows, words):
    all_config = config(tmp_path, **{f"{M}.vocab_size": 16})
    manifest = Manifest(1, tensors={"words": StoredTensor((rows, 4), "float32", "vocab")})
    same_data._warn_of_padding("run", manifest, all_config)
    assert len(warnings) == (words is not None)
    assert words is None or (words in warnings[0] and f"--padded-vocab-size {rows} keeps it" in warnings[0])


class Provider:
    """Own samples that say what they are."""

    def __init__(self, name, count=20):
        self.name, self.count, self.seen = name, count, []

        self.valid = self if name == "valid" else Provider("valid", count)

    def __call__(self, _numbers):
        return self, self.valid, None

    def fingerprint(self):
        part = {"of": "data_path", "path": self.name, "documents": 1, "tokens": 1, "hash": self.name}
        return {"tokenizer": None, "data": {"kind": "text", "seq_length": 8, "split": None, "parts": [part]}}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.seen.append(index)
        return {name: value[index] for name, value in tiny.samples(self.count, 0).items()}


def continued(folder):
    """Training and validation samples that runs over one folder read: the first ones, those of new data, those after them."""
    from tests.training.test_pretrain import run_pretrain

    def run(name, iterations, **training):
        provider = Provider(name)
        settings = {"training_iters": iterations, "resume_training": True, "eval_interval": 1, "eval_iters": 1, **training}
        run_pretrain(folder, config={"training": settings}, provider=provider)
        return sorted(set(provider.seen)), sorted(set(provider.valid.seen))

    seen = [run("first", 2)]
    with pytest.raises(CheckpointError, match=r"was trained on other data: .* was first .*, is second"):
        run("second", 3)
    seen.append(run("second", 3, new_dataset=True))
    seen.append(run("second", 4))
    with pytest.raises(CheckpointError, match=r"was second .*, is first"):
        run("first", 5)
    return seen


def test_new_data_is_read_from_its_beginning_and_then_on(world, tmp_path):
    parts = [list(range(8)), list(range(4)), list(range(4, 8))]
    assert world(1)(continued, tmp_path) == [[(part, part) for part in parts]]


def test_a_checkpoint_without_fingerprint_is_named_once(tmp_path, warnings, blend):
    (tmp_path / "manifest.json").write_bytes(Manifest(1).to_bytes())
    own = config(tmp_path, **blend)
    assert same_data.check_at_start(str(tmp_path), fingerprint(own), own, True) == fingerprint(own)
    assert len(warnings) == 1 and "kept no fingerprint" in warnings[0]


def test_a_tokenizer_that_is_not_named_stays_known(tmp_path, blend):
    saved = fingerprint(config(tmp_path, **blend))
    (tmp_path / "manifest.json").write_bytes(Manifest(1, fingerprint=saved).to_bytes())
    own = config(tmp_path, **{**blend, "tokenizer_type": None})
    assert fingerprint(own)["tokenizer"] is None
    kept = same_data.check_at_start(str(tmp_path), fingerprint(own), own, True)
    assert kept["tokenizer"] == saved["tokenizer"] and kept["data"] == saved["data"]
