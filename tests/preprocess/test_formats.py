"""The same records give the same files, whatever they come in and however many processes there are."""

import bz2
import gzip
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from mindspeed_ms.tasks.preprocess import readers
from mindspeed_ms.tasks.preprocess.input_files import expand_inputs
from tests.preprocess.runs import all_bytes, pair_bytes, run, stored, texts, write_jsonl

GOLDEN = os.path.join(os.environ.get("MINDSPEED_MS_GOLDEN", ""), "data")
TEXT = "out/set_text_document"


def _write(folder, kind, records):
    path = folder / f"data.{kind}"
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    table = pyarrow.Table.from_pylist(records)
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "crlf.jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    elif kind == "jsonl.gz":
        half = lines.index(b"\n") + 5  # two members, as `cat a.gz b.gz` makes them
        path.write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    elif kind == "jsonl.zst":
        path.write_bytes(pyarrow.Codec("zstd").compress(lines, asbytes=True))
    elif kind == "json":
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    elif kind == "lines.json":
        path.write_bytes(lines)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    return path


@pytest.mark.parametrize("kind", ["crlf.jsonl", "jsonl.gz", "jsonl.zst", "json", "lines.json", "parquet", "arrow", "csv"])
def test_formats_give_equal_files(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(readers, "BATCH_BYTES", 1500)  # many batches
    records = [{"text": text, "id": number} for number, text in enumerate(texts(150))]
    for name in ("jsonl", kind):
        path = _write(tmp_path, name, records)
        code, printed = run(capsys, tmp_path, "--input", path, "--append-eod", prefix=f"{name}/set")
        assert code == 0 and "150 samples" in printed
    assert pair_bytes(tmp_path, "jsonl/set_text_document") == pair_bytes(tmp_path, f"{kind}/set_text_document")


def test_lines_of_txt_are_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei\u2028drei\n\nvier".encode())
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in ("eins", "zwei\u2028drei", "vier")])
    code, printed = run(capsys, tmp_path, "--input", tmp_path / "a.txt", "--append-eod", prefix="a/set")
    assert code == 0 and "1 empty document (first: " in printed and "a.txt, line 3)" in printed
    run(capsys, tmp_path, "--input", tmp_path / "b.jsonl", "--append-eod", prefix="b/set")
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")


def test_nested_columns_of_parquet(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 2000)
    records = [
        {"messages": [{"role": "user", "content": f"how {n}"}, {"role": "assistant", "content": "fine" * (n % 5 + 1)}]}
        for n in range(80)
    ]
    for n, fields in enumerate(({"x": 1}, {"y": [{"z": 2}, {"w": 3}]})):  # arrow gives both calls both fields
        records[n]["messages"].insert(
            1, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": fields}}]}
        )
        records[n]["messages"].insert(2, {"role": "tool", "content": "4"})
    records[2]["messages"][-1]["content"] = None  # an empty answer, not a missing key
    for kind in ("jsonl", "parquet"):
        path = _write(tmp_path, kind, records)
        code, printed = run(
            capsys,
            tmp_path,
            "--input",
            path,
            "--handler-name",
            "OpenAIInstructionHandler",
            "--prompt-type",
            "qwen",
            prefix=f"{kind}/set",
        )
        assert code == 0, printed
    assert all_bytes(tmp_path / "jsonl") == all_bytes(tmp_path / "parquet") and len(all_bytes(tmp_path / "jsonl")) == 6


@pytest.mark.parametrize("nested", ["list", "struct", "map"])
def test_dictionary_types_in_nested_columns_of_several_row_groups(tmp_path, capsys, nested):
    """Arrow joins no two dictionaries inside a nested column, so no batch may reach over two row groups."""
    names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    message = pyarrow.struct([("role", names), ("content", pyarrow.string())])
    talks = [[{"role": "user", "content": f"how {n}"}, {"role": "assistant", "content": "fine"}] for n in range(20)]
    columns = {"messages": pyarrow.array(talks, pyarrow.list_(message))}
    if nested == "struct":
        columns["last"] = pyarrow.array([talk[-1] for talk in talks], message)
    elif nested == "map":
        columns["tools"] = pyarrow.array([None] * 20, pyarrow.map_(pyarrow.string(), names))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "data.parquet", row_group_size=7)
    write_jsonl(tmp_path / "data.jsonl", [{"messages": talk} for talk in talks])
    for kind in ("jsonl", "parquet"):
        words = ["--handler-name", "OpenAIInstructionHandler", "--prompt-type", "qwen"]
        code, printed = run(capsys, tmp_path, "--input", tmp_path / f"data.{kind}", *words, prefix=f"{kind}/set")
        assert code == 0, printed
    assert all_bytes(tmp_path / "jsonl") == all_bytes(tmp_path / "parquet")


