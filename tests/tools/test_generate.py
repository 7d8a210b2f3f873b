"""tools.generate and inference.py: answers of a tiny model, chats, ranks, mistakes that are found before a model is loaded."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder
from mindspeed_ms.tools.generate import command, mindspeed_llm
from mindspeed_ms.tools.generate.__main__ import RUNNER
from mindspeed_ms.tools.model_command.job import plan
from mindspeed_ms.tools.model_command.main import main
from tests.conversion.tiny_models import CONFIGS, write_folder, write_json
from tests.preprocess.toy_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {**CONFIGS["llama"], "mlp_bias": False, "vocab_size": 900, "max_position_embeddings": 96, "eos_token_id": 1}
SAMPLED = ["--temperature", "1.5", "--seed", "3", "--n", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, CONFIG)
    write_tokenizer(folder, chat_template=TEMPLATE)
    return str(folder)


def shown(arguments, llm=False, answers=()):
    """(status, standard output, standard error) of a command line on this rank of a world; `answers` are typed in a chat."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO("".join(f"{line}\n" for line in answers))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments, mindspeed_llm.job_of if llm else command.job_of, "X", __file__, RUNNER)
    finally:
        sys.stdin = before
    return status, out.getvalue(), err.getvalue()


def several(lines):
    """`shown` of several command lines."""
    return [shown(*line) for line in lines]


LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}


@pytest.fixture(scope="module")
def answers(world, model):
    """By layout: what rank 0 shows, and the others, for the same command lines."""

    def lines(layout):
        prompts = ["--prompt", "how are you", "--prompt", "well then, what is it?", "--max-new-tokens", "12"]
        beams = ["--prompt", "fine", "--num-beams", "3", "--n", "2", "--max-new-tokens", "6"]
        tasks = ["greedy", "do_sample", "beam-search-with-sampling", "return-output-log-probs"]
        return [
            ([model, *prompts, *SAMPLED, "--json", "--logprobs", "1", "--prompt-logprobs", *layout],),
            ([model, *beams, *layout],),
            ([model, "--chat", "--max-new-tokens", "5", *layout], False, ("hi", "", "/clear", "well" * 500, "again")),
            (["--load", model, "--task", *tasks, "--seed", "5", "--max-new-tokens", "4", *layout], True),
        ]

    return {name: world(size)(several, lines(layout)) for name, (size, layout) in LAYOUTS.items()}


def test_every_layout_gives_the_same_text(answers):
    """Answers sampled with a seed, beams, chats; ranks other than 0 show nothing."""
    expected = [out for _, out, _ in answers["one"][0]]
    for name, ranks in answers.items():
        found = [out for _, out, _ in ranks[0]]
        assert found[1:] == expected[1:], name
        for line, reference in zip(found[0].splitlines(), expected[0].splitlines()):
            one, other = json.loads(line), json.loads(reference)
            for key in ("text", "token_ids", "finish_reason", "title"):
                assert one[key] == other[key], name
            np.testing.assert_allclose(one["prompt_logprobs"], other["prompt_logprobs"], atol=1e-4)
        assert all(status == 0 for rank in ranks for status, _, _ in rank)
        assert all(out == "" for rank in ranks[1:] for _, out, _ in rank)


def test_answers_of_a_batch_in_their_order(answers):
    (_, out, err), *_ = answers["one"][0]
    lines = [json.loads(line) for line in out.splitlines()]
    titles = [f"prompt {prompt}, answer {answer}" for prompt in (1, 2) for answer in (1, 2)]
    assert [line["title"] for line in lines] == titles
    assert len({tuple(line["token_ids"]) for line in lines}) == 4
    for line in lines:
        assert len(line["logprobs"]) == len(line["token_ids"]) == line["completion_tokens"]
        assert len(line["prompt_logprobs"]) == line["prompt_tokens"] - 1
    assert " tokens/s, first token after " in err


def test_a_chat(answers):
    """Two answers; a question that is too long is left out, and the chat goes on."""
    _, out, err = answers["one"][0][2]
    assert err.count("tokens/s") == 2
    assert err.count("[the question is left out: prompt has ") == 1
    assert out.count("\n") >= 2


