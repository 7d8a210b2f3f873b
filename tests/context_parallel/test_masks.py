"""Masks, packed documents and masked losses over cut sequences: equal to whole ones, and documents do not see each other."""

import functools
import re

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.parity import runner

LENGTH, BATCH, EOD = 32, 2, 3
MODEL = {**job.UNTIED, "seq_length": LENGTH}
RING, ULYSSES, HYBRID = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
CUTS = {
    "ring2": {"context_parallel_size": 2, "context_parallel_algo": RING},
    "ring4": {"context_parallel_size": 4, "context_parallel_algo": RING},
    "ulysses2": {"context_parallel_size": 2, "context_parallel_algo": ULYSSES},
    "ulysses4": {"context_parallel_size": 4, "context_parallel_algo": ULYSSES},
    "hybrid2x2": {"context_parallel_size": 4, "context_parallel_algo": HYBRID, "ulysses_degree_in_cp": 2},
}
DOCUMENTS = [[5, 14, 13], [17, 15]]
_BAND = {"pre_tokens": 6, "next_tokens": 1, "sparse_mode": 0}
FIELDS = {
    "none": {},
    "window": {"sliding_window": 6},
    "sinks": {"softmax_type": "learnable"},
    "band": {"fa_config": _BAND},
    "band_flash": {"fa_config": _BAND, "use_flash_attention": True},
    "ignored_mask_flash": {"fa_config": {"sparse_mode": 2}, "use_flash_attention": True},
    "latent": {
        "group_query_attention": False,
        "num_query_groups": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
}


def _blocked(documents=DOCUMENTS, causal=True):
    """Mask `[b, 1, s, s]` of packed documents, 1 where a query may not look."""
    document = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in documents])
    visible = (document[:, :, None] == document[:, None, :]) & np.tri(LENGTH, k=0 if causal else LENGTH, dtype=bool)
    return (~visible).astype(np.uint8)[:, None]


def _batch(kind, seed=1):
    """Arrays of one micro-batch."""
    random = np.random.default_rng(seed)
    tokens = random.integers(4, 64, (BATCH, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}
    batch["loss_mask"] = (random.random((BATCH, LENGTH)) > 0.2).astype(np.float32)
    if kind == "documents":
        batch["attention_mask"] = _blocked()
    elif kind == "blind":
        batch["attention_mask"] = _blocked()
        batch["attention_mask"][:, :, 7] = 1  # a query that sees nothing
    elif kind == "both_sides":
        batch["attention_mask"] = _blocked(causal=False)
    elif kind == "intervals":
        starts = [np.repeat(np.cumsum([0, *lengths[:-1]]), lengths) for lengths in DOCUMENTS]
        batch["attention_mask"] = np.stack([starts, np.tile(np.arange(1, LENGTH + 1), (BATCH, 1))], -1).astype(np.int32)[
            :, None
        ]
    elif kind == "lengths":
        batch["actual_seq_len"] = np.array([[5, 14, 13], [17, 15, 0]], np.int32)
    elif kind == "general":
        hidden = random.random((BATCH, 1, LENGTH, LENGTH)) < 0.4
        hidden[:, :, 7] = True  # a query that sees nothing
        batch["attention_mask"] = hidden
    elif kind == "eod":
        batch["tokens"][0, [4, 18]] = batch["tokens"][1, [16, 31]] = EOD
    elif kind == "positions":
        batch["position_ids"] = np.tile(np.arange(LENGTH, dtype=np.int32)[::-1], (BATCH, 1))
    elif kind == "one_token":
        batch["loss_mask"][:] = 0
        batch["loss_mask"][1, 9] = 1
    elif kind == "masked_ranks":
        batch["loss_mask"][:, 8:] = 0
    elif kind == "sample_without_tokens":
        batch["loss_mask"][1] = 0
    return batch


def _model_class(kind):
    from mindspeed_ms.legacy.model.gpt_model import GPTModel

    return functools.partial(GPTModel, eod=EOD, reset_position_ids=True) if kind == "eod" else GPTModel


def run(kind, parallel, rank_slices=False, model_fields=None, **training):
    """Loss reported in two steps and in an evaluation, gradient norms, gradients of the first step."""
    from mindspore import Tensor

    from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
    from mindspeed_ms.training.evaluation import step_losses
    from mindspeed_ms.training.forward_step import forward_step

    fields = {**MODEL, "use_flash_attention": kind == "lengths", **(model_fields or {})}
    sections = {"dataset": {"batch_size": BATCH, "global_batch_size": 2 * BATCH}, "training": training}
    model, optimizer, step = job.build(job.make_config(fields, parallel, **sections), _model_class(kind))
    result = {"losses": [], "norms": []}
    runner._capture_first_gradients(optimizer, model, result)

    def micro_batches(number):
        found = [{k: Tensor(v) for k, v in _batch(kind, seed).items()} for seed in (number, number + 1)]
        if rank_slices:  # new Tensors: nothing but their length says that they are parts
            found = [{k: Tensor(v.asnumpy()) for k, v in get_batch_on_this_cp_rank(batch).items()} for batch in found]
        return found

    for number in range(2):
        report, _ = step(iter(micro_batches(number)), number + 1)
        result["losses"].append(report.loss)
        result["norms"].append(report.grad_norm)
    evaluated, _ = step_losses(forward_step, iter(micro_batches(5)), model, 1)
    result["losses"].append(next(iter(evaluated.values.values())))
    result["tokens"], result["without_tokens"] = evaluated.tokens, evaluated.samples_without_tokens
    return result


@functools.lru_cache(maxsize=32)
def _reference(world, kind, training, fields="none"):
    (result,) = world(1)(run, kind, {}, model_fields=FIELDS[fields], **dict(training))
    return result, runner.joined([result], "gradients")


def _check(world, kind, cut, rank_slices=False, fields="none", **training):
    parallel = CUTS[cut]
    expected, gradients = _reference(world, kind, tuple(training.items()), fields)
    results = world(parallel["context_parallel_size"])(run, kind, parallel, rank_slices, FIELDS[fields], **training)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-5)
        assert result["tokens"] == expected["tokens"] and result["without_tokens"] == expected["without_tokens"]
    found = runner.joined(results, "gradients")
    for name, values in gradients.items():
        assert np.linalg.norm(found[name] - values) <= 1e-5 * np.linalg.norm(values), name


