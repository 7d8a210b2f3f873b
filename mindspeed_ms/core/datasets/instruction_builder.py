"""Builder of the instruction datasets (SFT, pairwise) of a configuration."""

from mindspeed_ms.config.model_description import describe_parallel
from mindspeed_ms.config.sections.posttrain import ROLLOUT_STAGES
from mindspeed_ms.core.datasets.instruction_files import InstructionDataError, InstructionFiles
from mindspeed_ms.core.datasets.prompt_dataset import PromptDataset, RolloutPlan
from mindspeed_ms.core.datasets.sft_dataset import PairwiseDataset, ProcessRewardDataset, SFTDataset
from mindspeed_ms.core.datasets.splits import (
    convert_split_vector_to_split_matrix,
    get_blend_from_list,
    parse_and_normalize_split,
)
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.layout.sequence import sequence_unit

_SPLITS = (("train", "train_data_path"), ("valid", "valid_data_path"), ("test", "test_data_path"))


def dataset_class_of(all_config):
    """Class of the instruction data of a configuration: PairwiseDataset, ProcessRewardDataset (stage prm), PromptDataset (of
    stages that generate answers) or SFTDataset."""
    if all_config.training_config.stage in ROLLOUT_STAGES:
        return PromptDataset
    if all_config.dataset_config.is_pairwise_dataset:
        return PairwiseDataset
    return ProcessRewardDataset if all_config.training_config.stage == "prm" else SFTDataset


def build_instruction_datasets(all_config, num_samples, dataset_class=None):
    """Build the datasets for instruction data: training, validation, test; None where there is no data.

    Args:
        all_config (AllConfig): read: data paths, split (all for training if it is not given), masks, padding, tokenizer, seed.
        num_samples (tuple[int, int, int]): how many samples the run takes of each; 0 of the training data: one pass.
        dataset_class (Optional[type]): of the datasets; None: `dataset_class_of` the configuration.

    Raises:
        InstructionDataError: no data path, several of them, files that cannot be used, a split without samples.
    """
    dataset_class = dataset_class or dataset_class_of(all_config)
    places, options = _places(all_config, dataset_class), _options(all_config, dataset_class)
    return tuple(
        dataset_class(place[0], bounds=place[1], num_samples=count or None, **options)
        if place and (count or not split)
        else None
        for split, (place, count) in enumerate(zip(places, num_samples))
    )


def stored_training_samples(all_config):
    """Number of samples (int) of one pass over the training data; packed ones count as one. Raises as the datasets do."""
    dataset_class = dataset_class_of(all_config)
    path, bounds = _places(all_config, dataset_class)[0]
    return bounds[1] - bounds[0] if bounds else len(InstructionFiles(path, dataset_class.fields))


def _places(all_config, dataset_class):
    """(prefix, its bounds or None for all) of training, validation and test data; None where there is none."""
    settings = all_config.dataset_config
    if settings.train_data_path:
        paths = [_single(getattr(settings, option), option) for _, option in _SPLITS]
        return [path and (path, None) for path in paths]
    path = _single(settings.data_path, "data_path")
    if path is None:
        option = "stage" if all_config.training_config.stage else "is_instruction_dataset"
        raise InstructionDataError(
            f"{option} (--{option.replace('_', '-')}) needs data: set data_path (--data-path) to the --output-prefix of "
            "preprocessing."
        )
    bounds = split_bounds(settings.split, len(InstructionFiles(path, dataset_class.fields)))
    if bounds[0][0] >= bounds[0][1]:
        raise InstructionDataError(f"split (--split) is {settings.split}: no sample is left for training.")
    return [(path, part) if part[0] < part[1] else None for part in bounds]


def split_bounds(split, count):
    """Bounds [first, end) of training, validation and test samples: three (int, int), rounded as Megatron does.

    Args:
        split (Optional[str]): shares such as "949,50,1"; None: all for training.
        count (int): samples.
    """
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split or "1"))
    return [(round(part[0] * count), round(part[1] * count)) if part else (count, count) for part in matrix]


