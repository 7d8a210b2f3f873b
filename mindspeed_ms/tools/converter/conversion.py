"""Conversion: what a command line asks for."""

from dataclasses import dataclass, field

from mindspeed_ms.core.dist_checkpointing.by_tensor import default_workers


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is converted into what.

    Attributes:
        source (Optional[str]): side of `load_dir`; None: as its files say.
        target (str): side of `save_dir`.
        load_dir, save_dir (str): folders.
        iteration (Optional[int]): which one of a folder with several checkpoints.
        parallel (dict): `parallel_config` of the target.
        data_parallel_size (Optional[int]): ranks that share an optimizer's state; None: as few as the experts need.
        with_optimizer (bool): the optimizer's state goes with the weights, where the target can hold it.
        params_dtype (Optional[str]): of the weights; None: as they are.
        vocab_multiple (Optional[int]): padded rows of the vocabulary are a multiple of it times tensor ranks.
        true_vocab_size (Optional[int]): rows that are no padding.
        family (Optional[str]): `--model-type-hf`.
        model_folder (Optional[str]): Hugging Face folder that config.json and tokenizer come from.
        tokenizer (tuple[str]): files of the tokenizer, copied too.
        expected (dict): what the user says about the model, by flag; compared with its configuration.
        source_layout (dict): what the user says about the cut of the source, by flag: (setting of parallel_config, size).
        config (Optional[str]): yaml of the model; upstream's files need it.
        experts (Optional[str]): form of the experts, one of `names.EXPERT_FORMS`; None: as in the source.
        legacy_names (bool): Megatron's names before core.
        ckpt_format (str): Megatron's: "torch" or "torch_dist".
        upstream_format (str): "ckpt" or "safetensors".
        upstream_prefix (str): of the files' names.
        most_bytes (int): of a file for Hugging Face.
        workers (int): threads; memory holds a tensor for each.
        adapter (Optional[str]): adapters that are merged into the weights on their way.
        adapter_sign (int): -1 takes them out instead.
        verify, dry_run (bool): see the flags.
        flags (dict): setting -> flag as typed, for messages.
        notes (tuple[str]): about flags without effect.
    """

    source: str | None
    target: str
    load_dir: str
    save_dir: str
    iteration: int | None = None
    parallel: dict = field(default_factory=dict)
    data_parallel_size: int | None = None
    with_optimizer: bool = True
    params_dtype: str | None = None
    vocab_multiple: int | None = None
    true_vocab_size: int | None = None
    family: str | None = None
    model_folder: str | None = None
    tokenizer: tuple = ()
    expected: dict = field(default_factory=dict)
    source_layout: dict = field(default_factory=dict)
    config: str | None = None
    experts: str | None = None
    adapter: str | None = None
    adapter_sign: int = 1
    legacy_names: bool = False
    ckpt_format: str = "torch"
    upstream_format: str = "ckpt"
    upstream_prefix: str = "network"
    most_bytes: int = 5 * 10**9
    workers: int = field(default_factory=default_workers)
    verify: bool = False
    dry_run: bool = False
    flags: dict = field(default_factory=dict)
    notes: tuple = ()