@pytest.mark.parametrize("ending, compress", [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_zeros_behind_compressed_data(tmp_path, capsys, ending, compress):
    """Blocks of a tape or of a file system fill the end with zeros; other members may follow, anything else is damage."""
    lines = [b'{"text": "how are you?"}\n' * 999, b'{"text": "fine"}\n']
    path = tmp_path / f"data.jsonl.{ending}"
    path.write_bytes(compress(lines[0]) + bytes(700_000) + compress(lines[1]) + bytes(512))
    code, printed = run(capsys, tmp_path, "--input", path)
    assert code == 0 and "1,000 samples" in printed, printed
    for number, tail in enumerate((b"and more", compress(lines[1])[:-9])):
        path.write_bytes(compress(lines[0]) + bytes(512) + tail)
        code, printed = run(capsys, tmp_path, "--input", path, prefix=f"damaged{number}/set")
        assert code == 1 and f"data.jsonl.{ending} cannot be read as jsonl" in printed and "Traceback" not in printed


@pytest.mark.parametrize("compression", [bytes, gzip.compress])
def test_csv_cells_with_everything(tmp_path, capsys, compression):
    """NUL behind a long row, line ends and quotes in cells, U+2028, a byte order mark, CRLF, a wrong row that is left out."""
    if sys.version_info < (3, 11):
        pytest.skip("Python before 3.11 refuses NUL in csv, with file and line")
    long = "how are you? " * 90_000
    cells = ["fine", long, "\0are", "\0", "a\r\n\nb\rc", 'say ""you""', "x\u2028y"]
    rows = "".join(f'"{cell}",{number}\r\n' for number, cell in enumerate(cells))
    path = tmp_path / ("data.csv" if compression is bytes else "data.csv.gz")
    path.write_bytes(compression(f"text,id\r\n{rows}1,2,3\r\n\r\n".encode("utf-8-sig")))
    lines = write_jsonl(tmp_path / "data.jsonl", [{"text": cell.replace('""', '"')} for cell in cells])
    run(capsys, tmp_path, "--input", lines, prefix="jsonl/set")
    code, printed = run(capsys, tmp_path, "--input", path, "--on-invalid", "skip", prefix="csv/set")
    assert code == 0 and f"1 another number of cells (first: {path}, line 12)" in printed  # CR ends a line too
    assert all_bytes(tmp_path / "csv") == all_bytes(tmp_path / "jsonl")


def test_processes_and_parts_do_not_change_the_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 4000)
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": text, "title": text[:9]} for text in texts(200)])
    for name, words in {"one": [], "four": ["--workers", "4"], "parts": ["--n-subs", "3"]}.items():
        code, printed = run(capsys, tmp_path, "--input", path, "--json-keys", "text", "title", *words, prefix=f"{name}/set")
        assert code == 0, printed
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "four") == all_bytes(tmp_path / "parts")
    assert len(stored(tmp_path, "one/set_title_document")) == 200


def test_folder_pattern_and_order(tmp_path, capsys):
    data = tmp_path / "data"
    (data / "b").mkdir(parents=True)
    write_jsonl(data / "b" / "2.jsonl", [{"text": "two"}])
    write_jsonl(data / "1.jsonl", [{"text": "one"}])
    (data / "README.md").write_text("about")
    (data / "3.jsonl").write_bytes(b"")
    code, printed = run(capsys, tmp_path, "--input", data, prefix="folder/set")
    assert code == 0 and "README.md" in printed and "3.jsonl" in printed
    run(capsys, tmp_path, "--input", data / "*.jsonl", data / "b" / "*.jsonl", prefix="pattern/set")
    assert all_bytes(tmp_path / "folder") == all_bytes(tmp_path / "pattern")
    assert [os.path.basename(file.path) for file in expand_inputs([str(data)])[0]] == ["1.jsonl", "3.jsonl", "2.jsonl"]


def test_max_samples(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 900)
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in texts(50)])
    code, printed = run(capsys, tmp_path, "--input", path, "--max-samples", "33")
    assert code == 0 and "records read      33" in printed and len(stored(tmp_path, TEXT)) == 33


@pytest.mark.skipif(not os.path.isdir(GOLDEN), reason="needs MINDSPEED_MS_GOLDEN")
@pytest.mark.parametrize(
    "corpus, recorded, words",
    [
        ("corpus_a", "a_gpt2bpe", ["--append-eod"]),
        ("corpus_a", "a_gpt2bpe_noeod", []),
        ("corpus_b", "b_gpt2bpe", ["--append-eod"]),
        (
            "corpus_a",
            "a_sp",
            ["--append-eod", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{GOLDEN}/sp.model"],
        ),
    ],
)
def test_files_equal_those_of_megatron(tmp_path, capsys, corpus, recorded, words):
    tokenizer = (
        []
        if "--tokenizer-type" in words
        else [
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--vocab-file",
            f"{GOLDEN}/gpt2bpe/vocab.json",
            "--merge-file",
            f"{GOLDEN}/gpt2bpe/merges.txt",
        ]
    )
    code, printed = run(capsys, tmp_path, "--input", f"{GOLDEN}/{corpus}.jsonl", *words, tokenizer=tokenizer)
    assert code == 0, printed
    for ending in ("bin", "idx"):
        with open(f"{GOLDEN}/{recorded}_text_document.{ending}", "rb") as file:
            assert (tmp_path / f"{TEXT}.{ending}").read_bytes() == file.read(), ending


def test_entry_point_needs_no_mindspore(tmp_path):
    script = (
        "import sys; sys.modules['mindspore'] = None; sys.argv = ['preprocess_data.py', '--help']\n"
        "import runpy; runpy.run_path('preprocess_data.py', run_name='__main__')"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(["python", "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--neat-pack" in done.stdout, done.stderr
