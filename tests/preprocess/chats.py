"""What each template makes of [system S; U1; A1; U2; A2].

⟦...⟧ is learnt, ¦ is a border between pieces that are encoded by themselves (⟦ ⟧ <BOS> <EOS> are borders too), † stands before
a token that is labelled with the end token.
"""

CHATML = (
    "<|im_start|>system\nS<|im_end|>\n¦<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦A1<EOS>⟧\n¦"
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n⟦A2<EOS>⟧"
)
QWEN_LF = (
    "<|im_start|>system\nS<|im_end|>\n¦<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n⟦A1<|im_end|>\n⟧"
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n⟦A2<|im_end|>\n⟧"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
QWEN3 = QWEN_LF.replace("⟦", f"¦{NO_THOUGHT}⟦")
DEEPSEEK2 = "<BOS>S\n\n¦User: U1\n\nAssistant:⟦A1<EOS>⟧User: U2\n\nAssistant:⟦A2<EOS>⟧"
DEEPSEEK3 = "<BOS>S¦<｜User｜>U1<｜Assistant｜>⟦A1<EOS>⟧<｜User｜>U2<｜Assistant｜>⟦A2<EOS>⟧"
MISTRAL = "<BOS>S¦[INST] U1 [/INST]⟦A1<EOS>⟧[INST] U2 [/INST]⟦A2<EOS>⟧"
CHATGLM3 = "[gMASK]sop<|system|>¦\n¦S¦<|user|>\n¦U1¦<|assistant|>⟦\n¦A1⟧†<|user|>\n¦U2¦<|assistant|>⟦\n¦A2⟧⟦<EOS>⟧"
GLM4 = "[gMASK]<sop>¦<|system|>\nS¦<|user|>\nU1<|assistant|>⟦\nA1⟧†<|user|>\nU2<|assistant|>⟦\nA2⟧⟦<EOS>⟧"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3 = (
    "<BOS>"
    + HEADER.format("system")
    + "S<|eot_id|>¦"
    + HEADER.format("user")
    + "U1<|eot_id|>"
    + HEADER.format("assistant")
    + "⟦A1<EOS>⟧"
    + HEADER.format("user")
    + "U2<|eot_id|>"
    + HEADER.format("assistant")
    + "⟦A2<EOS>⟧"
)
FINAL = "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>"
GPT_OSS = (
    f"<|start|>system<|message|>S<|end|>¦<|start|>user<|message|>U1<|end|><|start|>assistant¦{FINAL}⟦A1<|end|>⟧†"
    f"<|start|>user<|message|>U2<|end|><|start|>assistant¦{FINAL}⟦A2<|end|>⟧⟦<EOS>⟧"
)
QWEN_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think><answer> answer here </answer>Put your final answer within \\\\boxed{}. "
)

PLAIN = {
    "alpaca": "S¦### Instruction:\nU1\n\n### Response:\n⟦A1<EOS>⟧\n\n¦### Instruction:\nU2\n\n### Response:\n⟦A2<EOS>⟧",
    "baichuan2": "S¦<reserved_106>U1<reserved_107>⟦A1⟧†<reserved_106>U2<reserved_107>⟦A2⟧⟦<EOS>⟧",
    "bailing_mini": (
        "<role>SYSTEM</role>S<|role_end|>¦<role>HUMAN</role>U1<|role_end|><role>ASSISTANT</role>⟦A1<|role_end|>⟧†"
        "<role>HUMAN</role>U2<|role_end|><role>ASSISTANT</role>⟦A2<|role_end|>⟧⟦<EOS>⟧"
    ),
    "chatglm2": "[gMASK]sop¦S¦[Round 0]\n\n问：U1\n\n答：⟦A1⟧†\n\n¦[Round 1]\n\n问：U2\n\n答：⟦A2⟧⟦<EOS>⟧",
    "chatglm3": CHATGLM3,
    "chatglm3_system": CHATGLM3,
    "chatml": CHATML,
    "chatml_de": CHATML,
    "cpm": "<BOS>S¦<用户>U1<AI>⟦A1<EOS>⟧<用户>U2<AI>⟦A2<EOS>⟧",
    "deepseek2": DEEPSEEK2,
    "deepseek2-lite": DEEPSEEK2,
    "deepseek3": DEEPSEEK3,
    "deepseek4": DEEPSEEK3.replace("⟦", "¦</think>⟦"),
    "default": "S\n¦Human: U1\nAssistant:⟦A1<EOS>⟧\n¦Human: U2\nAssistant:⟦A2<EOS>⟧",
    "empty": "S¦U1⟦A1⟧U2⟦A2⟧",
    "gemma": (
        "<BOS>S¦<start_of_turn>user\nU1<end_of_turn>\n<start_of_turn>model\n⟦A1⟧†<end_of_turn>\n¦<start_of_turn>user\n"
        "U2<end_of_turn>\n<start_of_turn>model\n⟦A2⟧⟦<EOS>⟧"
    ),
    "glm4": GLM4,
    "glm4_moe": GLM4.replace("⟦\n", f"¦{NO_THOUGHT}⟦\n"),
    "gpt": GPT_OSS.replace(f"¦{FINAL}⟦", f"⟦{FINAL}¦"),
    "gpt_oss": GPT_OSS,
    "hunyuan": "S¦U1⟦A1⟧U2⟦A2⟧",
    "intern2": "<BOS>" + QWEN_LF,
    "llama2": "<BOS>[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST]⟦A1<EOS>⟧<BOS>[INST] U2 [/INST]⟦A2<EOS>⟧",
    "llama3": LLAMA3,
    "magistral": (
        f"<BOS>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]¦[INST]U1[/INST]¦{NO_THOUGHT}⟦A1<EOS>⟧[INST]U2[/INST]¦{NO_THOUGHT}⟦A2<EOS>⟧"
    ),
    "minicpm3": DEEPSEEK2,
    "mistral": MISTRAL,
    "mixtral": MISTRAL,
    "plm": QWEN_LF,
    "qwen": CHATML,
    "qwen3": QWEN3,
    "qwen_lf": QWEN_LF,
    "qwen_math_r1": CHATML,
    "qwen_r1": CHATML.replace("user\nU", f"user\n{QWEN_R1}U"),
    "trl": "<BOS>S¦U1⟦A1⟧U2⟦A2⟧",
}
THINKING = {
    "qwen3": QWEN_LF.replace("⟦", f"⟦{NO_THOUGHT}¦"),
    "gpt_oss": GPT_OSS.replace(f"¦{FINAL}⟦", f"⟦{FINAL}¦"),
    "magistral": PLAIN["magistral"].replace(f"¦{NO_THOUGHT}⟦", f"⟦{NO_THOUGHT}¦"),
    "glm4_moe": GLM4.replace("⟦\n", f"⟦{NO_THOUGHT}¦\n"),
    "deepseek4": DEEPSEEK3.replace("⟦", "⟦<think></think>¦"),
}
DEFAULT_SYSTEMS = {
    "alpaca": ("Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"),
    "chatglm3_system": (
        "You are ChatGLM3, a large language model trained by Zhipu.AI. Follow the user's instructions "
        "carefully. Respond using markdown."
    ),
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "gpt": "You are ChatGPT, a large language model trained by OpenAI.",
    "gpt_oss": "You are ChatGPT, a large language model trained by OpenAI.",
    "hunyuan": "You are a helpful assistant.",
    "plm": "You are a helpful assistant.",
    "qwen": "You are a helpful assistant.",
    "qwen_lf": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen_math_r1": "Please reason step by step, and put your final answer within \\boxed{}.",
    "qwen_r1": "You are a helpful assistant.",
}
