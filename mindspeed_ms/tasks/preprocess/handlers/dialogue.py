"""Handlers of conversations that a template renders: instruction data, preference pairs, prompts."""

from mindspeed_ms.core.datasets.tokenizer.chat_template import TemplateError
from mindspeed_ms.tasks.preprocess.chat_template import get_template
from mindspeed_ms.tasks.preprocess.conversations import RecordReader
from mindspeed_ms.tasks.preprocess.errors import BadRecord, Unusable
from mindspeed_ms.tasks.preprocess.handlers.base import RecordHandler, append_end
from mindspeed_ms.tasks.preprocess.messages import ASSISTANT
from mindspeed_ms.tasks.preprocess.registry import HANDLER_KINDS
from mindspeed_ms.tasks.preprocess.templates import fix_tokenizer
from mindspeed_ms.tasks.preprocess.truncation import CUT, FILLS, balanced_lengths, fit

_LLAMA_FACTORY_CLASSES = ("LFDefaultTemplate", "ReasoningTemplate")


class DialogueHandler(RecordHandler):
    """Base class of handlers of conversations. Args and attributes: see Handler."""

    def __init__(self, settings, tokenizer):
        super().__init__(settings, tokenizer)
        self.reader = RecordReader(HANDLER_KINDS[settings.handler_name].style, settings.map_keys)
        self.template = get_template(settings.prompt_type, settings.prompt_type_path, settings.enable_thinking, tokenizer)
        fix_tokenizer(tokenizer, self.template)
        self.pad = tokenizer.pad
        self._ends = int(self.template.efficient_eos) + int(settings.append_eod)
        self._end = tokenizer.eod if settings.append_eod else None
        if not self.template.answers_end and not settings.append_eod:
            self.remarks.append(
                f"the template {self.template.name} ends no answer, so a model would not learn to stop: add "
                "--append-eod unless the answers end with a token of their own"
            )

    def check_first(self, records):
        """See Handler."""
        self.reader.check_first(records)

    def turns(self, conversation, messages=None, limit=None):
        """Turns of a Conversation cut to `limit` tokens: (list of (source ids, target ids), names of the parts cut off)."""

        def render(part):
            try:
                return self.template.encode_multiturn(self.tokenizer, part, conversation.system, conversation.tools)
            except TemplateError as error:
                raise BadRecord(str(error), "refused by the template") from error

        favours_target = self.template.template_class in _LLAMA_FACTORY_CLASSES
        return fit(render, messages or conversation.messages, limit, self.settings.truncation, favours_target)

    def budget(self):
        """Number of tokens (Optional[int]) for turns, without the end tokens."""
        length = self.settings.seq_length
        return None if length is None else max(length - self._ends, 0)

    def finish(self, turns, note):
        """(ids, labels) of turns, with the end tokens of the template and the settings."""
        ids, labels = self.template.ids_and_labels(self.tokenizer, turns)
        if self._end is not None:
            append_end(ids, labels, self._end)
        if self.tokenizer.bos is not None and ids[:2] == [self.tokenizer.bos] * 2:
            note("samples with two begin tokens")
        return ids, labels


class InstructionHandler(DialogueHandler):
    """Handler of instruction data: answers are learnt, everything else is masked."""

    keys = ("input_ids", "attention_mask", "labels")

    def sample(self, record, note):
        """See RecordHandler."""
        conversation = self.reader.conversation(record)
        turns, cut = self.turns(conversation, limit=self.budget())
        # answers decide, not an end token behind a cut answer
        if not any(target for _, target in turns):
            raise Unusable("all labels masked" + (": the question fills --seq-length" if cut else ""))
        for text in (*self.template.left_out(conversation.messages), *cut):
            note(text)
        ids, labels = self.finish(turns, note)
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


class PairwiseHandler(DialogueHandler):
    """Handler of preference pairs: a question with a better and a worse answer; only the answers are learnt."""

    keys = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")

    def sample(self, record, note):
        """See RecordHandler."""
        conversation, *answers = self.reader.pair(record)
        targets = [self._target(conversation, answer) for answer in answers]
        if self.settings.seq_length and max(map(len, targets)) >= self.settings.seq_length:
            note(FILLS)
        # both answers share the question, so it is cut for the longer one
        longest = max(range(len(targets)), key=lambda number: len(targets[number]))
        prompt, length, cut = self._prompt(conversation, answers[longest])
        targets = [target[:length] for target in targets]
        if not all(targets):
            raise Unusable("all labels masked: the question fills --seq-length")
        for text in (*self.template.left_out([*conversation.messages, *answers]), *cut):
            note(text)
        sample = {}
        for name, target in zip(("chosen", "rejected"), targets):
            ids, labels = self.finish([(prompt, target)], note)
            sample[f"{name}_input_ids"], sample[f"{name}_labels"] = ids, labels
        return sample

    def _prompt(self, conversation, answer):
        """(ids before an answer, limit of the answer's length, names of the parts cut off)."""
        budget, in_order = self.budget(), self.settings.truncation == "oldest-first"
        turns, cut = self.turns(conversation, [*conversation.messages, answer], None if in_order else budget)
        prompt, target = joined(turns)
        if in_order and budget is not None and len(prompt) + len(target) > budget:
            lengths = balanced_lengths(len(prompt), len(target), budget)
            return prompt[: lengths[0]], lengths[1], (CUT,)
        return prompt, len(target), cut

    def _target(self, conversation, answer):
        """Ids of an answer."""
        turns, _ = self.turns(conversation, [*conversation.messages, answer])
        return turns[-1][1]


class PromptHandler(DialogueHandler):
    """Handler of prompts: questions up to the beginning of the answer."""

    keys = ("input_ids", "attention_mask")

    def sample(self, record, note):
        """See RecordHandler."""
        conversation = self.reader.prompt(record)
        turns, _ = self.turns(conversation, [*conversation.messages, {"role": ASSISTANT, "content": ""}])
        ids, _ = joined(turns)
        if self.settings.seq_length and len(ids) > self.settings.seq_length:
            raise Unusable("longer than --seq-length")
        for text in self.template.left_out(conversation.messages):
            note(text)
        if self.tokenizer.bos is not None and ids[:2] == [self.tokenizer.bos] * 2:
            note("samples with two begin tokens")
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def joined(turns):
    """(ids before the last answer, ids of the last answer)."""
    before = [number for source, target in turns[:-1] for number in (*source, *target)]
    return before + turns[-1][0], turns[-1][1]
