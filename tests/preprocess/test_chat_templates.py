"""The chat template of a tokenizer's folder gets whole messages; answers are learnt up to their end token."""

import json

import pytest

from mindspeed_ms.tasks.preprocess.chat_template import get_template
from mindspeed_ms.tasks.preprocess.conversations import RecordReader
from mindspeed_ms.tasks.preprocess.errors import BadRecord
from mindspeed_ms.tasks.preprocess.templates import TemplateError
from tests.preprocess.jinja_shapes import DEEPSEEK, HERMES, LLAMA31, MISTRAL, QWEN3
from tests.preprocess.test_conversations import KEYS, convert, samples, texts
from tests.preprocess.toy_tokenizer import toy_tokenizer

RAW = '{"city":"上海"}'


def call(number=1, arguments=RAW, name="weather"):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number=1, content="rain", name="weather"):
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}


USER, ANSWER = {"role": "user", "content": "how?"}, {"role": "assistant", "content": "fine"}
AGENT = [USER, {"role": "assistant", "content": None, "tool_calls": [call()]}, result(), ANSWER]


def marked(folder, jinja, messages, thinking=None, **columns):
    """The text of an OpenAI record, what is learnt in ⟦⟧."""
    tokenizer = toy_tokenizer(folder, chat_template=jinja)
    template = get_template("chat_template", tokenizer=tokenizer, enable_thinking=thinking)
    talk = RecordReader("openai", {}).conversation({"messages": messages, **columns})
    pairs = template.encode_multiturn(tokenizer, talk.messages, talk.system, talk.tools)
    return "".join(f"{tokenizer.detokenize(source)}⟦{tokenizer.detokenize(target)}⟧" for source, target in pairs)


def chatml(*turns):
    return "<|im_start|>".join(("", *turns))


def test_qwen3(tmp_path):
    """Two results are two blocks of one turn; the call and its raw arguments stay, and so does the text beside it."""
    second = call(2, {"city": "Rome"})
    talk = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(), second], "reasoning_content": "hm"},
        result(),
        result(2, "sun"),
        ANSWER,
    ]
    assert marked(tmp_path, QWEN3, talk) == chatml(
        "user\nhow?<|im_end|>\n",
        """assistant\n⟦<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city":"上海"}}
</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>⟧\n""",
        "user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n",
        "assistant\n⟦<think>\n\n</think>\n\nfine<|im_end|>⟧",
    )


@pytest.mark.parametrize("thinking, last", [(None, "⟦<think>\n\n</think>\n\n"), (False, "<think>\n\n</think>\n\n⟦")])
def test_qwen3_leaves_earlier_thoughts_out(tmp_path, thinking, last):
    """The text is that of the whole conversation: what a model sees when the last question is asked."""
    talk = [USER, {**ANSWER, "reasoning_content": "hm"}, USER, {**ANSWER, "content": "the end"}]
    turn = "user\nhow?<|im_end|>\n"
    assert marked(tmp_path, QWEN3, talk, thinking) == chatml(
        turn, "assistant\n⟦fine<|im_end|>⟧\n", turn, f"assistant\n{last}the end<|im_end|>⟧"
    )
    if thinking is None:
        assert "⟦<think>\nhm\n</think>\n\nfine<|im_end|>⟧" in marked(tmp_path, QWEN3, talk[:2])
    inside = [USER, {**ANSWER, "content": "<think>\nhm\n</think>\n\nfine"}]
    assert marked(tmp_path, QWEN3, inside) == marked(tmp_path, QWEN3, talk[:2])


def test_qwen3_calls_without_thoughts(tmp_path):
    """An empty thought is in front of the last answer alone, so the beginning of the conversation is written differently."""
    for thinking in (None, False):
        text = marked(tmp_path, QWEN3, AGENT, thinking, tools=[{"name": "weather"}])
        assert '<|im_start|>assistant\n⟦<tool_call>\n{"name": "weather", "arguments": {"city":"上海"}}\n' in text
        assert text.count("⟦") == 2 and "</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>" in text
        assert '<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools>' in text
    with pytest.raises(TemplateError, match="changes what stands before message 2"):
        marked(tmp_path, QWEN3, [USER, {**ANSWER, "reasoning_content": "hm"}], False)


def test_llama31(tmp_path):
    """Arguments that are text are read, as the template writes JSON; `tool_calls` that are null are none."""
    talk = [{"role": "developer", "content": "S"}, *AGENT[:2], result(content="a\nb"), {**ANSWER, "tool_calls": None}]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    assert marked(tmp_path, LLAMA31, talk) == (
        f"<s>{header('system')}S<|eot_id|>{header('user')}how?<|eot_id|>{header('assistant')}"
        f'⟦{{"name": "weather", "parameters": {{"city": "上海"}}}}<|eot_id|>⟧{header("ipython")}"a\\nb"<|eot_id|>'
        f"{header('assistant')}⟦fine<|eot_id|>⟧"
    )
    with pytest.raises(TemplateError, match="only one call at once"):
        marked(tmp_path, LLAMA31, [USER, {"role": "assistant", "content": "", "tool_calls": [call(), call()]}])