KINDS = ("documents", "blind", "lengths", "general", "eod", "positions", "one_token", "masked_ranks", "sample_without_tokens")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_whole_sequences(world, kind, cut):
    _check(world, kind, cut)


@pytest.mark.parametrize("cut", ("ring2", "ulysses2", "hybrid2x2"))
@pytest.mark.parametrize("fields", [name for name in FIELDS if name != "none"])
def test_other_attentions(world, fields, cut):
    """Windows and bands together with documents, learned sinks, and multi-latent attention with a scale of its own."""
    _check(world, "both_sides" if fields.startswith("band") else "documents", cut, fields=fields)


@pytest.mark.parametrize("kind", ("plain", "one_token", "masked_ranks"))
@pytest.mark.parametrize("cut", ("ring2", "ulysses2"))
def test_losses_per_token(world, kind, cut):
    _check(world, kind, cut, calculate_per_token_loss=True)


@pytest.mark.parametrize("cut", ("ring2", "hybrid2x2"))
def test_batches_that_are_cut_already(world, cut):
    _check(world, "documents", cut, rank_slices=True)


@pytest.mark.parametrize("cut", CUTS)
def test_intervals_are_a_mask_of_documents(world, cut):
    """What the data sets hand over without a matrix gives the same bits."""
    size = CUTS[cut]["context_parallel_size"]
    one, other = (world(size)(run, kind, CUTS[cut])[0] for kind in ("documents", "intervals"))
    assert one["losses"] == other["losses"] and one["norms"] == other["norms"]


def rows_of_masks(kind, parallel):
    """Largest difference of the logits with the rows of this rank's part of a mask and with all of them."""
    from mindspore import Tensor

    from mindspeed_ms.core.autograd import no_grad
    from mindspeed_ms.core.context_parallel import local_position_ids

    model, _, _ = job.build(job.make_config(MODEL, parallel, dataset={"batch_size": BATCH}))
    batch = _batch(kind)
    places = local_position_ids(LENGTH // parallel["context_parallel_size"]).asnumpy()[0]
    part = np.ascontiguousarray(batch["attention_mask"][:, :, places])
    with no_grad():
        one, other = (
            model[0](tokens=Tensor(batch["tokens"]), attention_mask=Tensor(mask)).asnumpy()
            for mask in (batch["attention_mask"], part)
        )
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("cut", ("ring2", "ulysses2", "hybrid2x2"))
@pytest.mark.parametrize("kind", ("intervals", "documents", "general"))
def test_masks_may_be_cut(world, kind, cut):
    assert set(world(CUTS[cut]["context_parallel_size"])(rows_of_masks, kind, CUTS[cut])) == {0.0}


def visible_keys():
    """First visible keys of documents that leave tokens over; whether masks became intervals; a mask with wrong rows."""
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.context_parallel import VisibleKeys

    parallel_state.initialize_model_parallel()
    keys = VisibleKeys.of_documents([[3, 2], [0, 0], [4, 0, 1]], 8)
    without_rows = [VisibleKeys.of(Tensor(_batch(kind)["attention_mask"])).rows is None for kind in ("blind", "general")]
    with pytest.raises(ValueError, match="3 rows for 8 keys"):
        VisibleKeys.of(Tensor(np.zeros((1, 1, 3, 8), np.uint8)))
    return keys.first.tolist(), keys.stop.tolist(), without_rows


def test_documents_need_not_fill_the_sequence(world):
    ((first, stop, without_rows),) = world(1)(visible_keys)
    assert first == [[0, 0, 0, 3, 3, 5, 5, 5], [0] * 8, [0, 0, 0, 0, 4, 5, 5, 5]] and stop == [[*range(1, 9)]] * 3
    assert without_rows == [True, False]


def test_actual_lengths_are_a_mask_of_documents(world):
    """The same numbers as with the matrix, also without context parallelism."""
    one, other = (_reference(world, kind, ())[0] for kind in ("documents", "lengths"))
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-6)


