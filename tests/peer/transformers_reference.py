"""Ids and rendered conversations by transformers; runs in a process of its own: FOLDER QUESTION.json ANSWER.json."""

import json
import sys

from transformers import AutoTokenizer

if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        question = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], use_fast=question.get("use_fast", True))
    answer = {
        "ids": [tokenizer(text).input_ids for text in question["texts"]],
        "plain": [tokenizer.encode(text, add_special_tokens=False) for text in question["texts"]],
        "size": len(tokenizer),
        "roles": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    if "messages" in question:
        answer["chat"] = tokenizer.apply_chat_template(
            question["messages"], tools=question["tools"], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(answer, file)
