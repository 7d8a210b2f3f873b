"""Settings of a preprocessing run: plain values that are sent to the tokenizing processes."""

from dataclasses import dataclass, field

from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings

TRUNCATIONS = ("keep-last", "oldest-first", "drop")


@dataclass(frozen=True)
class Settings:
    """Checked values of the command line. `handler_name` names a class of `handlers.HANDLERS`.

    Attributes:
        json_keys (tuple[str]): columns of a pretraining corpus.
        map_keys (dict): parsed `--map-keys`.
        prompt_type, prompt_type_path (Optional[str]): name of the template, and its file.
        seq_length (Optional[int]): longest sample, in tokens.
        truncation (str): what becomes of a longer conversation, one of TRUNCATIONS.
        skip_invalid (bool): leave records out that cannot be used; otherwise they end the run.
    """

    handler_name: str
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    json_keys: tuple = ("text",)
    map_keys: dict = field(default_factory=dict)
    prompt_type: str | None = None
    prompt_type_path: str | None = None
    enable_thinking: bool | None = None
    append_eod: bool = False
    seq_length: int | None = None
    pack: bool = False
    neat_pack: bool = False
    truncation: str = "keep-last"
    placeholder_token: str = "ки"
    reward_tokens: tuple = ()
    skip_invalid: bool = False


@dataclass(frozen=True)
class Run:
    """Inputs, output prefix and number of processes of a run.

    Attributes:
        inputs (tuple[str]): words of `--input`.
        output_prefix (str): beginning of the names of the output files.
        workers (int): processes that tokenize; 1: this process.
        max_samples (Optional[int]): records that are read; None: all.
        model_vocab_size (Optional[int]): rows of the model's embedding, which ids must be below.
        restart (bool): forget an unfinished run.
        overwrite (bool): replace output files that exist.
        cache_dir (Optional[str]): folder of the unfinished files; None: beside the output.
    """

    inputs: tuple
    output_prefix: str
    workers: int = 1
    max_samples: int | None = None
    model_vocab_size: int | None = None
    restart: bool = False
    overwrite: bool = False
    cache_dir: str | None = None
