"""Tool formats: tool descriptions in the system message and texts of tool calls, in the forms the models were trained on.

`tool_format` in templates.json names one.
"""

import json
from dataclasses import dataclass

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError

_DEFAULT_SYSTEM = (
    "You have access to the following tools:\n{tools}"
    "Use the following format if using a tool:\n```\n"
    "Action: tool name (one of [{names}]).\n"
    "Action Input: the input to the tool, in a JSON format representing the kwargs "
    '(e.g. ```{{"input": "hello world", "num_beams": 5}}```).\n```\n'
)
_XML_SYSTEM = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
)
_QWEN_CALL = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_GLM4_MOE_CALL = (
    "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
_GLM4_SYSTEM = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具{tools}"
)
_GLM4_TOOL = "\n\n## {name}\n\n{text}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"


def _json(value, **options):
    return json.dumps(value, ensure_ascii=False, **options)


def _default_tools(tools):
    texts = []
    for tool in tools:
        parameters = tool.get("parameters") or {}
        required = parameters.get("required") or ()
        texts.append(
            f"> Tool Name: {tool['name']}\nTool Description: {tool.get('description', '')}\nTool Args:\n"
            + "".join(
                _default_argument(name, argument, name in required)
                for name, argument in (parameters.get("properties") or {}).items()
            )
            + "\n"
        )
    return _DEFAULT_SYSTEM.format(tools="".join(texts), names=", ".join(tool["name"] for tool in tools))


def _default_argument(name, argument, required):
    kind = argument.get("type", "") + (", required" if required else "")
    choices = ", should be one of [{}]".format(", ".join(map(str, argument["enum"]))) if argument.get("enum") else ""
    items = argument.get("items")
    each = f", where each item should be {items.get('type', '')}" if items else ""
    return f"  - {name} ({kind}): {argument.get('description', '')}{choices}{each}\n"


def _xml_tools(call):
    def system_text(tools):
        lines = "".join("\n" + _json({"type": "function", "function": tool}) for tool in tools)
        return _XML_SYSTEM.replace("{tools}", lines) + call

    return system_text


def _glm4_tools(tools):
    return _GLM4_SYSTEM.format(
        tools="".join(_GLM4_TOOL.format(name=tool["name"], text=_json(tool, indent=4)) for tool in tools)
    )


def _qwen_calls(calls):
    return "\n".join(f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls)


def _glm4_moe_calls(calls):
    texts = []
    for name, arguments in calls:
        values = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
        pairs = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values.items())
        texts.append(f"<tool_call>{name}{pairs}\n</tool_call>")
    return "\n".join(texts)


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool descriptions and tool calls.

    Attributes:
        system_text (Callable): list of tools (dicts with name, description, parameters) -> text behind the system message.
        calls_text (Optional[Callable]): list of (name, arguments) -> the whole text of calls; None: the slots of the
            template's `format_function` have `{{name}}` and `{{arguments}}`.
    """

    system_text: object
    calls_text: object = None


def _refuse(_):
    raise TemplateError(
        'this template has no format for tools: switch the column off (--map-keys \'{"tools": ""}\'), or use '
        "chat_template, if the tokenizer's folder has one."
    )


_QWEN = ToolFormat(_xml_tools(_QWEN_CALL), _qwen_calls)
TOOL_FORMATS = {
    "default": ToolFormat(_default_tools),
    "qwen": _QWEN,
    "qwen3": _QWEN,
    "ling": _QWEN,
    "glm4": ToolFormat(_glm4_tools),
    "glm4_moe": ToolFormat(_xml_tools(_GLM4_MOE_CALL), _glm4_moe_calls),
    "none": ToolFormat(_refuse, _refuse),
}


def parse_tools(tools):
    """Parse tools: list of dicts with a name each.

    Args:
        tools (str or list): json text or its content; the `{"type": "function", "function": ...}` form is unwrapped.

    Raises:
        TemplateError: not a json list of objects with names.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise TemplateError(f"the tools are no valid json ({error}): {tools[:80]!r}.") from error
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools or [], list):
        raise TemplateError(f"the tools must be a json list of objects with a name each, not {tools!r:.80}.")
    parsed = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools or ()]
    for tool in parsed:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise TemplateError(f"the tools must be a json list of objects with a name each, but one is {tool!r:.80}.")
    return parsed


def describe_tools(form, tools):
    """Text (str) of tools (see `parse_tools`) in a ToolFormat.

    Raises:
        TemplateError: no tools, or parameters that are no JSON schema.
    """
    parsed = parse_tools(tools)
    try:
        return form.system_text(parsed)
    except (AttributeError, TypeError) as error:
        raise TemplateError(f"the parameters of the tools are no json schema ({error}): {parsed!r:.80}.") from error


def parse_calls(content):
    """Parse the calls of a function turn: list of (name, arguments as an object).

    Args:
        content (str or list or dict): json of one call, or a list of them, each with `name` and `arguments` (object or
            its json text; none: an empty object), which may lie in a `function`.

    Raises:
        TemplateError: not that.
    """
    try:
        calls = json.loads(content) if isinstance(content, str) else content
        functions = [call.get("function") or call for call in (calls if isinstance(calls, list) else [calls])]
        if not all(isinstance(function["name"], str) for function in functions):
            raise TypeError("a name that is no text")
        return [(function["name"], parse_arguments(function)) for function in functions]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError(
            'a function turn must be json of a call, {"name": ..., "arguments": {...}}, or a list of them, '
            f"but it is {content!r:.80}."
        ) from error


def parse_arguments(function):
    """Parse the arguments (dict) of a call: an object, or its json text; an empty object if there are none.

    Raises:
        TemplateError: something else.
    """
    given = function.get("arguments") or {}
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise TemplateError(f"the arguments of the call of {function['name']} are broken JSON: {given!r:.80}.") from error
    if not isinstance(arguments, dict):
        raise TemplateError(f"the arguments of the call of {function['name']} must be a json object, but are {given!r:.80}.")
    return arguments
