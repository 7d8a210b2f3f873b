"""Inspection of prepared data: `python -m mindspeed_ms.tools.inspect_data PREFIX [--tokenizer PATH]`.

PREFIX is what training gets as `--data-path`: a prefix of indexed files (`..._text_document`), or the output prefix of
preprocessing for conversations or pairs. Reads everything once; writes nothing but the histogram.
"""

import os
import sys
from itertools import pairwise

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.instruction_files import PAIRWISE_FIELDS, SFT_FIELDS, InstructionFiles, field_prefix
from mindspeed_ms.core.datasets.tokenizer import TokenizerSettings, build_tokenizer
from mindspeed_ms.core.datasets.turns import IGNORE_INDEX
from mindspeed_ms.spelling import SuggestingParser

BINS, BAR = 20, 40
_BLOCK = 1 << 24
_LEARNT, _MASKED, _PLAIN = "\033[1;32m", "\033[2m", "\033[0m"


def parse_arguments(arguments=None):
    """Parse the command line."""
    parser = SuggestingParser(prog="python -m mindspeed_ms.tools.inspect_data", description="What is in prepared data.")
    parser.add_argument("prefix", help="what training gets as --data-path, without .bin and .idx")
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-name-or-path",
        "--tokenizer-model",
        metavar="PATH",
        help="to show text: Hugging Face folder, tokenizer.json or sentencepiece model",
    )
    parser.add_argument("--tokenizer-type", help="as in training; default: told from the path")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT2 tokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT2 tokenizer")
    parser.add_argument("--vocab-size", type=int, help="rows of the model's embeddings; default: the tokenizer's vocabulary")
    parser.add_argument("--samples", type=int, default=3, help="how many of the first samples are shown (default 3)")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many tokens of each (default 200)")
    parser.add_argument("--png", metavar="FILE", help="histogram of lengths (default: PREFIX_lengths.png, beside the data)")
    parser.add_argument("--no-png", action="store_true", help="no picture")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="learnt tokens in green; without colours they stand in ⟦ ⟧",
    )
    parsed = parser.parse_args(arguments)
    parsed.prefix = parsed.prefix.removesuffix(".bin").removesuffix(".idx")
    return parsed


def open_data(prefix):
    """Open all indexed files of a prefix: dict of field ("text" for plain ones) to IndexedDataset.

    Raises:
        FileNotFoundError, InstructionDataError: there are none.
        IndexedDatasetError: one is damaged.
    """
    if os.path.isfile(prefix + ".idx") or os.path.isfile(prefix + ".bin"):
        return {"text": IndexedDataset(prefix)}
    for fields in (SFT_FIELDS, PAIRWISE_FIELDS):
        if any(os.path.isfile(field_prefix(prefix, field) + ".idx") for field in fields):
            return InstructionFiles(prefix, fields).files
    return InstructionFiles(prefix, SFT_FIELDS).files  # the error names the missing files


def ids_and_labels(data):
    """Pairs of ids and labels among the fields: list of (name, ids, labels or None)."""
    if "text" in data:
        return [("text", data["text"], None)]
    if "input_ids" in data:
        return [("conversation", data["input_ids"], data["labels"])]
    return [(kind, data[f"{kind}_input_ids"], data[f"{kind}_labels"]) for kind in ("chosen", "rejected")]


def all_tokens(dataset):
    """Tokens of an indexed dataset, block by block, each file position once."""
    lengths = dataset.sequence_lengths
    start, total = 0, 0
    for number, length in enumerate(lengths.tolist()):
        total += length
        if total >= _BLOCK or number == len(lengths) - 1:
            yield np.concatenate(dataset[start : number + 1])
            start, total = number + 1, 0


def count_ids(dataset, limit, ignored=None):
    """(smallest, largest, number outside [0, limit), number of `ignored`) of all ids; limit None: no check."""
    smallest, largest, outside, left_out = None, None, 0, 0
    for tokens in all_tokens(dataset):
        if ignored is not None:
            kept = tokens != ignored
            left_out += int(len(tokens) - kept.sum())
            tokens = tokens[kept]
        if not len(tokens):
            continue
        smallest = min(int(tokens.min()), smallest if smallest is not None else 1 << 62)
        largest = max(int(tokens.max()), largest if largest is not None else -1)
        outside += int(((tokens < 0) | (tokens >= limit)).sum()) if limit is not None else 0
    return smallest, largest, outside, left_out


