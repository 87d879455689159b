"""Read what a mismatch is computed from: log-probs, a model, and the weights that an engine holds.

Log-probs lie in a safetensors file, or in JSON lines with one sequence each, under these names. NeMo RL's names work,
too, so its ``train_data_step*.jsonl`` can be read as they are:

    trainer       [sequences, tokens]   prev_logprobs         column t is the log-prob of token t
    rollout       [sequences, tokens]   generation_logprobs
    mask          [sequences, tokens]   token_mask            1 on sampled tokens; all tokens if it is missing
    sample_mask   [sequences]           sample_mask
    tokens        [sequences, tokens]   input_ids             needed to predict a band

Trainer and rollout may come in two files; then each may call its log-probs ``log_probs``. In JSON lines sequences may
differ in length, and where every side has null (for the first token, which nothing predicts) there is no token. A null
on one side only is a log-prob that is missing: it counts as NaN, as NaN itself does. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_fp8.errors import PrecisionError
from nemo_fp8.mismatch.logprobs import LogProbs
from nemo_fp8.mismatch.weights import Held, told_by
from nemo_fp8.models.shapes import read_config
from nemo_fp8.storage.safetensors import CODES, SCALE_2, SCALES, Checkpoint

# A field of Recording -> the names that it may have in a file.
NAMES = {
    "trainer": ("trainer", "prev_logprobs"),
    "rollout": ("rollout", "generation_logprobs"),
    "mask": ("mask", "token_mask", "token_loss_mask"),
    "sample_mask": ("sample_mask", "sample_loss_mask"),
    "tokens": ("tokens", "input_ids", "token_ids"),
}
_ONE_SIDE = ("log_probs", "logprobs")
_GAPS = "no token"


@dataclass(frozen=True, eq=False)
class Recording:
    """The tensors of a file; None for those that it does not hold."""

    trainer: torch.Tensor | None = None
    rollout: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sample_mask: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    gaps: torch.Tensor | None = None
    """[sequences, tokens]: where JSON lines have no token. They are out of the mask."""

    @classmethod
    def read(cls, path: str | Path, other: str | Path | None = None) -> Recording:
        """Read one file with both sides, or the trainer's file and the rollout's.

        Raises PrecisionError if a file cannot be read, lacks a side, or the two do not belong together.
        """
        if other is None:
            return _both(cls(**_named(_load(Path(path)), "")), path)
        first, second = (cls(**_named(_load(Path(p)), side)) for p, side in ((path, "trainer"), (other, "rollout")))
        return _both(_joined(first, second, path, other), path)

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probs of trainer and rollout."""
        assert self.trainer is not None
        assert self.rollout is not None
        return self.trainer, self.rollout

    def pair(self, infinite: str = "refuse") -> LogProbs:
        """Return both sides as checked log-probs; ``infinite`` is that of :class:`LogProbs`, which may raise."""
        return LogProbs(*self.sides, self.mask, self.sample_mask, infinite=infinite)  # type: ignore[arg-type]

    def not_numbers(self) -> int:
        """Return how many of the rollout's log-probs under the mask are NaN, a sign of broken scales."""
        rollout = self.sides[1]
        some = torch.zeros(rollout.shape, dtype=torch.float64)
        counted = LogProbs(some, some, self.mask, self.sample_mask).mask  # type: ignore[arg-type]
        return int((rollout.isnan() & counted).sum())

    def some(self, sequences: int) -> Recording:
        """Return at most so many sequences, spread evenly over all of them."""
        count = len(self.sides[0])
        if count <= sequences:
            return self
        chosen = torch.linspace(0, count - 1, sequences).round().long()
        return Recording(**{name: t if t is None else t[chosen] for name, t in vars(self).items()})


