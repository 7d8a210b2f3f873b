"""Start of a run: seeds, arguments, groups of ranks, and the configuration from the command line."""

import numpy as np
import pytest

from tests.training import tiny


def seeds():
    from mindspeed_ms.core import parallel_state, rng
    from mindspeed_ms.training.utils import set_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    set_seed(11)
    tracker = rng.get_rng_tracker()
    first = np.random.random_sample(), tracker.current.uniform((1,)).asnumpy()
    with tracker.fork():
        forked = tracker.current.uniform((1,)).asnumpy()
    with pytest.raises(ValueError, match="seed is 0"):
        set_seed(0)
    return first, forked


def test_set_seed_is_equal_over_tensor_ranks_but_for_the_forked_state(world):
    (first, forked), (other, other_forked) = world(2)(seeds)
    assert first == other and forked != other_forked


def arguments():
    from mindspeed_ms.training import get_all_config, get_args, get_train_valid_test_num_samples
    from mindspeed_ms.training.initialize import initialize_megatron, unset_global_variables
    from mindspeed_ms.training.utils import set_parallel_context

    def extra(parser):
        parser.add_argument("--flavour", default="plain")
        return parser

    unset_global_variables()
    with pytest.raises(RuntimeError, match="initialize_megatron"):
        get_args()
    words = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 10 --max-position-embeddings 8 "
        "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --flavour sweet --eval-iters 3 --eval-interval 5 --vocab-size 100"
    )
    initialize_megatron(extra, {"weight_decay": 0.25}, argv=words.split())
    config = get_all_config()
    set_parallel_context(config.parallel_config)
    set_parallel_context(config.parallel_config)
    with pytest.raises(ValueError, match="order is tp-cp-ep-pp-dp, but"):
        set_parallel_context(config.parallel_config.model_copy(update={"order": "tp-cp-ep-pp-dp"}))
    numbers = get_train_valid_test_num_samples()
    result = get_args().flavour, config.optimizer_config.weight_decay, numbers
    unset_global_variables()
    return result


def test_arguments_reach_the_script_and_the_configuration(world):
    (result,) = world(1)(arguments)
    assert result == ("sweet", 0.25, (80, 72, 24))


def context_groups(algorithm):
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.training.utils import set_parallel_context

    parallel = {"context_parallel_size": 2, "context_parallel_algo": algorithm}
    set_parallel_context(tiny.make_config(".", parallel=parallel).parallel_config)
    return list(parallel_state.get_ring_group().ranks), list(parallel_state.get_ulysses_group().ranks)


def test_the_groups_of_a_run_are_those_of_its_configuration(world):
    assert world(2)(context_groups, "megatron_cp_algo") == [([0, 1], [0]), ([0, 1], [1])]
    assert world(2)(context_groups, "ulysses_cp_algo") == [([0], [0, 1]), ([1], [0, 1])]


def from_the_command_line(folder):
    """The guide's preparation, then Megatron's call: the configuration comes from the arguments."""
    import sys

    from mindspeed_ms.core import comm
    from mindspeed_ms.training.data import build_pretraining_data_loader, get_train_valid_test_num_samples
    from mindspeed_ms.training.initialize import get_all_config, get_args, unset_global_variables
    from mindspeed_ms.training.training import pretrain
    from mindspeed_ms.training.utils import set_parallel_context

    unset_global_variables()
    seen = {}

    def extra(parser):
        parser.add_argument("--corpus-rows", type=int, default=24)
        return parser

    def provide(numbers):
        seen["numbers"], seen["rows"] = numbers, get_args().corpus_rows
        return tiny.Samples(get_args().corpus_rows), None, None

    given = (
        "--hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 3 --max-position-embeddings 8 "
        "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --vocab-size 100 --corpus-rows 12 --lr-decay-style constant "
        "--eval-interval 1000 --save"
    )
    words, sys.argv = sys.argv, ["pretrain.py", *given.split(), str(folder)]
    try:
        run = pretrain(provide, tiny.model_provider, None, extra_args_provider=extra, args_defaults={"num_layers": 1})
        loader = build_pretraining_data_loader(tiny.Samples(12), 4)
        set_parallel_context(get_all_config().parallel_config)
        batch = next(loader)
    finally:
        sys.argv = words
        unset_global_variables()
    comm.world_group().barrier()
    numbers = get_train_valid_test_num_samples(run.all_config)
    return run.train_state.consumed_train_samples, seen, batch["tokens"], numbers


def test_configuration_from_the_command_line(world, tmp_path):
    ((consumed, seen, tokens, numbers),) = world(1)(from_the_command_line, tmp_path)
    assert consumed == 12 and seen["rows"] == 12 and seen["numbers"][0] == 12 and numbers == seen["numbers"]
    assert np.array_equal(tokens, tiny.samples(12)["tokens"][4:6])