def histogram(lengths):
    """Histogram of sequence lengths: list of (from, to, count); bars of whole numbers, equally wide."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // BINS)
    counts = np.bincount((lengths - low) // width, minlength=1)
    return [
        (low + number * width, min(low + (number + 1) * width - 1, high), int(count)) for number, count in enumerate(counts)
    ]


def histogram_text(bars):
    """Lines of a histogram."""
    most = max(count for _, _, count in bars)
    wide = len(str(bars[-1][1]))
    return [f"  {low:>{wide}}-{high:<{wide}} {'█' * round(BAR * count / most):<{BAR}} {count}" for low, high, count in bars]


def histogram_picture(bars, path, title):
    """PNG of a histogram, written whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(
        [low for low, _, _ in bars],
        [count for _, _, count in bars],
        align="edge",
        width=[high - low + 1 for low, high, _ in bars],
        edgecolor="white",
    )
    axes.set(xlabel="tokens of a sequence", ylabel="sequences", title=title)
    temporary = f"{path}.{os.getpid()}.partial"
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def shown(ids, labels, numbers, decode, color, most):
    """Text of one sample for the terminal.

    Args:
        ids, labels, numbers (np.ndarray): `[n]`; labels and numbers (of packed conversations) may be None.
        decode (Callable): ids -> text.
        color (bool): ANSI colours, else ⟦ ⟧ around learnt tokens.
        most (int): tokens that are shown.
    """
    count = min(len(ids), most)
    learnt = np.zeros(len(ids), bool) if labels is None else labels != IGNORE_INDEX
    numbers = np.zeros(len(ids), np.int64) if numbers is None else numbers
    borders = np.flatnonzero((np.diff(learnt.astype(np.int8)) != 0) | (np.diff(numbers) != 0)) + 1
    bounds = [0, *(int(border) for border in borders if border < count), count]
    text = ""
    for start, end in pairwise(bounds):
        if start and numbers[start] != numbers[start - 1]:
            text += "\n--- filling\n" if numbers[start] == 0 else f"\n--- packed conversation {numbers[start]}\n"
        part = decode(ids[start:end].tolist())
        if labels is None:
            text += part
        elif color:
            text += f"{_LEARNT if learnt[start] else _MASKED}{part}{_PLAIN}"
        else:
            text += f"⟦{part}⟧" if learnt[start] else part
    return text + (f" ... ({len(ids) - count} more)" if count < len(ids) else "")


def describe(name, dataset):
    """Lines about the sizes of the data."""
    lengths, tokens = dataset.sequence_lengths, int(dataset.sequence_lengths.sum(dtype=np.int64))
    lines = [
        f"{name}: {len(dataset.document_indices) - 1} documents, {len(dataset)} sequences, {tokens} tokens, "
        f"{np.dtype(dataset.dtype)} ({tokens * dataset.itemsize} bytes)"
    ]
    if len(lengths):
        lines.append(
            f"  tokens of a sequence: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}, median "
            f"{np.median(lengths):.0f}" + (f"; {(lengths == 0).sum()} are empty" if (lengths == 0).any() else "")
        )
    return lines


def report_ids(name, ids, labels, limit):
    """(lines about ids and labels, whether they are valid): (list[str], bool)."""
    smallest, largest, outside, _ = count_ids(ids, limit)
    of_what = "" if limit is None else f", vocabulary 0 to {limit - 1}"
    lines = [f"  ids: {smallest} to {largest}{of_what}"]
    sound = not outside
    if outside:
        lines.append(
            f"  WRONG: {outside} ids of {name} are outside the vocabulary: preprocess with the model's tokenizer, or "
            "give the model more rows"
        )
    if labels is None:
        return lines, sound
    low, high, outside, masked = count_ids(labels, limit, IGNORE_INDEX)
    total = int(labels.sequence_lengths.sum(dtype=np.int64))
    lines.append(f"  labels: {low} to {high}, {masked / max(total, 1):.1%} masked")
    nothing = sum(1 for number in range(len(labels)) if not (labels[number] != IGNORE_INDEX).any())
    if nothing:
        lines.append(f"  NOTE: {nothing} of {len(labels)} samples have no label: nothing is learnt from them")
    if outside:
        lines.append(f"  WRONG: {outside} labels of {name} are outside the vocabulary")
    return lines, sound and not outside