def logits(kind, parallel, changed):
    """(logits of this rank's part, its positions), where `changed` is a token of the first document that differs."""
    from mindspore import Tensor

    from mindspeed_ms.core.autograd import no_grad
    from mindspeed_ms.core.context_parallel import local_position_ids

    model, _, _ = job.build(job.make_config(MODEL, parallel, dataset={"batch_size": BATCH}), _model_class(kind))
    batch = _batch(kind)
    batch["tokens"][0, 2] = 40 + changed
    inputs = {name: Tensor(value) for name, value in batch.items() if name not in ("labels", "loss_mask")}
    with no_grad():
        output = model[0](**inputs).asnumpy()
    return output, local_position_ids(output.shape[1]).asnumpy()[0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ("documents", "lengths", "eod"))
def test_documents_do_not_see_each_other(world, kind, cut):
    """A token of the first document changes nothing in the others, to the bit."""
    size = CUTS[cut]["context_parallel_size"]
    one, other = (world(size)(logits, kind, CUTS[cut], changed) for changed in (0, 1))
    differs = np.zeros((BATCH, LENGTH), bool)
    for (first, positions), (second, _) in zip(one, other):
        differs[:, positions] = (first != second).any(axis=-1)
    assert differs[0, 2:5].all() and not differs[0, 5:].any() and not differs[1].any() and not differs[0, :2].any()


def complaints(parallel):
    """Messages about wrong lengths of documents, and about labels outside the vocabulary at positions 4 to 23."""
    from mindspore import Tensor

    model, _, _ = job.build(job.make_config(MODEL, parallel, dataset={"batch_size": BATCH}))
    batch, found = _batch("plain"), []
    batch["labels"][1, 4:24] = 99
    batch["loss_mask"][:] = 1
    for lengths in ([5, 27], [[5.5, 2], [1, 2]], [[5], [6], [7]], [[5, 19, 32]], [[40, -20]], None):
        inputs = batch if lengths is None else {**batch, "actual_seq_len": np.array(lengths)}
        try:
            model[0](**{name: Tensor(value) for name, value in inputs.items()})
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


@pytest.mark.parametrize("parallel", ({}, CUTS["ring2"]), ids=("whole", "ring2"))
def test_wrong_lengths_and_labels_are_named(world, parallel):
    labels = []
    for *lengths, label in world(parallel.get("context_parallel_size", 1))(complaints, parallel):
        for text, shape in zip(lengths, (r"\(2,\)", r"\(2, 2\) and float", r"\(3, 1\)")):
            assert re.search(f"actual_seq_len of shape {shape}.* 2 samples: expected integers", text)
        assert "actual_seq_len" in lengths[3] and "no running sums" in lengths[3]
        assert "[40, -20] (actual_seq_len)" in lengths[4]
        labels.append(label)
    assert all(f"sample 1, position {place})" in text for place, text in zip((4, 8), labels))


def refusals(fields):
    """Messages about generation over cut sequences, and about settings that no check of a configuration saw."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model.gpt_model import GPTModel

    all_config = job.make_config({**MODEL, **fields}, CUTS["ring2"])
    model, _, _ = job.build(all_config)
    model[0].set_train(False)
    with pytest.raises(ValueError) as generation:
        model[0](tokens=Tensor(_batch("plain")["tokens"]), inference_params=object())
    all_config.model_config.attention_dropout = 0.1
    with pytest.raises(ValueError) as dropout:
        GPTModel(all_config.model_config)
    all_config.model_config.attention_dropout = 0.0
    all_config.model_config.mtp_num_layers = 1
    with pytest.raises(ValueError) as further:
        GPTModel(all_config.model_config)
    return str(generation.value), str(dropout.value), str(further.value)


@pytest.mark.parametrize("fields", ("none", "latent"))
def test_what_cut_sequences_cannot_do_is_refused(world, fields):
    for generation, dropout, further in world(2)(refusals, FIELDS[fields]):
        assert "context_parallel_size above 1: load the model without it" in generation
        assert "attention_dropout 0.1 cannot be combined with context_parallel_size above 1" in dropout
        assert "mtp_num_layers 1 cannot be combined with context_parallel_size above 1" in further


def test_whole_sequences_keep_their_attention_dropout(world):
    """Without context parallelism the core attention runs, which alone knows of dropout."""
    plain, dropped = (world(1)(job.train, {**job.UNTIED, "attention_dropout": rate}, steps=1)[0]["loss"] for rate in (0.0, 0.5))
    assert abs(plain[0] - dropped[0]) > 1e-4
