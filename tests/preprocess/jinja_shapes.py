"""Chat templates of the shapes that models have, shortened: what they ask of messages and how they write tools."""

# thoughts apart or inside of the content, left out before the last question; an empty one in front of a last answer without
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(question=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

# one call, as json of an object; no text beside it; results of tools as json
LLAMA31 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' + messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- elif message.role == 'tool' %}
        {{- message.content | tojson if message.content is iterable else message.content }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# calls and results have ids of nine characters; tools stand before the last question; no header of answers
MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- endif %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == questions[-1] %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' }}
        {%- if loop.last and system is defined %}{{- system + '\n\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set text = call.function | tojson %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids of calls must have nine characters') }}
            {%- endif %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids of results must have nine characters') }}
        {%- endif %}
        {{- '[RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# results of tools end with another blank once something follows; their names
HERMES = """{%- for message in messages %}
    {%- if message.role != 'tool' and message.tool_calls is not defined %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\n' }}{%- endif %}
        {{- '<tool_response>\n' + message.name + ': ' + message.content }}
        {{- '\n</tool_response>' if loop.last else '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# calls only where the content is none, arguments as text
DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.content is none %}
        {%- for call in message.tool_calls %}
            {{- '<｜Assistant｜>' + call.type + ':' + call.function.name + '\n' + call.function.arguments + '\n' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content + eos_token }}
    {%- else %}
        {{- ('<｜User｜>' if message.role == 'user' else '<result>') + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""