def report_packing(masks):
    """Line about packing of conversations."""
    most = filled = packed = 0
    for number in range(len(masks)):
        values = masks[number]
        largest = int(values.max(initial=0))
        most, packed = max(most, largest), packed + (largest > 1)
        filled += int((values == 0).sum())
    total = max(int(masks.sequence_lengths.sum(dtype=np.int64)), 1)
    if not packed:
        return "  not neat-packed (samples are single conversations, or packed without borders)"
    return f"  neat-packed: up to {most} conversations in a sample, {filled / total:.1%} filling"


def inspect(arguments, write=print):
    """Print the report that the command line asks for.

    Args:
        arguments (Namespace): of `parse_arguments`.
        write (Callable): gets each line.

    Returns:
        bool: whether all ids are inside the vocabulary (or none is known).
    """
    settings = TokenizerSettings(
        arguments.tokenizer_type,
        arguments.tokenizer,
        arguments.tokenizer,
        arguments.vocab_file,
        arguments.merge_file,
        arguments.vocab_size,
    )
    tokenizer = build_tokenizer(settings) if settings.is_given else None
    limit = arguments.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    data = open_data(arguments.prefix)
    all_sound = True
    for name, ids, labels in ids_and_labels(data):
        for line in describe(name, ids):
            write(line)
        if not len(ids):
            continue
        lines, sound = report_ids(name, ids, labels, limit)
        all_sound &= sound
        for line in lines:
            write(line)
        if name == "conversation":
            write(report_packing(data["attention_mask"]))
        bars = histogram(ids.sequence_lengths)
        for line in histogram_text(bars):
            write(line)
        if not arguments.no_png:
            write(draw(bars, picture_paths(arguments, name), f"{os.path.basename(arguments.prefix)}: {name}"))
    show_samples(arguments, data, tokenizer if all_sound else None, write)
    return all_sound


def draw(bars, paths, title):
    """Draw the picture to the first writable one of `paths`; returns the line about it."""
    problems = []
    for path in paths:
        try:
            histogram_picture(bars, path, title)
        except OSError as error:
            problems.append(f"{path} cannot be written ({error.strerror})")
        else:
            return f"  histogram: {path}" + "".join(f" ({problem})" for problem in problems)
    return f"  NOTE: no histogram, {', '.join(problems)}: name another file with --png"


def picture_paths(arguments, name):
    """Candidate paths of the histogram of a field: beside the data, or in the current folder."""
    beside = f"{arguments.prefix}_lengths.png"
    paths = [arguments.png] if arguments.png else dict.fromkeys((beside, os.path.basename(beside)))
    return [f"{path.removesuffix('.png')}{'_rejected' * (name == 'rejected')}.png" for path in paths]


def show_samples(arguments, data, tokenizer, write):
    """Print the first samples, decoded."""
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())

    def decode(ids):
        return tokenizer.detokenize(ids) if tokenizer else "".join(f"{number} " for number in ids)

    masks = data.get("attention_mask")
    parts = ids_and_labels(data)
    for number in range(min(arguments.samples, len(parts[0][1]))):
        for name, ids, labels in parts:
            numbers = masks[number] if masks is not None and masks[number].max(initial=0) > 1 else None
            write(f"\n{name} {number} ({len(ids[number])} tokens):")
            write(shown(ids[number], None if labels is None else labels[number], numbers, decode, color, arguments.tokens))


def main(arguments=None):
    """Entry point; exit code 0 valid data, 1 ids outside the vocabulary, 2 unreadable data or tokenizer."""
    try:
        return 0 if inspect(parse_arguments(arguments)) else 1
    except BrokenPipeError:  # the reader of the output has seen enough
        return 0
    except (DatasetError, OSError) as error:
        print(f"inspect_data: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