def test_tasks_of_mindspeed_llm(answers):
    _, out, _ = answers["one"][0][3]
    titles = [line for line in out.splitlines() if line.startswith("===")]
    assert titles[:2] == ["=== greedy ===", "=== do-sample ==="]
    assert titles[2].startswith("=== beam-search-with-sampling, score -")
    assert titles[3] == "=== return-output-log-probs ==="
    assert len(out.rpartition("log-probabilities: ")[2].split()) == 4


@pytest.mark.slow
def test_the_commands_start_their_ranks(model):
    """As a user types them: two ranks by itself, a chat from a pipe."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = ["inference.py", "--load", model, "--task", "chat", "--max-new-tokens", "4", "--tensor-model-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, *line, "--num-layers", "4"],
        input="hi\nwell\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") == 2
    line = ["-m", "mindspeed_ms.tools.generate", model, "--prompt", "how are you", "--max-new-tokens", "3"]
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "3 tokens in" in done.stderr


def refused(capsys, arguments, llm):
    """The only line of a command line that is refused."""
    try:
        status = main(arguments, mindspeed_llm.job_of if llm else command.job_of, "X", __file__, RUNNER)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.rstrip("\n").partition("error: ")[2]


GIVE = "nothing to continue: give --prompt TEXT, --prompt-file FILE or --chat."
DRAWING = "is for --task do-sample, beam-search-with-sampling, chat, but --task is greedy: leave it out."
MISTAKES = [
    ([], GIVE),
    (["--prompt", ""], "--prompt is empty: expected some text."),
    (["--prompt", "a", "--chat"], "--chat takes its questions from the terminal: leave --prompt and --prompt-file out."),
    (["--prompt-file", "/nowhere"], "--prompt-file is /nowhere: No such file or directory."),
    (["--prompt", "how are you" * 99], "--prompt has 297 tokens, which leave no room in the context of 96: shorten it."),
    (
        ["--prompt", "how are you", "--max-new-tokens", "95"],
        "--max-new-tokens is 95, but the prompt's 3 tokens leave 93 of the context of 96: lower it or shorten the prompt.",
    ),
    (
        ["--chat", "--max-new-tokens", "96"],
        "--max-new-tokens is 96, but the context of 96 holds question and answer: lower it.",
    ),
    (["--prompt", "a", "--temperature", "-1"], "--temperature is -1.0: expected a number >= 0 (0: greedy)."),
    (
        ["--prompt", "a", "--temperature", "0", "--top-k", "5"],
        "--top-k does nothing with --temperature 0 (greedy): leave one of them out.",
    ),
    (["--prompt", "a", "--logprobs", "1"], "--logprobs is only printed with --json: add it."),
    (["--prompt", "a", "--length-penalty", "1"], "--length-penalty is of beam search: give --num-beams too."),
    (["--prompt", "a", "--num-beams", "0"], "--num-beams is 0: expected an integer >= 1."),
    (
        ["--prompt", "a", "--num-beams", "2", "--n", "3"],
        "--n is 3, but 2 beams give at most as many answers: ask for more beams.",
    ),
    (["--prompt", "a", "--num-beams", "2", "--length-penalty", "nan"], "--length-penalty is nan: expected a number."),
    (["--prompt", "a", "--tensor-model-parallel-size", "3"], "num_attention_heads = 4: must be a multiple of 3"),
    (["--prompt", "a", "--pipeline-model-parallel-size", "9"], "num_layers = 4: is less than one layer for each stage"),
    (["--prompt", "a", "--bf16"], "--bf16 Did you mean '--dtype'?"),
    (["--prompt", "a", "--json", "--logprobs", "901"], "--logprobs is 901, but the vocabulary has 900 ids: lower it."),
    (["--prompt", "a", "--max-sequence-length", "1000000000"], "--max-sequence-length 1000000000 with "),
    (["--prompt", "a", "--num-beams", "1000000000"], "with --num-beams 1000000000 needs a cache of "),
    (["--prompt", "a", "--stop-token-id", "900"], "--stop-token-id has the token id 900, expected ids from 0 to 899."),
    (["--prompt", "a", "--prompt-type", "qwem"], "--prompt-type is 'qwem', which is not in "),
    (["--prompt", "a", "--history-turns", "2"], "--history-turns is of a chat: give --chat too, or leave it out."),
    (
        ["--prompt", "a", "--tokenizer-name-or-path", "/nowhere"],
        "--tokenizer-name-or-path is /nowhere: there is no such folder",
    ),
    (["--prompt", "a", "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size is 0: expected an integer >= 1."),
    (["--prompt", "a", "--max-sequence-length", "0"], "--max-sequence-length is 0: expected an integer > 0."),
    (["--prompt", "a", "--iteration", "7"], "is one checkpoint, not a run with several: leave the iteration (7) out."),
    (["--prompt", "a", "--promt", "b"], "unrecognized arguments: --promt b Did you mean '--prompt'?"),
]
LLM_MISTAKES = [
    (["--task", "greedy", "--temperature", "0.7"], f"--temperature 0.7 {DRAWING}"),
    (["--top-k", "5"], f"--top-k 5 {DRAWING}"),
    (
        ["--num-beams", "5"],
        "--num-beams is for --task beam-search, beam-search-with-sampling, but --task is greedy: leave it out.",
    ),
    (["--task", "gredy"], "argument --task: invalid choice: 'gredy'"),
    (
        ["--max-length", "9", "--max-new-tokens", "9"],
        "--max-length and --max-new-tokens both limit the answer: leave one of them out.",
    ),
    (["--max-length", "0"], "--max-length is 0: expected an integer > 0."),
    (["--bf16", "--fp16"], "--bf16 and --fp16 are both given: leave one of them out."),
    (
        ["--hf-chat-template", "--prompt-type", "qwen"],
        "--hf-chat-template and --prompt-type qwen are two templates: leave one of them out.",
    ),
    (["--add-eos-token", "<|im_ent|>"], "--add-eos-token is '<|im_ent|>', which is no token of "),
    (["--eos-id", "901"], "--eos-id is 901: expected an id from 0 to 899."),
    (["--eos-id", "-5"], "--eos-id is -5: expected an id from 0 to 899."),
    (["--seq-length", "0", "--max-length", "9"], "--seq-length is 0: expected an integer > 0."),
    (["--seq-length", "9", "--max-length", "0"], "--max-length is 0: expected an integer > 0."),
    (["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "/nowhere"], "--tokenizer-model is /nowhere"),
    (
        ["--task", "chat", "--prompt", "a"],
        "--task chat takes its questions from the terminal: leave --prompt and --prompt-file out.",
    ),
    (["--history-turns", "1"], "--history-turns is for --task chat, but --task is greedy: leave it out."),
    (["--prompt-type-path", "x"], "--prompt-type-path needs --prompt-type, the name of a template in that file."),
    (["--num-layer", "4"], "--num-layer"),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_mistakes(model, capsys, words, message):
    assert message in refused(capsys, [model, *words], False)


@pytest.mark.parametrize(
    ("words", "message"), LLM_MISTAKES, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_mistakes_of_mindspeed_llm(model, capsys, words, message):
    assert message in refused(capsys, ["--load", model, *words], True)


def test_prompts_in_a_template(model):
    """The folder's own, and those of templates.json with system message, history and thoughts."""

    def ids(words, messages=None):
        planned = plan(mindspeed_llm.job_of(["--load", model, "--prompt", "hi", *words]))
        [request] = planned.requests["greedy"]
        text = planned.tokenizer.detokenize(request.prompt if messages is None else planned.template(messages))
        ends = {planned.tokenizer.detokenize([number]) for number in planned.eos_ids}
        return text, ends

    assert ids([]) == ("hi", {"</s>"})
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids(["--hf-chat-template"]) == (asked, {"</s>"})
    assert ids(["--hf-chat-template", "--system", "be"])[0] == f"<|im_start|>system\nbe<|im_end|>\n{asked}"
    assert ids(["--add-eos-token", "<|im_end|>", "7"])[1] == {"</s>", "<|im_end|>", "7"}  # a token's text before an id
    assert len(ids(["--add-eos-token", "340", "--eos-id", "341"])[1]) == 3
    text, ends = ids(["--prompt-type", "qwen"])
    assert text.endswith(asked) and ends == {"</s>", "<|im_end|>"}
    assert ids(["--prompt-type", "qwen3"])[0].endswith(asked)
    assert ids(["--prompt-type", "qwen3", "--enable-thinking", "true"])[0].endswith(asked)
    assert ids(["--prompt-type", "qwen3", "--enable-thinking", "false"])[0].endswith(f"{asked}<think>\n\n</think>\n\n")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "hi"}]
    assert ids(["--prompt-type", "qwen"], said)[0].endswith(f"a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n{asked}")