def _single(paths, option):
    blend = get_blend_from_list(paths)
    if blend is None:
        return None
    if len(blend[0]) > 1:
        raise InstructionDataError(
            f"{option} (--{option.replace('_', '-')}) is {' '.join(map(str, paths))}: instruction data "
            "is one prefix. Preprocess all files at once, or join them with --merge-group-keys."
        )
    return blend[0][0]


def _options(all_config, dataset_class):
    settings = all_config.dataset_config
    by_sampler = settings.dataloader_type == "cyclic" or settings.shuffle
    was_set = all_config.settings is not None and all_config.settings.was_set("dataset_config.shuffle")
    options = {
        "seed": all_config.training_config.random_seed,
        "shuffle": not by_sampler and not was_set,
        "full_shuffle": settings.full_shuffle_instruction_dataset,
        "mmap": settings.mmap_bin_files,
    }
    if dataset_class is PromptDataset:
        return options | {"plan": RolloutPlan.of(all_config)}
    options |= {
        "sequence_length": all_config.model_config.seq_length,
        "pad_token_id": pad_token_id(settings),
        "pad_to_multiple_of": _multiple(all_config) if all_config.parallel_config.variable_seq_lengths else None,
        "vocab_size": all_config.model_config.vocab_size,
    }
    if dataset_class is SFTDataset:
        options |= {"reset_position_ids": settings.reset_position_ids, "reset_attention_mask": settings.reset_attention_mask}
    if dataset_class is ProcessRewardDataset:
        options["reward_ids"] = reward_ids(settings)
    return options


def reward_ids(settings):
    """Ids of `reward_tokens` of a DatasetConfig, ascending: tuple[int]; empty if none are named.

    Raises:
        InstructionDataError: no tokenizer, fewer than two, or one that is no single token.
    """
    if not settings.reward_tokens:
        return ()
    if not TokenizerSettings.from_config(settings).is_given:
        raise InstructionDataError("reward_tokens (--reward-tokens) need a tokenizer: set --tokenizer-name-or-path.")
    tokenizer, found = build_tokenizer(settings), {}
    for token in settings.reward_tokens:
        ids = tokenizer.tokenize(token, add_special_tokens=False)
        if len(ids) != 1:
            raise InstructionDataError(
                f"reward_tokens (--reward-tokens) {token!r} is {len(ids)} tokens ({ids}) of {tokenizer.name}: expected one "
                "that is a single token."
            )
        found[ids[0]] = token
    if len(found) < 2:
        raise InstructionDataError(
            f"reward_tokens (--reward-tokens) is {' '.join(settings.reward_tokens)}: expected at least two different tokens."
        )
    return tuple(sorted(found))


def _multiple(all_config):
    """Checked `pad_to_multiple_of`: the parallel sizes that cut a sequence must divide it."""
    cut = sequence_unit(describe_parallel(all_config))
    multiple = all_config.dataset_config.pad_to_multiple_of
    if multiple % cut:
        raise InstructionDataError(
            f"pad_to_multiple_of (--pad-to-multiple-of) is {multiple}: with variable_seq_lengths it "
            f"must be divisible by {cut}, into which sequence and context parallelism cut a sequence."
        )
    return multiple


def pad_token_id(settings):
    """Padding id of samples: `pad_token_id`, else the tokenizer's padding or end token, else `eos_token_id`.

    Args:
        settings (DatasetConfig): read: these and the tokenizer's options.
    """
    if settings.pad_token_id is not None:
        return settings.pad_token_id
    if TokenizerSettings.from_config(settings).is_given:
        tokenizer = build_tokenizer(settings)
        tokenizer.use_eos_as_pad()
        if tokenizer.pad is not None:
            return tokenizer.pad
    return settings.eos_token_id