def _load(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        raise PrecisionError(f"There is no file {path}.", "Log-probs are read from it.", "Check the path.")
    if path.suffix == ".safetensors":
        checkpoint = Checkpoint.open(path)
        found = {name: next(checkpoint.stored(name)) for name in checkpoint.entries}
        checkpoint.close()
        return found
    if path.suffix in (".jsonl", ".json"):
        return _load_lines(path)
    raise PrecisionError(
        f"{path.name} is neither .safetensors nor .jsonl.",
        "Other formats (pickles, torch.save) may run code when they are read.",
        'Write safetensors.torch.save_file({"trainer": ..., "rollout": ..., "mask": ...}, path).',
    )


def _load_lines(path: Path) -> dict[str, torch.Tensor]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrecisionError(
            f"{path.name} cannot be read.", f"{error}.", "Write one object of JSON a line, in UTF-8."
        ) from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PrecisionError(
                f"Line {number} of {path.name} is not JSON.", f"{error}.", "Write one object a line."
            ) from error
        if not isinstance(row, dict):
            raise PrecisionError(
                f"Line {number} of {path.name} is no object.", "A line is one sequence, by name.", "Write {...} a line."
            )
        rows.append(row)
    if not rows:
        raise PrecisionError(f"{path.name} is empty.", "There is no sequence in it.", "Write one sequence a line.")
    sides = {*NAMES["trainer"], *NAMES["rollout"], *_ONE_SIDE}
    wanted = sides.union(*NAMES.values())
    names = dict.fromkeys(name for row in rows for name in row if name in wanted and row[name] is not None)
    try:
        for number, row in enumerate(rows, 1):
            if len({len(row[name]) for name in names if isinstance(row[name], list)}) > 1:
                raise ValueError(f"the lists of sequence {number} differ in length")
        absent = [_padded([[x is None for x in row[n]] for row in rows], True, torch.bool) for n in names if n in sides]
        gaps = {_GAPS: torch.stack(absent).all(0)} if absent else {}
        return {name: _stack([row[name] for row in rows], name) for name in names} | gaps
    except (KeyError, TypeError, ValueError) as error:
        raise PrecisionError(
            f"{path.name} holds something that is no list of numbers, or not in every line.",
            f"{type(error).__name__}: {error}.",
            "Every line has the same names, each a list with one number a token; nothing counts where all have null.",
        ) from error


def _stack(rows: list[Any], name: str) -> torch.Tensor:
    """Return lists of different lengths as one tensor, filled with 0 in masks and tokens and NaN in log-probs; a sample
    mask has one number a sequence."""
    whole = name in (*NAMES["mask"], *NAMES["tokens"])
    if name in NAMES["sample_mask"]:
        return torch.tensor([float(row) for row in rows])
    filler = 0 if whole else float("nan")
    numbers = [[filler if x is None else x for x in row] for row in rows]
    return _padded(numbers, filler, torch.int64 if name in NAMES["tokens"] else torch.float64)


def _padded(rows: list[list[Any]], filler: float, dtype: torch.dtype) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=dtype)