def test_folders_that_lack_something(tmp_path, capsys):
    assert "holds no checkpoint" in refused(capsys, [str(tmp_path), "--prompt", "a"], False)
    write_folder(tmp_path, CONFIG)
    assert refused(capsys, [str(tmp_path), "--prompt", "a"], False) == (
        f"{tmp_path} has no tokenizer: name one with --tokenizer-name-or-path, or put tokenizer.json into the folder."
    )
    write_tokenizer(tmp_path)
    text = refused(capsys, [str(tmp_path), "--chat"], False)
    assert text.startswith("a conversation needs a chat template, but the tokenizer ")
    assert text.endswith(" has none: name a template of templates.json with --prompt-type.")
    write_json(tmp_path, "generation_config.json", {"eos_token_id": ["</s>"]})
    assert refused(capsys, [str(tmp_path), "--prompt", "a"], False).endswith(
        "generation_config.json: eos_token_id is ['</s>']: expected the id of a token, or a list of them."
    )
    (tmp_path / "generation_config.json").unlink()
    config = {**CONFIG, "vocab_size": 40}
    write_json(tmp_path, "config.json", config)
    write_folder(tmp_path, config)
    assert "but the model of " in refused(capsys, [str(tmp_path), "--prompt", "how are you"], False)
    (tmp_path / "config.json").unlink()
    assert "its config.json is missing: copy it there." in refused(capsys, [str(tmp_path), "--prompt", "a"], False)


