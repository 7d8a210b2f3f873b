"""Records of each style to samples: what is learnt, what is cut, what is left out."""

import json

import pytest

from mindspeed_ms.tasks.preprocess.errors import Unusable
from mindspeed_ms.tasks.preprocess.truncation import balanced_lengths, fit
from tests.preprocess.runs import run, stored, write_jsonl
from tests.preprocess.toy_tokenizer import toy_tokenizer

KEYS = ("input_ids", "attention_mask", "labels")
TALK = [
    {"from": "human", "value": "how are you?"},
    {"from": "gpt", "value": "fine"},
    {"from": "human", "value": "well then"},
    {"from": "gpt", "value": "the end"},
]


@pytest.fixture
def toy(tmp_path):
    return toy_tokenizer(tmp_path)


def samples(folder, keys=KEYS, prefix="out/set"):
    return [dict(zip(keys, values)) for values in zip(*(stored(folder, f"{prefix}_packed_{key}_document") for key in keys))]


def texts(toy, sample, ids="input_ids", labels="labels"):
    """(whole text, learnt text)."""
    return toy.detokenize(sample[ids]), toy.detokenize(label for label in sample[labels] if label != -100)


def convert(capsys, folder, records, handler, *words, template="qwen"):
    path = write_jsonl(folder / "data.jsonl", records)
    return run(capsys, folder, "--input", path, "--handler-name", handler, "--prompt-type", template, *words)


def test_alpaca(tmp_path, capsys, toy):
    records = [
        {"instruction": "how", "input": "are you?", "output": "fine", "history": [["q1", "a1"]], "system": "S"},
        {"instruction": "how", "output": 42},
    ]
    code, printed = convert(capsys, tmp_path, records, "AlpacaStyleInstructionHandler")
    assert code == 0, printed
    first, second = samples(tmp_path)
    assert texts(toy, first) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\n"
        "how\nare you?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>",
        "a1<|im_end|>fine<|im_end|>",
    )
    assert texts(toy, second)[1] == "42<|im_end|>"
    for sample in (first, second):
        assert sample["attention_mask"] == [1] * len(sample["input_ids"])
        assert all(label in (-100, token) for token, label in zip(sample["input_ids"], sample["labels"]))


def test_map_keys_name_and_switch_off_columns(tmp_path, capsys, toy):
    """The records and the options of the guide, with the end of document that it forgets."""
    records = [{"prompt": "<|im_start|>user\nhow?<|im_end|>\n", "response": "fine", "input": "not this"}]
    keys = '{"prompt":"prompt", "query":"", "response":"response"}'
    words = ("--map-keys", keys, "--seq-length", "65536", "--cache_dir", tmp_path / "cache")
    code, printed = convert(capsys, tmp_path, records, "AlpacaStyleInstructionHandler", *words, template="empty")
    assert code == 0 and "ends no answer" in printed
    assert texts(toy, samples(tmp_path)[0]) == ("<|im_start|>user\nhow?<|im_end|>\nfine", "fine")
    code, printed = convert(
        capsys,
        tmp_path,
        records,
        "AlpacaStyleInstructionHandler",
        *words,
        "--append-eod",
        "--overwrite-output",
        template="empty",
    )
    assert code == 0 and "ends no answer" not in printed
    assert texts(toy, samples(tmp_path)[0])[1] == "fine</s>"