def test_mistral(tmp_path):
    """Ids are there, and tools that move to the last question do not hinder the answers before it."""
    calls = '[CALLS][{"name": "weather", "arguments": {"city": "上海"}, "id": "call00001"}]</s>'
    results = '[RESULTS]{"content": rain, "call_id": "call00001"}[/RESULTS]'
    assert marked(tmp_path, MISTRAL, AGENT) == f"<s>[INST]how?[/INST]⟦{calls}⟧{results}⟦ fine</s>⟧"
    tools = '[TOOLS][{"type": "function", "function": {"name": "weather"}}][/TOOLS]'
    talk = [*AGENT, USER, ANSWER, {**USER, "content": "well"}, *AGENT[1:]]
    assert marked(tmp_path, MISTRAL, talk, tools=[{"name": "weather"}]) == (
        f"<s>[INST]how?[/INST]⟦{calls}⟧{results}⟦ fine</s>⟧[INST]how?[/INST]⟦ fine</s>⟧{tools}[INST]well[/INST]"
        f"⟦{calls}⟧{results}⟦ fine</s>⟧"
    )
    with pytest.raises(TemplateError, match="nine characters"):
        marked(tmp_path, MISTRAL, [USER, {"role": "assistant", "content": "", "tool_calls": [call() | {"id": "1"}]}])
    with pytest.raises(TemplateError, match="leaves the system message out of a conversation that ends with an answer"):
        marked(tmp_path, MISTRAL, [{"role": "system", "content": "the end."}, USER, ANSWER])


def test_hermes(tmp_path):
    """A result is written differently once the answer follows; the text is that of the whole conversation."""
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call(), call(2)]}, result(), result(2, "sun"), ANSWER]
    called = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "上海"}}\n</tool_call>'
    answered = "<tool_response>\nweather: {}\n</tool_response>\n".format
    assert marked(tmp_path, HERMES, [*talk, USER, ANSWER]) == chatml(
        "user\nhow?<|im_end|>\n",
        f"assistant\n⟦{(called * 2)[1:]}<|im_end|>⟧\n",
        f"tool\n{answered('rain')}{answered('sun')}<|im_end|>",
        "assistant\n⟦fine<|im_end|>⟧\n",
        "user\nhow?<|im_end|>\n",
        "assistant\n⟦fine<|im_end|>⟧",
    )


@pytest.mark.parametrize("arguments, written", [(RAW, RAW), ({"city": "上海"}, '{"city": "上海"}'), (None, "{}"), ("", "{}")])
@pytest.mark.parametrize("content", [None, ""])
def test_deepseek(tmp_path, arguments, written, content):
    talk = [USER, {"role": "assistant", "content": content, "tool_calls": [call(arguments=arguments)]}, result(), ANSWER]
    assert marked(tmp_path, DEEPSEEK, talk) == (
        f"<s><｜User｜>how?<｜Assistant｜>⟦function:weather\n{written}\n</s>⟧<result>rain<｜Assistant｜>⟦fine</s>⟧"
    )


@pytest.mark.parametrize(
    "arguments", ["call.function.arguments", "'' ~ call.function.arguments", "call.function.arguments | string"]
)
def test_arguments_are_never_written_as_python_does(tmp_path, arguments):
    jinja = (
        "{% for m in messages %}{{ '[' + m.role + ']' + (m.content or '') }}{% for call in m.tool_calls %}"
        f"{{{{ call.function.name }}}}({{{{ {arguments} }}}}){{% endfor %}}</s>{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for given, written in (({"city": "上海"}, '{"city": "上海"}'), (RAW, RAW)):
        talk = [USER, {"role": "assistant", "content": "I look: ", "tool_calls": [call(arguments=given)]}]
        assert marked(tmp_path, jinja, talk) == f"[user]how?</s>[assistant]⟦I look: weather({written})</s>⟧"


@pytest.mark.parametrize(
    "calls",
    [
        [call(arguments="{")],
        [call(arguments="[1]")],
        [{"function": {"arguments": "{}"}}],
        ["weather"],
        "weather",
        [{"name": None}],
    ],
)
def test_calls_of_another_form(tmp_path, calls):
    for jinja in (DEEPSEEK, QWEN3):
        with pytest.raises(BadRecord, match=r"broken JSON: '\{'|must be a json object|must be json of a call"):
            marked(tmp_path, jinja, [USER, {"role": "assistant", "content": "", "tool_calls": calls}])
    tokenizer = toy_tokenizer(tmp_path, chat_template=QWEN3)
    template = get_template("chat_template", tokenizer=tokenizer)
    with pytest.raises(TemplateError, match="must be json of a call"):
        template.encode_multiturn(tokenizer, [USER, {"role": "function", "content": "weather"}])
    one = {"name": "weather", "arguments": RAW}
    talk = [
        {"role": "assistant", "content": "", **fields} for fields in ({"function_call": one}, {"tool_calls": json.dumps([one])})
    ]
    assert [marked(tmp_path, QWEN3, [USER, answer]) for answer in talk] == [marked(tmp_path, QWEN3, AGENT[:2])] * 2


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_templates_that_know_no_calls_or_thoughts(tmp_path):
    with pytest.raises(TemplateError, match="does not write that message 2 calls 'weather'"):
        marked(tmp_path, CHATML, AGENT)
    beside = {"role": "assistant", "content": "I ask weather.", "tool_calls": [call()]}
    with pytest.raises(TemplateError, match="does not write that message 2 calls 'weather'"):
        marked(tmp_path, CHATML, [USER, beside])
    thought = "⟦<think>\nhm\n</think>\n\nfine<|im_end|>⟧"
    assert thought in marked(tmp_path, CHATML, [USER, {**ANSWER, "reasoning_content": "hm"}])


@pytest.mark.parametrize("ending, learnt", [("<|im_end|>\n\n", "<|im_end|>"), (" </s> ", " </s>"), ("\n\n", "\n\n"), ("", "")])
def test_only_the_end_token_is_learnt_behind_an_answer(tmp_path, ending, learnt):
    jinja = f"{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{ending}{{% endfor %}}".replace("\n", "{{ '\n' }}")
    jinja += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert marked(tmp_path, jinja, [USER, ANSWER, USER, ANSWER]) == (
        f"[user]how?{ending}[assistant]⟦fine{learnt}⟧{ending.removeprefix(learnt)}[user]how?{ending}[assistant]⟦fine{learnt}⟧"
    )


def test_template_for_tools(tmp_path):
    """Folders may have another template for conversations with tools."""
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    talk = [USER, ANSWER]
    tools = "{{ tools[0].function.name }}"
    assert marked(tmp_path, named, talk) == marked(tmp_path, CHATML, talk)
    assert marked(tmp_path, named, AGENT, tools=[{"name": "weather"}]) == marked(tmp_path, HERMES, AGENT)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tools + CHATML)
    assert marked(tmp_path, CHATML, talk, tools=[{"name": "weather"}]).startswith("weather<|im_start|>user")


