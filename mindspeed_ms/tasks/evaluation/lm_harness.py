"""Model class for lm-evaluation-harness (package lm_eval), where that is installed."""

from mindspeed_ms.inference.requests import Request
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.tasks.evaluation.perplexity import windows_of
from mindspeed_ms.tasks.evaluation.scoring import encode_pair, likelihoods, prefix_of


def harness_model(engine, batch_size=8):
    """An `lm_eval.api.model.LM` of an Engine: `lm_eval.simple_evaluate(model=harness_model(engine), tasks=[...])`.

    Raises:
        ImportError: lm_eval is not installed.
    """
    from lm_eval.api.model import LM

    class EngineModel(HarnessMethods, LM):
        """LM of an Engine."""

        def __init__(self):
            LM.__init__(self)
            HarnessMethods.__init__(self, engine, batch_size)

    return EngineModel()


class HarnessMethods:
    """The three methods of lm_eval's LM, on instances with `args`.

    Args:
        engine (Engine): with a tokenizer.
        batch_size (int): sequences at a time.
    """

    def __init__(self, engine, batch_size=8):
        self.engine, self.runner, self.tokenizer = engine, engine.runner, engine.tokenizer
        self.batch_size = batch_size

    def loglikelihood(self, requests, **options):
        """(log-likelihood, is greedy) of each request's `args` (context, continuation)."""
        pairs = [encode_pair(self.tokenizer, *one.args) for one in requests]
        return [(found.total, found.is_greedy) for found in likelihoods(self.runner, pairs, self.batch_size)]

    def loglikelihood_rolling(self, requests, **options):
        """Log-likelihood of each request's text, `args` (text,), each token scored once."""
        return [self._rolling(one.args[0]) for one in requests]

    def _rolling(self, text):
        ids = [*prefix_of(self.tokenizer), *self.tokenizer.tokenize(text, add_special_tokens=False)]
        longest = self.runner.max_sequence_length
        windows = windows_of(len(ids), longest, longest - 1)
        pairs = [(ids[start:first], ids[first:stop]) for start, stop, first in windows]
        return sum(found.total for found in likelihoods(self.runner, pairs, self.batch_size))

    def generate_until(self, requests, **options):
        """Text of each request, `args` (context, {"until": [...], "max_gen_toks": n, "do_sample": ..., "temperature": ...})."""
        made, room = [], self.runner.max_sequence_length
        for one in requests:
            context, settings = one.args
            until = settings.get("until") or []
            temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
            tokens = min(int(settings.get("max_gen_toks", 256)), room - 1)
            params = SamplingParams(
                max_new_tokens=tokens,
                temperature=temperature,
                stop=(until,) if isinstance(until, str) else tuple(until),
                seed=0,
            )
            prompt = self.engine.encode(context)[-(room - tokens) :]
            made.append(Request(prompt, params))
        completions = self.engine.generate([one.prompt for one in made], [one.params for one in made])
        return [completion.text for completion in completions]