def test_sharegpt_and_openai_agree(tmp_path, capsys, toy):
    names = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "function_call"}
    call = {"name": "add", "arguments": {"a": 1}}
    talk = [
        *TALK[:2],
        {"from": "human", "value": "what is it?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "one\ntwo"},
        {"from": "gpt", "value": "the end"},
    ]
    messages = [{"role": names[message["from"]], "content": message["value"]} for message in talk]
    messages[3] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    messages[4:5] = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    convert(capsys, tmp_path, [{"conversations": [{"from": "system", "value": "S"}, *talk]}], "SharegptStyleInstructionHandler")
    shared = samples(tmp_path)
    code, printed = convert(
        capsys,
        tmp_path,
        [{"messages": [{"role": "system", "content": "S"}, *messages]}],
        "OpenAIInstructionHandler",
        "--overwrite-output",
    )
    assert code == 0, printed
    assert samples(tmp_path) == shared and "add" in texts(toy, shared[0])[1]


def test_some_tags_leave_the_others(tmp_path, capsys, toy):
    records = [{"talk": [{"role": "human", "value": "how"}, {"role": "bot", "value": "fine"}]}]
    keys = json.dumps({"messages": "talk", "tags": {"role_tag": "role", "assistant_tag": "bot"}})
    code, printed = convert(capsys, tmp_path, records, "SharegptStyleInstructionHandler", "--map-keys", keys)
    assert code == 0, printed
    assert texts(toy, samples(tmp_path)[0])[1] == "fine<|im_end|>"


@pytest.mark.parametrize(
    "handler, record",
    [
        ("AlpacaStylePairwiseHandler", {"instruction": "how", "input": "", "chosen": "fine", "rejected": "well"}),
        (
            "SharegptStylePairwiseHandler",
            {
                "conversations": [{"from": "human", "value": "how"}],
                "chosen": {"from": "gpt", "value": "fine"},
                "rejected": {"from": "gpt", "value": "well"},
            },
        ),
    ],
)
def test_pairs(tmp_path, capsys, toy, handler, record):
    code, printed = convert(capsys, tmp_path, [record], handler)
    assert code == 0, printed
    names = [f"{kind}_{part}" for kind in ("chosen", "rejected") for part in ("input_ids", "labels")]
    sample = samples(tmp_path, names)[0]
    prompt = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n"
    )
    assert texts(toy, sample, "chosen_input_ids", "chosen_labels") == (f"{prompt}fine<|im_end|>", "fine<|im_end|>")
    assert texts(toy, sample, "rejected_input_ids", "rejected_labels") == (f"{prompt}well<|im_end|>", "well<|im_end|>")


def test_pairs_learn_only_the_last_answer_and_share_the_question(tmp_path, capsys, toy):
    record = {
        "conversations": [*TALK[:3]],
        "chosen": {"from": "gpt", "value": "the end. " * 20},
        "rejected": {"from": "gpt", "value": "no"},
    }
    names = [f"{kind}_{part}" for kind in ("chosen", "rejected") for part in ("input_ids", "labels")]
    convert(capsys, tmp_path, [record], "SharegptStylePairwiseHandler")
    assert texts(toy, samples(tmp_path, names)[0], "rejected_input_ids", "rejected_labels")[1] == "no<|im_end|>"
    convert(capsys, tmp_path, [record], "SharegptStylePairwiseHandler", "--seq-length", "60", "--overwrite-output")
    sample = samples(tmp_path, names)[0]
    starts = [
        next(place for place, label in enumerate(sample[f"{kind}_labels"]) if label != -100) for kind in ("chosen", "rejected")
    ]
    assert len(sample["chosen_input_ids"]) == 60 and starts[0] == starts[1] > 0
    assert "how are you" not in texts(toy, sample, "chosen_input_ids", "chosen_labels")[0]


def test_prompts_only(tmp_path, capsys, toy):
    code, printed = convert(capsys, tmp_path, [{"instruction": "how", "output": "fine"}], "PPOAlpacaStyleInstructionHandler")
    assert code == 0, printed
    assert toy.detokenize(samples(tmp_path, KEYS[:2])[0]["input_ids"]).endswith("how<|im_end|>\n<|im_start|>assistant\n")