def test_sharegpt_records_and_parquet_fit_too(tmp_path, capsys):
    """Calls and results without ids; fields that are null in parquet are absent."""
    toy = toy_tokenizer(tmp_path, chat_template=QWEN3)
    shared = [
        {"from": "human", "value": "how?"},
        {"from": "function_call", "value": json.dumps([{"name": "weather", "arguments": {"city": "上海"}}] * 2)},
        {"from": "observation", "value": "rain"},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "fine"},
    ]
    code, printed = convert(
        capsys, tmp_path, [{"conversations": shared}], "SharegptStyleInstructionHandler", template="chat_template"
    )
    assert code == 0, printed
    called = call(arguments={"city": "上海"})
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [called, called]}, result(), result(2, "sun"), ANSWER]
    written = marked(tmp_path, QWEN3, talk)
    assert texts(toy, samples(tmp_path, KEYS)[0])[0] == written.replace("⟦", "").replace("⟧", "")


@pytest.mark.parametrize("template", ["qwen3", "bailing_mini", "glm4_moe", "plm"])
def test_results_of_tools_are_blocks_of_their_own(tmp_path, capsys, template):
    toy = toy_tokenizer(tmp_path)
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call(), call(2)]}, result(), result(2, "sun"), ANSWER]
    code, printed = convert(capsys, tmp_path, [{"messages": talk}], "OpenAIInstructionHandler", template=template)
    assert code == 0, printed
    text = texts(toy, samples(tmp_path)[0])[0]
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>" in text
    assert text.count("weather") == 2


def test_long_results_of_tools_are_cut_from_the_last_on(tmp_path, capsys):
    toy = toy_tokenizer(tmp_path)
    calls = {"role": "assistant", "content": None, "tool_calls": [call(), call(2)]}
    talk = [USER, calls, result(), result(2, "the end. " * 90), ANSWER]
    words = ["--seq-length", "90"]
    code, printed = convert(capsys, tmp_path, [{"messages": talk}], "OpenAIInstructionHandler", *words, template="qwen3")
    assert code == 0 and "1 questions that lost the end of their text" in printed, printed
    text, learnt = texts(toy, samples(tmp_path)[0])
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nthe end. " in text and learnt == "fine<|im_end|>\n"
    assert text.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nfine<|im_end|>\n")


def test_what_stays_of_a_long_conversation_begins_with_a_user(tmp_path, capsys):
    """Hermes' template refuses results without their call; a conversation of which nothing else fits is left out."""
    toy = toy_tokenizer(tmp_path, chat_template=HERMES)
    long = [{**USER, "content": "how are you? " * 30}, *AGENT[1:]]
    records = [{"messages": messages} for messages in ([*long, USER, ANSWER], long)]
    words = ["--seq-length", "100"]
    code, printed = convert(capsys, tmp_path, records, "OpenAIInstructionHandler", *words, template="chat_template")
    assert code == 0 and "1 longer than --seq-length, and the template refuses its end alone (first: " in printed, printed
    found = samples(tmp_path)
    assert len(found) == 1 and texts(toy, found[0]) == (
        "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>",
        "fine<|im_end|>",
    )
