"""GPTModel takes Megatron core's keywords if they say what the configuration says, and names the setting if they do not."""

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 16 "
    "--padded-vocab-size 32 --micro-batch-size 1 --train-iters 1 --position-embedding-type rope --rotary-percent 0.5 "
    "--untie-embeddings-and-output-weights"
).split()


def _build(changes):
    """As model_provider of MindSpeed-LLM's BaseTrainer does, from the arguments; returns the error or the model's table."""
    from mindspeed_ms.config import init_configs_from_args
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.initialize import parse_args
    from mindspeed_ms.training.utils import set_parallel_context

    args = parse_args(argv=FLAGS)
    all_config = init_configs_from_args(args)
    set_parallel_context(all_config.parallel_config)
    keywords = {
        "config": all_config.model_config,
        "transformer_layer_spec": None,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": True,
        "post_process": True,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "mtp_block_spec": None,
        "vp_stage": 0,
        **changes,
    }
    try:
        model = GPTModel(**keywords)
    except ValueError as error:
        return str(error)
    return model.language_model.embedding.word_embeddings.weight.shape


def _all(cases):
    return [_build(changes) for changes in cases]


REFUSED = {
    "transformer_layer_spec": ("a spec", "no specs exist here: the layers follow from the configuration"),
    "vocab_size": (33, "the configuration says 32: model_config.vocab_size (--padded-vocab-size) decides"),
    "max_sequence_length": (8, "says 16: model_config.max_position_embeddings (--max-position-embeddings) decides"),
    "fp16_lm_cross_entropy": (True, "says False: model_config.fp16_lm_cross_entropy (--fp16-lm-cross-entropy) decides"),
    "share_embeddings_and_output_weights": (True, "says False: model_config.untie_embeddings_and_output_weights (--"),
    "position_embedding_type": ("learned_absolute", "says 'rope': model_config.position_embedding_type (--"),
    "rotary_percent": (1.0, "says 0.5: model_config.rotary_percent (--rotary-percent) decides"),
    "rotary_base": (5, "says 10000.0: model_config.rotary_base (--rotary-base) decides"),
    "rope_scaling": (True, "says False: model_config.rope_scaling.type (--"),
    "seq_len_interpolation_factor": (2.0, "says None: model_config.rotary_seq_len_interpolation_factor (--"),
    "mtp_block_spec": ("a spec", "model_config.mtp_num_layers, --mtp-num-layers"),
    "vp_stage": (1, "the chunk that is built is 0"),
    "scatter_embedding_sequence_parallel": (False, "expected True"),
    "num_tokentypes": ("a spec", "by name"),
    "pg_collection": (1, "GPTModel does not know pg_collection: expected some of eod"),
}


def test_keywords(world):
    results = world(1)(_all, [{}, *({name: value} for name, (value, _) in REFUSED.items())])[0]
    assert results[0] == (32, 16)
    for (name, (_, message)), error in zip(REFUSED.items(), results[1:]):
        assert name in error and message in error, error