def test_process_reward(tmp_path, capsys, toy):
    words = ["--handler-name", "AlpacaStyleProcessRewardHandler", "--placeholder-token", "<|end|>", "--reward-tokens", "+", "-"]
    path = write_jsonl(tmp_path / "data.jsonl", [{"input": "how <|end|> are you <|end|>", "value": ["+", "-"]}])
    code, printed = run(capsys, tmp_path, "--input", path, *words)
    assert code == 0, printed
    sample = samples(tmp_path)[0]
    where = [place for place, label in enumerate(sample["labels"]) if label != -100]
    assert [sample["input_ids"][place] for place in where] == [toy.token_to_id("<|end|>")] * 2
    assert toy.detokenize(sample["labels"][place] for place in where) == "+-"
    for value, expected in ((["+"], "2 placeholders"), (["+", "x"], "'x' is not among --reward-tokens")):
        path = write_jsonl(tmp_path / "bad.jsonl", [{"input": "how <|end|> are you <|end|>", "value": value}])
        code, printed = run(capsys, tmp_path, "--input", path, *words, prefix="bad/set")
        assert code == 1 and "bad.jsonl, line 1" in printed and expected in printed
    code, printed = run(capsys, tmp_path, "--input", path, *words[:2], "--placeholder-token", "how are you", prefix="bad/set")
    assert code == 1 and "expected one that is a single token" in printed


ALTERNATE = "questions and answers do not alternate: "
HUMAN, GPT, RESULT = TALK[0], TALK[1], {"from": "observation", "value": "one"}
LEFT_OUT = (
    ("no question", "", [{"from": "human", "value": " "}, GPT]),
    ("the last message is no answer", "message 3 has the role 'human'", TALK[:3]),
    (f"{ALTERNATE}two questions in a row", "message 2 has the role 'human'", [HUMAN, HUMAN, GPT]),
    (f"{ALTERNATE}two answers in a row", "message 5 has the role 'gpt'", [*TALK, GPT, HUMAN]),
    (f"{ALTERNATE}the first message is an answer", "message 1 has the role 'gpt'", [GPT, *TALK[:3]]),
    ("a system message is not the first", "message 3 has the role 'system'", [*TALK[:2], {"from": "system", "value": "S"}]),
    ("empty answer", "", [HUMAN, {"from": "gpt", "value": ""}]),
    (
        "unknown role 'bot', known: human, gpt, observation, function_call, system, developer",
        "message 2",
        [HUMAN, {"from": "bot"}],
    ),
)


def test_records_that_teach_nothing_are_left_out_and_counted(tmp_path, capsys):
    """Each with the rule that it breaks, and the message that does, by its number and role in the record."""
    records = [{"conversations": talk} for talk in (TALK, *(talk for _, _, talk in LEFT_OUT))]
    code, printed = convert(capsys, tmp_path, records, "SharegptStyleInstructionHandler")
    assert code == 0 and len(samples(tmp_path)) == 1
    for line, (reason, detail, _) in enumerate(LEFT_OUT, 2):
        place = f"(first: {tmp_path / 'data.jsonl'}, line {line})"
        assert f"left out          1 {reason} {place}{detail and ': '}{detail}" in printed.splitlines()
    # a system message in front counts; the last of the reasons is that of the first record
    shifted = [{"conversations": [{"from": "developer", "value": "S"}, RESULT, HUMAN, GPT]}]
    code, printed = convert(capsys, tmp_path, shifted, "SharegptStyleInstructionHandler", "--overwrite-output")
    assert code == 1 and "two questions in a row (first: " in printed and "line 1): message 3 has the role 'human'" in printed


