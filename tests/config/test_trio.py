"""The 38BV3 trio: as shipped, with its commented lines, against arguments, and each key."""

import os
import re
from pathlib import Path

import pytest

from mindspeed_ms.config import (
    ConfigError,
    argument_parser,
    fit_to_world,
    init_configs_from_args,
    init_configs_from_dict,
    init_configs_from_yaml,
)
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.config.settings import nested_settings
from mindspeed_ms.config.trio_table import SECTION_KEYS, TRIO
from mindspeed_ms.layout.parameters import count_parameters

FOLDER = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "38BV3")
FILES = [os.path.join(FOLDER, f"model_38BV3_seq_4K{part}.yaml") for part in ("", "_device_B2_accelerate", "_train")]
# the command line of the same model, with every default that differs from Megatron's spelled out
FLAGS = """
    --padded-vocab-size 165664 --make-vocab-size-divisible-by 16 --hidden-size 6144 --num-layers 62
    --num-attention-heads 48
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 27648 --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --use-sandwich-norm --attn-post-norm-scale 0.0447 --ffn-post-norm-scale 0.0825 --untie-embeddings-and-output-weights
    --disable-bias-linear --init-method-std 0.00884 --embedding-init-std 0.5
    --attention-dropout 0.0 --hidden-dropout 0.0
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-rmsnorm --use-fused-swiglu --no-bias-gelu-fusion
    --bf16 --params-dtype float32 --embedding-dtype float32 --attention-softmax-in-fp32
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
    --micro-batch-size 1 --bucket-size 200000000 --no-check-for-nan-in-grad --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --optimizer AdamWeightDecay --lr 1e-3 --lr-decay-style constant --weight-decay 0.0 --clip-grad 0.0
    --use-checkpoint-opt_param-scheduler --save ./output
"""


def commented_on(text):
    """A file of the trio with the guide's commented values switched on."""
    return re.sub(r"(?m)^(\s+\w+:)\s+# (\"|\d)", r"\1 \2", text)


@pytest.fixture
def with_comments(tmp_path):
    paths = []
    for file in FILES:
        with open(file, encoding="utf-8") as source:
            text = source.read()
        target = tmp_path / os.path.basename(file)
        target.write_text(commented_on(text), encoding="utf-8")
        paths.append(str(target))
    return paths


def test_as_shipped():
    all_config = init_configs_from_yaml(FILES)
    assert all_config.notices == []
    fit_to_world(all_config, 128)
    assert all_config.parallel_config.data_parallel_size == 4
    assert describe_model(all_config).stages.stage_totals == [15, 16, 16, 15]
    assert count_parameters(describe_model(all_config)) == 39_093_884_928
    model, training = all_config.model_config, all_config.training_config
    assert (model.params_dtype, model.compute_dtype, training.bf16) == ("float32", "bfloat16", True)
    assert (model.num_query_groups, model.kv_channels, model.normalization) == (8, 128, "FusedRMSNorm")
    assert (model.embedding_init_std, model.init_method_std) == (0.5, 0.00884)
    assert training.accumulate_allreduce_grads_in_fp32 and training.bucket_size == 200_000_000


def test_with_the_guide_s_commented_lines(with_comments):
    all_config = init_configs_from_yaml(with_comments)
    # the one that says that it is done in any case
    assert [notice for notice in all_config.notices if "select_comm_recompute: ignored" not in notice] == []
    fit_to_world(all_config, 128)
    assert all_config.parallel_config.virtual_pipeline_model_parallel_size == 4
    assert describe_model(all_config).stages.stage_totals == [16, 16, 16, 14]
    assert all_config.parallel_config.select_comm_recompute[3] == [4, 4, 4, 2]
    assert count_parameters(describe_model(all_config)) == 39_093_884_928


def test_world_of_8():
    with pytest.raises(ConfigError, match="needs a multiple of 32"):
        fit_to_world(init_configs_from_yaml(FILES), 8)


def test_order_of_files_and_keys_does_not_matter(tmp_path):
    whole = tmp_path / "any_name.yml"
    whole.write_text("\n".join(Path(file).read_text(encoding="utf-8") for file in reversed(FILES)), encoding="utf-8")
    assert init_configs_from_yaml(FILES) == init_configs_from_yaml(FILES[::-1]) == init_configs_from_yaml(str(whole))


