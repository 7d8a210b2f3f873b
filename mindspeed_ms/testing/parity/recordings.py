"""Recorded runs of Megatron-LM (core_v0.12.1, CPU, fp32), with which every layout is compared.

Two sources: the folder of full recordings (environment variable MINDSPEED_MS_GOLDEN, or `../shared/golden` beside the
checkout), and the figures committed here, which hold what a public checkout needs: flags, batches, losses, gradient norms
and learning rates. Initial weights follow a rule, so they need no file; gradients, final weights and Adam moments are
compared where the full recordings are present.
"""

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[3]
FIGURES = REPOSITORY / "tests" / "parity" / "figures"
CURVE = "curve_"
"""Names with this prefix are runs that wrote a checkpoint."""
FOLDERS = (".", "later")
"""Folders of full recordings inside of the golden folder."""


def golden_folder():
    """Folder of full recordings, or None.

    Raises:
        FileNotFoundError: MINDSPEED_MS_GOLDEN names a folder that does not exist.
    """
    named = os.environ.get("MINDSPEED_MS_GOLDEN")
    if named:
        if not Path(named).is_dir():
            raise FileNotFoundError(f"MINDSPEED_MS_GOLDEN is {named!r}: no such folder.")
        return Path(named)
    beside = REPOSITORY.parent / "shared" / "golden"
    return beside if beside.is_dir() else None


@dataclass
class Recording:
    """One recorded run.

    Attributes:
        name: file name without ending, such as "single_llama" or "dist_tp2_llama".
        flags: Megatron's command line.
        figures: "loss", "grad_norm", "lr" per step (float64).
        batches: "tokens", "labels", "loss_mask", each `[step, global batch, sequence]`; None in `dist_` recordings.
        path: the full recording, or None.
    """

    name: str
    flags: list
    figures: dict
    batches: dict = None
    path: Path = None
    variant: str = ""
    world: int = 1
    _arrays: dict = field(default_factory=dict, repr=False)

    def flag(self, name, default=None):
        """Value of the flag `--name`: its text, True for a switch, `default` if absent."""
        if name not in self.flags:
            return default
        position = self.flags.index(name) + 1
        value = self.flags[position] if position < len(self.flags) else "--"
        return True if value.startswith("--") else value

    def arrays(self, kind):
        """Arrays `{parameter name: array}` of "w0", "wN", "grad0", "m" or "v" of a full recording (Megatron's names)."""
        if kind not in self._arrays:
            with np.load(self.path) as data:
                prefix = kind + "/"
                self._arrays[kind] = {key[len(prefix) :]: data[key] for key in data.files if key.startswith(prefix)}
        return self._arrays[kind]


def rule_weight(name, shape):
    """Initial weight of the recordings: normal by the crc32 of the (mcore) name; norms are around 1, biases smaller."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("bias"):
        values = 0.05 * values
    elif "norm" in name:
        values = 1.0 + 0.1 * values
    else:
        values = 0.1 * values
    return values.astype(np.float32)


def available(prefix):
    """Names of all recordings that start with `prefix`, from the full folder and the committed figures."""
    names = {path.stem for path in FIGURES.glob(prefix + "*.json")}
    folder = golden_folder()
    if folder is not None:
        names |= {path.stem for part in FOLDERS for path in (folder / part).glob(prefix + "*.npz")}
    return sorted(names)


def load(name):
    """Load the `Recording` `name` from the full folder if it is there, else from the committed figures."""
    folder = golden_folder()
    if name.startswith(CURVE) and folder is not None:
        return _load_curve(name, folder / "ckpt")
    paths = [folder / part / f"{name}.npz" for part in FOLDERS] if folder is not None else []
    for path in paths:
        if path.exists():
            return _load_full(name, path)
    return _load_figures(name)


def _load_curve(name, folder):
    """Load the curve of a run that also wrote a checkpoint, and its flags without those about saving."""
    with np.load(folder / name.removeprefix(CURVE) / "curve.npz") as data:
        meta = json.loads(str(data["meta"]))
        figures = {key: data[key] for key in ("loss", "grad_norm", "lr")}
    with np.load(folder / "tokens.npz") as data:
        batches = {key: data[key] for key in ("tokens", "labels", "loss_mask")}
    flags = meta["flags"][: meta["flags"].index("--save")]
    return Recording(name, flags, figures, batches, None, meta["variant"], meta.get("world", 1))


def _load_full(name, path):
    with np.load(path) as data:
        meta = json.loads(str(data["meta"]))
        figures = {key: data[key] for key in ("loss", "grad_norm", "lr")}
        batches = None
        if "tokens" in data.files:
            batches = {key: data[key] for key in ("tokens", "labels", "loss_mask")}
    return Recording(name, meta["flags"], figures, batches, path, meta["variant"], meta.get("world", 1))


def _load_figures(name):
    content = json.loads((FIGURES / f"{name}.json").read_text())
    figures = {key: np.array(content[key]) for key in ("loss", "grad_norm", "lr")}
    batches = None
    if "batches" in content:
        stored = json.loads((FIGURES / content["batches"]).read_text())
        batches = {
            "tokens": np.array(stored["tokens"], np.int32),
            "labels": np.array(stored["labels"], np.int32),
            "loss_mask": np.array(stored["loss_mask"], np.float32),
        }
    return Recording(name, content["flags"], figures, batches, None, content["variant"], content["world"])


def write_figures():
    """Write the committed figures anew after new recordings: `python -m mindspeed_ms.testing.parity.recordings`."""
    for name in [*available("single_"), *available("dist_"), CURVE + "llama_bf16_tp2dp2_distopt"]:
        recording = load(name)
        content = {
            "variant": recording.variant,
            "world": recording.world,
            "flags": recording.flags,
            **{key: values.tolist() for key, values in recording.figures.items()},
        }
        if recording.batches is not None:
            content["batches"] = _write_batches(recording.batches)
        (FIGURES / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _write_batches(batches):
    text = json.dumps(
        {
            "tokens": batches["tokens"].tolist(),
            "labels": batches["labels"].tolist(),
            "loss_mask": batches["loss_mask"].astype(int).tolist(),
        },
        separators=(",", ":"),
    )
    name = f"batches_{zlib.crc32(text.encode()):08x}.json"
    (FIGURES / name).write_text(text + "\n")
    return name


if __name__ == "__main__":
    write_figures()