def _named(found: Mapping[str, torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """Return the tensors under our names."""
    names = NAMES | ({side: (*NAMES[side], *_ONE_SIDE)} if side else {}) | {"gaps": (_GAPS,)}
    return {
        ours: found[theirs]
        for ours, theirs in ((o, next((t for t in ts if t in found), None)) for o, ts in names.items())
        if theirs
    }


def _joined(first: Recording, second: Recording, path: str | Path, other: str | Path) -> Recording:
    """Combine the trainer's file and the rollout's; raise PrecisionError if they are of different tokens."""
    if first.tokens is not None and second.tokens is not None and not torch.equal(first.tokens, second.tokens):
        raise PrecisionError(
            f"{path} and {other} are of different tokens.",
            "A difference of log-probs means something only where both sides speak of one token.",
            "Let the trainer compute log-probs of the tokens that the rollout sampled.",
        )
    masks = {
        name: _of_both(getattr(first, name), getattr(second, name), path, other) for name in ("mask", "sample_mask")
    }
    return Recording(
        first.trainer,
        second.rollout,
        **masks,
        tokens=first.tokens if first.tokens is not None else second.tokens,
        gaps=None if first.gaps is None or second.gaps is None else _of_both(first.gaps, second.gaps, path, other),
    )


def _of_both(
    mine: torch.Tensor | None, theirs: torch.Tensor | None, path: str | Path, other: str | Path
) -> torch.Tensor | None:
    """Return the product of two masks, or the one that there is; raise PrecisionError if their shapes differ."""
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    if mine.shape != theirs.shape:
        raise PrecisionError(
            f"{path} and {other} have masks of shapes {tuple(mine.shape)} and {tuple(theirs.shape)}.",
            "Both sides must speak of the same tokens, position by position.",
            "Pad both to one length.",
        )
    return mine * theirs


def _both(found: Recording, path: str | Path) -> Recording:
    missing = [side for side in ("trainer", "rollout") if getattr(found, side) is None]
    if missing:
        raise PrecisionError(
            f"{path} does not hold the log-probs of the {' and '.join(missing)}.",
            f"They are looked for as {' or '.join(NAMES[missing[0]])}.",
            "Name them so, or give the trainer's file and the rollout's, each with its log_probs.",
        )
    tensors = {
        name: t[None] if t is not None and t.dim() == 1 and name != "sample_mask" else t
        for name, t in vars(found).items()
    }
    gaps, mask = tensors["gaps"], tensors["mask"]
    if gaps is not None and gaps.any():
        tensors["mask"] = ~gaps if mask is None else mask * ~gaps
    return replace(found, **tensors)


# ---------------------------------------------------------------------- a model, and the weights of an engine


class Folder(Mapping[str, torch.Tensor]):
    """A Hugging Face checkpoint as a mapping of names to tensors, each read when it is looked up.

    Raises PrecisionError if the checkpoint holds FP8 codes.
    """

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        self._checkpoint, self.path, self.device = Checkpoint.open(path), Path(path), device
        coded = [name for name, entry in self._checkpoint.entries.items() if entry.dtype in CODES]
        if coded:
            raise PrecisionError(
                f"{path} is an FP8 checkpoint: {coded[0]} and {len(coded) - 1} more are codes.",
                "The reference is made from the trainer's own weights; codes are what it is compared with.",
                "Give the BF16 checkpoint.",
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        matrices = list(self._checkpoint.matrices(name))
        return (matrices[0] if len(matrices) == 1 else torch.stack(matrices)).to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.entries)

    def __len__(self) -> int:
        return len(self._checkpoint.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.entries

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the files' headers."""
        return {name: entry.shape for name, entry in self._checkpoint.entries.items()}

    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` beside the weights; raise PrecisionError if it cannot be read."""
        return read_config((self.path if self.path.is_dir() else self.path.parent) / "config.json")


def read_held(path: str | Path) -> dict[str, Held]:
    """Return what an engine holds, from a push's receipt in JSON, or from a checkpoint of codes and scales.

    Raises PrecisionError if a JSON file is no receipt.
    """
    path = Path(path)
    if path.suffix == ".json":
        try:
            return told_by(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, PrecisionError):
                raise
            raise PrecisionError(
                f"{path} is no receipt.",
                f"{type(error).__name__}: {error}.",
                "Write json.dumps(receipt.to_dict()) there.",
            ) from error
    checkpoint = Checkpoint.open(path)
    found: dict[str, Held] = {}
    for name, entry in checkpoint.entries.items():
        four = checkpoint.is_nvfp4(name)
        scale = checkpoint.scale_of(name) if four or entry.dtype in CODES else None
        codes = _whole(checkpoint, name)
        if scale is None:
            found |= {} if name.endswith((*SCALES, SCALE_2, "input_scale")) else {name: codes}
        elif four:
            found[name] = (codes, _whole(checkpoint, scale), _whole(checkpoint, name + SCALE_2).view(1))
        else:
            found[name] = (codes, _as_computed(_whole(checkpoint, scale)))
    checkpoint.close()
    return found


def _whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return a tensor as it is stored, the matrices of a stack together."""
    first, *others = checkpoint.stored(name)
    if len(checkpoint.entries[name].shape) != 3:
        return first
    return torch.stack([matrix.view(torch.uint8) for matrix in (first, *others)]).view(first.dtype)


def _as_computed(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in the shape and type that quantizing gives them, from those of a checkpoint's layout."""
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    scale = scale[:, 0, :, 0] if scale.dim() == 4 else scale
    return scale.flatten(0, 1) if scale.dim() == 3 else scale