def test_the_guide_s_folder_is_a_link():
    link = os.path.join(FOLDER, "..", "..", "gpt", "config", "38BV3")
    assert os.path.islink(link) and os.readlink(link) == "../../configs/38BV3"
    assert init_configs_from_yaml(os.path.join(link, os.path.basename(FILES[0]))) is not None


def test_the_same_model_from_a_megatron_command_line():
    from_args = init_configs_from_args(argument_parser().parse_args(FLAGS.split()))
    from_yaml = init_configs_from_yaml(FILES)
    expected, found = from_yaml.to_dict(), from_args.to_dict()
    differing = {
        (name, key): (value, found[name][key])
        for name, section in expected.items()
        for key, value in section.items()
        if found[name][key] != value
    }
    # these say how a run is watched, not which model is trained: the guide logs and evaluates otherwise than Megatron
    assert set(differing) <= {("training_config", name) for name in ("seed", "log_interval", "eval_interval")}
    more = " --log-interval 1 --eval-interval 1 --seed 1"
    again = init_configs_from_args(argument_parser().parse_args((FLAGS + more).split()))
    same = init_configs_from_yaml(FILES, training_config={"log_interval": 1, "eval_interval": 1, "seed": 1})
    assert again == same


# a value for each key of the trio and the settings that it must give
KEYS = {
    "train_config.recompute_config.recompute": ("[1, 0]", {"parallel_config.recompute": [1, 0]}),
    "train_config.recompute_config.select_recompute": ([1, 0], {"parallel_config.select_recompute": [1, 0]}),
    "train_config.recompute_config.select_comm_recompute": ([1, 0], {"parallel_config.select_comm_recompute": [1, 0]}),
    "accelerate_config.parallelization.pipeline.layer_list": ("[3, 1]", {"parallel_config.num_layer_list": [3, 1]}),
    "accelerate_config.parallelization.pipeline.noop_layers": ("2,3", {"parallel_config.noop_layers": [2, 3]}),
    "accelerate_config.precision.param_init_dtype": (
        "float16",
        {"model_config.params_dtype": "float16", "model_config.embedding_init_dtype": "float16"},
    ),
    "accelerate_config.precision.compute_dtype": (
        "float16",
        {"model_config.compute_dtype": "float16", "training_config.fp16": True},
    ),
    "accelerate_config.precision.softmax_compute_dtype": ("fp32", {"model_config.attention_softmax_in_fp32": True}),
    "accelerate_config.precision.logits_compute_dtype": ("float16", {"model_config.fp16_lm_cross_entropy": True}),
    "accelerate_config.precision.grad_accumulation_dtype": (
        "float32",
        {"training_config.accumulate_allreduce_grads_in_fp32": True},
    ),
    "accelerate_config.precision.residual_connection": ("float32", {"model_config.residual_connection_dtype": "float32"}),
    "accelerate_config.precision.fused_operators": ("flash_attention", {"model_config.use_flash_attention": True}),
    "accelerate_config.precision.nofused_operators": ("bias_gelu", {"model_config.bias_gelu_fusion": False}),
    "accelerate_config.parallelization.context_parallel_algo": (
        "megatron_cp_algo",
        {"parallel_config.context_parallel_algo": "megatron_cp_algo"},
    ),
    "model_config.llm.position.type": ("rope", {"model_config.position_embedding_type": "rope"}),
    "model_config.llm.position.max_size": (64, {"model_config.seq_length": 64, "model_config.max_position_embeddings": 64}),
    "model_config.llm.blocks.attention.attention_type": ("GQA", {"model_config.group_query_attention": True}),
    "model_config.llm.blocks.layernorm.norm_type": ("RMSNorm", {"model_config.normalization": "RMSNorm"}),
    "model_config.llm.blocks.ffn.activation": ("silu", {"model_config.hidden_act": "silu"}),
    "model_config.llm.head.shared_embedding": (True, {"model_config.untie_embeddings_and_output_weights": False}),
    "model_config.llm.tokenizer.type": ("NullTokenizer", {"dataset_config.tokenizer_type": "NullTokenizer"}),
    "model_config.llm.tokenizer.model": ("a.model", {"dataset_config.tokenizer_model": "a.model"}),
    "model_config.llm.tokenizer.name_or_path": ("folder", {"dataset_config.tokenizer_name_or_path": "folder"}),
}