@pytest.mark.parametrize(
    "handler, record, expected",
    [
        (
            "AlpacaStyleInstructionHandler",
            {"instruction": "", "output": "fine", "history": [["q", "a"]]},
            "1 no question (first",
        ),
        ("SharegptStylePairwiseHandler", {"conversations": TALK, "chosen": "a", "rejected": "b"}, "no question (first: "),
        (
            "SharegptStylePairwiseHandler",
            {"conversations": [GPT, HUMAN], "chosen": "a", "rejected": "b"},
            "is an answer (first: ",
        ),
        (
            "OpenAIInstructionHandler",
            {
                "messages": [
                    {"role": "user", "content": "how", "tool_calls": [{"name": "f"}]},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "calls of tools in a message that is no answer (first: ",
        ),
    ],
)
def test_the_fault_is_that_of_the_record(tmp_path, capsys, handler, record, expected):
    code, printed = convert(capsys, tmp_path, [record], handler)
    assert code == 1 and expected in printed, printed


def test_developer_is_system(tmp_path, capsys, toy):
    for role in ("system", "developer"):
        talk = [{"role": role, "content": "S"}, {"role": "user", "content": "how"}, {"role": "assistant", "content": "fine"}]
        code, printed = convert(capsys, tmp_path, [{"messages": talk}], "OpenAIInstructionHandler", "--overwrite-output")
        assert code == 0 and texts(toy, samples(tmp_path)[0])[0].startswith("<|im_start|>system\nS<|im_end|>\n"), printed


@pytest.mark.parametrize("truncation, answers", [("keep-last", "the end<|im_end|>"), ("oldest-first", "fine<|im_end|>")])
def test_long_conversations(tmp_path, capsys, toy, truncation, answers):
    """Exactly the length: everything stays. One token less: something goes, by the rule that was chosen."""
    convert(capsys, tmp_path, [{"conversations": TALK}], "SharegptStyleInstructionHandler")
    whole = samples(tmp_path)
    length = len(whole[0]["input_ids"])
    words = ("--truncation", truncation, "--overwrite-output", "--seq-length")
    convert(capsys, tmp_path, [{"conversations": TALK}], "SharegptStyleInstructionHandler", *words, str(length))
    assert samples(tmp_path) == whole
    shorter = length - (1 if truncation == "keep-last" else 12)
    code, printed = convert(
        capsys, tmp_path, [{"conversations": TALK}], "SharegptStyleInstructionHandler", *words, str(shorter)
    )
    assert code == 0 and "1 conversations cut to --seq-length" in printed
    cut = samples(tmp_path)[0]
    assert len(cut["input_ids"]) <= shorter
    text, learnt = texts(toy, cut)
    assert learnt.startswith(answers) and learnt != "fine<|im_end|>the end<|im_end|>"
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")


def test_longer_ones_can_be_left_out_and_masked_ones_always_are(tmp_path, capsys):
    records = [{"conversations": TALK}, {"conversations": TALK[:2]}]
    code, printed = convert(
        capsys, tmp_path, records, "SharegptStyleInstructionHandler", "--truncation", "drop", "--seq-length", "60"
    )
    assert code == 0 and "1 longer than --seq-length (first: " in printed and len(samples(tmp_path)) == 1
    records = [{"conversations": [{"from": "human", "value": "how are you? " * 200}, TALK[1]]}]
    code, printed = convert(
        capsys, tmp_path, records, "SharegptStyleInstructionHandler", "--seq-length", "4", "--overwrite-output"
    )
    assert code == 1 and "nothing to write: 1 records gave no sample. Left out: 1 all labels masked" in printed


def test_two_begin_tokens_are_counted(tmp_path, capsys):
    code, printed = convert(
        capsys,
        tmp_path,
        [{"instruction": "<s>[INST] how", "output": "fine"}] * 2,
        "AlpacaStyleInstructionHandler",
        template="trl",
    )
    assert code == 0 and "2 samples with two begin tokens" in printed


LENGTHY = "how are you? " * 30
BORDERS = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "handler, record",
    [
        ("AlpacaStyleInstructionHandler", {"instruction": LENGTHY, "output": "fine", "history": [["q", "a"]], "system": "S"}),
        ("SharegptStyleInstructionHandler", {"system": "S", "conversations": [{"from": "human", "value": LENGTHY}, TALK[1]]}),
        ("AlpacaStylePairwiseHandler", {"instruction": LENGTHY, "chosen": "fine", "rejected": "no", "system": "S"}),
    ],
)
@pytest.mark.parametrize("template", ["qwen", "chat_template"])
def test_a_question_that_is_too_long_loses_its_own_text_alone(tmp_path, capsys, handler, record, template):
    """What the template puts around question and answer stays, and the answer."""
    jinja = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{{ '' if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    toy = toy_tokenizer(tmp_path, chat_template=jinja)
    code, printed = convert(capsys, tmp_path, [record], handler, "--seq-length", "60", template=template)
    assert code == 0, printed
    assert "1 conversations cut to --seq-length (first: " in printed
    assert "1 questions that lost the end of their text to --seq-length" in printed and "answers that lost" not in printed
    keys = KEYS if "Pairwise" not in handler else ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    sample = samples(tmp_path, keys)[0]
    text, learnt = texts(toy, sample, keys[0], "labels" if "labels" in sample else "chosen_labels")
    assert learnt == "fine<|im_end|>" and text.startswith(BORDERS[0]) and text.endswith(BORDERS[1] + learnt)
    kept = text.removeprefix(BORDERS[0]).removesuffix(BORDERS[1] + learnt)
    assert kept and LENGTHY.startswith(kept) and 58 <= len(sample[keys[0]]) <= 60


def test_upstreams_order_cuts_ids_at_their_ends(tmp_path, capsys, toy):
    record = {"instruction": LENGTHY, "output": "fine"}
    convert(capsys, tmp_path, [record], "AlpacaStyleInstructionHandler", "--seq-length", "60", "--truncation", "oldest-first")
    assert BORDERS[1] not in texts(toy, samples(tmp_path)[0])[0]


def test_a_long_answer_loses_its_end_and_is_counted(tmp_path, capsys, toy):
    code, printed = convert(
        capsys, tmp_path, [{"instruction": "how", "output": LENGTHY}], "AlpacaStyleInstructionHandler", "--seq-length", "60"
    )
    assert code == 0 and "1 answers that lost their end to --seq-length" in printed and "questions that" not in printed
    assert texts(toy, samples(tmp_path)[0])[0].split(BORDERS[1])[0].endswith("user\nhow")


def test_texts_beside_calls_of_tools_are_counted(tmp_path, capsys):
    call = {"function": {"name": "add", "arguments": "{}"}}
    answers = [
        {"content": "let me see", "tool_calls": [call]},
        {"content": "", "tool_calls": [call]},
        {"content": "fine"},
        {"reasoning_content": "hm", "tool_calls": [call]},
    ]
    records = [{"messages": [{"role": "user", "content": "how"}, {"role": "assistant", **answer}]} for answer in answers[::-1]]
    code, printed = convert(capsys, tmp_path, records, "OpenAIInstructionHandler")
    assert code == 0 and "2 texts of messages that also call tools were left out (the calls are kept) (first: " in printed
    assert "line 1)" in printed and len(samples(tmp_path)) == 4


def test_fit_never_exceeds_the_limit():
    conversation = [{"role": role, "content": "x" * size} for size in (3, 9, 1, 30, 17, 2) for role in ("user", "assistant")]

    def render(messages):  # the first turn has a prefix of four tokens
        return [
            ([0] * (len(question["content"]) + 4 * (number == 0)), [1] * len(answer["content"]))
            for number, (question, answer) in enumerate(zip(messages[::2], messages[1::2]))
        ]

    whole = sum(len(message["content"]) for message in conversation) + 4
    for policy in ("keep-last", "oldest-first"):
        for limit in range(1 if policy == "oldest-first" else 6, whole + 2):
            turns, cut = fit(render, conversation, limit, policy)
            assert sum(len(source) + len(target) for source, target in turns) <= limit and bool(cut) == (limit < whole)
            if policy == "keep-last" and limit >= 8:
                assert len(turns[-1][1]) == 2  # the last answer, whole
    with pytest.raises(Unusable, match="fill --seq-length"):
        fit(render, conversation, 5, "keep-last")
    sizes = ((100, 10, 40), (10, 100, 40), (100, 100, 40))
    assert [balanced_lengths(*size) for size in sizes] == [(30, 10), (10, 30), (20, 20)]