def test_a_named_tokenizer_with_other_ids(model, tmp_path, capsys):
    """Refused beside weights that have a tokenizer, unless it is meant; in place of a damaged one it is taken."""
    other, copied = tmp_path / "other", tmp_path / "model"
    shutil.copytree(model, copied)
    other.mkdir()
    content = json.loads((copied / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["h"], vocab["w"] = vocab["w"], vocab["h"]
    write_json(other, "tokenizer.json", content)
    for words, llm in (([str(copied)], False), (["--load", str(copied)], True)):
        words += ["--prompt", "how are you", "--tokenizer-name-or-path"]
        job_of = mindspeed_llm.job_of if llm else command.job_of
        assert plan(job_of([*words, model])).tokenizer.name.endswith(f"{model}/tokenizer.json")
        message = refused(capsys, [*words, str(other)], llm)
        assert message.startswith("--tokenizer-name-or-path: ") and "gives other ids than " in message
        meant = plan(job_of([*words, str(other), "--load-strict", "false"]))
        assert meant.tokenizer.name.endswith("other/tokenizer.json") and len(meant.checkpoint.warnings) == 1
    (copied / "tokenizer.json").write_text("{")
    assert plan(command.job_of([str(copied), "--prompt", "a", "--tokenizer-name-or-path", str(other)])).requests["prompts"]


def test_vocabularies_are_compared_in_one_go(model):
    """Making a vocabulary takes long: once for each of both."""
    tokenizer, made = from_folder(model), []
    with patch.object(type(tokenizer), "vocab", property(lambda self: made.append(1) or {str(n): n for n in range(9)})):
        assert tokenizer.other_ids(tokenizer) is None and len(made) <= 2


def test_prompt_files(model, tmp_path, capsys):
    """A byte order mark is no text; only line ends end a prompt; errors name the line."""
    path = tmp_path / "prompts"
    path.write_bytes("\ufeffone\x0c1\r\n\ntwo\u2028\n".encode())
    job = command.job_of(["x", "--prompt", "zero", "--prompt-file", str(path)])
    assert [prompt.text for prompt in job.prompts] == ["zero", "one\x0c1", "two\u2028"]
    path.write_text("a\n" + "how are you " * 500)
    assert refused(capsys, [model, "--prompt-file", str(path)], False).startswith(f"--prompt-file {path}, line 2: has ")
    assert refused(capsys, [model, "--prompt", "a\udcff"], False).startswith("--prompt cannot be encoded: character 2 ")


def test_one_rank_of_a_launcher_tells_a_mistake():
    line = [sys.executable, "-m", "mindspeed_ms.launch", "-n", "2", str(ROOT / "inference.py"), "--load", "/nowhere"]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.count("inference.py: error: /nowhere holds no checkpoint: it does not exist.") == 1, done.stderr
