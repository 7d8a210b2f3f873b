"""A small model, its data, and a float64 account of its losses, for tests of the training loop."""

import os

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

VOCABULARY, WIDTH, LENGTH = 11, 6, 5


def initial_weights():
    generator = np.random.RandomState(5)
    return (
        generator.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        generator.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        np.ones(WIDTH, np.float32),
    )


class TinyModel(nn.Cell):
    """Predicts a label from the token alone; gives the masked mean loss, or logits without labels."""

    def __init__(self):
        super().__init__()
        embedding, head, gain = initial_weights()
        self.embedding = Parameter(Tensor(embedding), name="embedding")
        self.head = Parameter(Tensor(head), name="head")
        self.gain = Parameter(Tensor(gain), name="gain")

    def construct(self, tokens, labels, loss_mask, scale=None):
        hidden = mint.tanh(ops.gather(self.embedding, tokens, 0)) * self.gain
        logits = mint.matmul(hidden, mint.transpose(self.head, 0, 1))
        if labels is None:
            return logits
        picked = ops.gather_elements(logits, 2, labels.astype(ms.int32).expand_dims(2)).squeeze(2)
        # ops.logsumexp is not reproducible in its first calls
        losses = mint.log(mint.sum(mint.exp(logits), 2)) - picked
        if scale is not None:
            losses = losses * scale
        count = mint.sum(loss_mask)
        return mint.sum(losses * loss_mask) / (count + (count == 0).astype(ms.float32))


def model_provider(pre_process=True, post_process=True):
    assert pre_process and post_process
    return TinyModel()


def samples(count, seed=0):
    """Batch dict of `count` rows; the mask drops different numbers of tokens per row."""
    generator = np.random.RandomState(seed)
    tokens = generator.randint(0, VOCABULARY, (count, LENGTH)).astype(np.int32)
    mask = (generator.random_sample((count, LENGTH)) < 0.7).astype(np.float32)
    mask[:, 0] = 1.0
    return {"tokens": tokens, "labels": (tokens * 3 + 1) % VOCABULARY, "loss_mask": mask}


class Samples:
    """The rows of `samples` by index."""

    def __init__(self, count, seed=0):
        self.batch = samples(count, seed)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.batch.items()}


def rows_of(batch, rows):
    return {name: value[rows] for name, value in batch.items()}


def make_config(folder, training=None, dataset=None, optimizer=None, parallel=None):
    """AllConfig of a run of the tiny model; micro-batch 2, global batch 4, AdamW at 0.05."""
    from mindspeed_ms.config import init_configs_from_dict

    return init_configs_from_dict(
        {
            "parallel_config": {**(parallel or {})},
            "dataset_config": {"batch_size": 2, "micro_batch_num": 2, **(dataset or {})},
            "training_config": {
                "seed": 7,
                "training_iters": 6,
                "output_dir": os.fspath(folder),
                "wrap_with_ddp": True,
                **(training or {}),
            },
            "optimizer_config": {
                "learning_rate": 0.05,
                "weight_decay": 0.1,
                "betas": [0.9, 0.95],
                "clip_grad": 1.0,
                **(optimizer or {}),
            },
            "model_config": {
                "vocab_size": 16,
                "num_layers": 1,
                "num_attention_heads": 2,
                "hidden_size": 8,
                "ffn_hidden_size": 8,
                "seq_length": LENGTH + 3,
                "num_query_groups": 2,
            },
        }
    )


def weights_of(run):
    """Copies of the trained weights in full (dict of numpy arrays); all ranks call it."""
    from mindspeed_ms.training.checkpointing import whole_parameters

    with whole_parameters(run.model):
        return {name: np.array(parameter.asnumpy()) for name, parameter in run.model[0].module.parameters_and_names()}


class Reference:
    """The same training in float64, one sample at a time."""

    def __init__(self, lr=0.05, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0):
        embedding, head, gain = (value.astype(np.float64) for value in initial_weights())
        self.weights = {"embedding": embedding, "head": head, "gain": gain}
        self.settings = lr, weight_decay, betas, clip
        self.moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in self.weights.items()}
        self.steps = 0

    def loss_and_gradients(self, batch):
        """(sum of losses, tokens, gradients of the sum)."""
        weights = self.weights
        activation = np.tanh(weights["embedding"][batch["tokens"]])
        hidden = activation * weights["gain"]
        logits = hidden @ weights["head"].T
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        one_hot = np.eye(VOCABULARY)[batch["labels"]]
        mask = batch["loss_mask"].astype(np.float64)[..., None]
        loss = -(np.log((probabilities * one_hot).sum(-1)) * mask[..., 0]).sum()
        grad_logits = (probabilities - one_hot) * mask
        grad_hidden = grad_logits @ weights["head"]
        grads = {
            "head": np.einsum("bsv,bsh->vh", grad_logits, hidden),
            "gain": (grad_hidden * activation).sum((0, 1)),
            "embedding": np.zeros_like(weights["embedding"]),
        }
        np.add.at(grads["embedding"], batch["tokens"], grad_hidden * weights["gain"] * (1 - activation**2))
        return loss, mask.sum(), grads

    def step(self, micro_batches, per_token=False):
        """One step over micro-batches (of all data-parallel ranks); returns (reported loss, gradient norm)."""
        parts = [self.loss_and_gradients(batch) for batch in micro_batches]
        tokens = sum(part[1] for part in parts)
        divisors = [tokens if per_token else part[1] * len(parts) for part in parts]
        grads = {name: sum(part[2][name] / divisor for part, divisor in zip(parts, divisors)) for name in self.weights}
        norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        self._update(grads, norm)
        return sum(part[0] for part in parts) / tokens, norm

    def _update(self, grads, norm):
        lr, weight_decay, (beta1, beta2), clip = self.settings
        self.steps += 1
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, value in self.weights.items():
            grad = grads[name] * factor
            first, second = self.moments[name]
            first = beta1 * first + (1 - beta1) * grad
            second = beta2 * second + (1 - beta2) * grad**2
            self.moments[name] = first, second
            decay = weight_decay if value.ndim > 1 else 0.0
            root = np.sqrt(second / (1 - beta2**self.steps)) + 1e-8
            self.weights[name] = value * (1 - lr * decay) - lr * first / (1 - beta1**self.steps) / root