@pytest.mark.parametrize("key", TRIO, ids=list(TRIO))
def test_each_key(key):
    from mindspeed_ms.config.readers import settings_of_documents
    from mindspeed_ms.config.settings import build
    from mindspeed_ms.config.yaml_loader import Document
    from tests.config.samples import BASE, value_at

    entry = TRIO[key]
    switches = ("True", "False")
    value, expected = KEYS.get(key, (None, None))
    if value is None:
        from mindspeed_ms.config.argument_table import row_at

        takes = row_at(entry.path).expects
        value = not row_at(entry.path).guide_default if "switch" in takes else 0.5 if "number" in takes else 2
        expected = {entry.path: value}
    raw = {}
    node = raw
    for word in key.split(".")[:-1]:
        node = node.setdefault(word, {})
    node[key.rpartition(".")[2]] = value
    settings = nested_settings({name: dict(section) for name, section in BASE.items()})
    settings.update(settings_of_documents([Document("file.yaml", raw)]))
    all_config = build(settings)
    for path, item in expected.items():
        assert value_at(all_config, path) == item, (path, switches)


def test_sections_below_the_trio_take_their_own_fields():
    for key, section in SECTION_KEYS.items():
        top, name = key.split(".")
        field = next(iter(__import__("mindspeed_ms.config.schema", fromlist=["SECTIONS"]).SECTIONS[section].own_fields()))
        with pytest.raises(ConfigError, match=rf"{key}\.{field}x"):
            init_configs_from_dict({top: {name: {field + "x": 1}}})


BAD = [
    ({"train_config": {"ms_training_cfg": {}}}, "ms_training_config"),
    ({"accelerate_config": {"parallelization": {"tensor_paralel": 8}}}, "tensor_parallel"),
    ({"accelerate_config": {"parallelization": 8}}, "expects keys below it"),
    ({"accelerate_config": {"precision": {"compute_dtype": "f32"}}}, "float32, float16 or bfloat16"),
    ({"accelerate_config": {"precision": {"logits_compute_dtype": "bfloat16"}}}, "float32 or float16"),
    ({"accelerate_config": {"precision": {"fused_operators": "rope, gelu"}}}, "does not know the operator 'gelu'"),
    ({"accelerate_config": {"precision": {"fused_operators": "rope", "nofused_operators": "rope"}}}, "keep one"),
    ({"accelerate_config": {"precision": {"fused_operators": "rmsnorm"}}}, "take rmsnorm out of the list"),
    ({"model_config": {"llm": {"blocks": {"attention": {"attention_type": "XQA"}}}}}, "expects MHA, GQA or MQA"),
    ({"model_config": {"llm": {"blocks": {"ffn": {"hiden_size": 4}}}}}, "hidden_size"),
    ({"model_config": {"llm": {"head": {"shared_embedding": "perhaps"}}}}, "expects True or False"),
    (
        {"model_config": {"llm": {"blocks": {"num_layers": 0}}}},
        "model_config.llm.blocks.num_layers = 0: expects an integer > 0",
    ),
]


@pytest.mark.parametrize(("raw", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_trio(raw, words):
    with pytest.raises(ConfigError) as caught:
        init_configs_from_dict(raw)
    assert words in str(caught.value)


def test_square_list_that_upstream_reads_otherwise_is_announced_once():
    raw = {
        "parallel_config": {"pipeline_model_parallel_size": 2, "num_layer_list": [[2, 2], [1, 1]]},
        "model_config": {
            "vocab_size": 8,
            "num_layers": 6,
            "num_attention_heads": 1,
            "hidden_size": 8,
            "ffn_hidden_size": 8,
            "seq_length": 8,
        },
    }
    (notice,) = init_configs_from_dict(raw).notices
    assert "[4, 2]" in notice and "[3, 3]" in notice and "vpp_pp" in notice
    raw["parallel_config"]["num_layer_list"] = [[3, 2], [0, 1]]
    with pytest.raises(ConfigError, match="above 0"):
        init_configs_from_dict(raw)
    raw["parallel_config"] |= {"num_layer_list": [[2, 2], [1, 1]], "num_layer_list_order": "vpp_pp"}
    assert init_configs_from_dict(raw).notices == []
