"""Make the receipt of a push from the facts of all workers: what was written, and how good it is.

The numbers of quality (SNR, bad scales) are those of the quantization, made in the engine or on the way to it. A
fingerprint is that of the bytes that lie in the engine: codes and scales of a quantized tensor, values of any other.
Under tensor parallelism every worker fingerprints the part that it holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_fp8.errors import PrecisionError, Problem
from nemo_fp8.rollout.refit.fingerprint import together
from nemo_fp8.rollout.refit.manifest import Entry, Manifest

CODED = ("fp8", "nvfp4")
TOO_LARGE = 2.0**64
"""The root of FP32's largest value, nearly: a norm squares what a layer gives it, which would overflow."""


@dataclass(frozen=True)
class Written:
    """What all workers together wrote of one tensor."""

    name: str
    """Of a stack of experts the numbers are those of the whole stack; only ``snr_db`` is the worst expert's."""
    shape: tuple[int, ...]
    kind: str
    """``fp8``, ``nvfp4``, ``kv scale``, or the dtype in which the tensor is kept."""
    largest: float
    """The largest magnitude of its values; an upper bound for codes that came with scales."""
    snr_db: float | None
    """The SNR of its quantization; None if the push quantized nothing."""
    saturated: int
    underflow: int
    nonfinite: int
    scales: int
    bad_scales: int
    aligned: bool
    """Whether its blocks are those of the unsharded tensor."""
    verified: bool | None
    """Whether it was read back from the engine's memory and is right; None if not asked for, or impossible."""
    fingerprints: Mapping[str, str]
    """Fingerprints by the part of the tensor that a worker holds."""
    experts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Of a stack of experts, the numbers of each: ``largest``, ``snr_db``, ``saturated``, ``underflow``, ``nonfinite``
    and ``bad_scales``."""

    def where(self, number: str, wrong: Callable[[Any], bool]) -> list[str]:
        """Return this tensor's name if a number of it is wrong; of a stack, ``name[expert]`` for each that is."""
        if not self.experts:
            return [self.name] if wrong(getattr(self, number)) else []
        return [f"{self.name}[{e}]" for e, value in enumerate(self.experts[number]) if wrong(value)]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all parts together."""
        return together([self.fingerprints[part] for part in sorted(self.fingerprints)]) if self.fingerprints else ""


@dataclass(frozen=True)
class Delta:
    """What a push of changes changed, or why it was a push of everything."""

    base: str = ""
    """The push that the engine held before."""
    changed: int = 0
    elements: int = 0
    """Codes and values that can be patched; ``changed`` of them did."""
    full_bytes: int = 0
    """The least that a push of everything takes: codes, scales, and values of what is not in FP8."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Tensors that were sent whole, and why they cannot be patched."""
    confirmed: int = 0
    """Tensors whose fingerprint the engine read from its memory, and that is the trainer's."""
    instead: str = ""
    """Why everything was pushed instead; empty if only changes were."""

    @property
    def share(self) -> float:
        """The share of codes and values that changed."""
        return self.changed / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the share, as plain values."""
        return asdict(self) | {"share": self.share}


@dataclass(frozen=True)
class Receipt:
    """What a push did. ``print`` it, keep its ``to_dict()``, or ``require()`` that it has no problems."""

    push: str
    tensors: tuple[Written, ...]
    passed_over: tuple[str, ...]
    """Names that were not sent, since the engine's loader passes over them, as it does at start."""
    never_written: tuple[str, ...]
    """Parameters of vLLM's model that no tensor of a checkpoint belongs to."""
    workers: int
    bytes: int
    chunks: int
    chunk_bytes: int
    held_bytes: int
    """The most bytes that a worker held beside the model: layers that are packed whole, and blocks of two tensors."""
    seconds: float
    prefix_cache_reset: bool
    after_failure: str = ""
    """How the push before this one died, if it did."""
    weight_version: str = ""
    """What vLLM says that it calls these weights; empty if the engine was reached by a way that does not tell."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the steps: ``check``, ``stream`` and ``finish``."""
    delta: Delta | None = None
    """What a push with ``delta=True`` changed; None for any other."""

    # ------------------------------------------------------------------ results

    @property
    def fp8(self) -> tuple[Written, ...]:
        """The tensors that lie in the engine as codes, of FP8 or of NVFP4."""
        return tuple(t for t in self.tensors if t.kind in CODED)

    @property
    def four_bit_bytes(self) -> tuple[int, int]:
        """The bytes of all NVFP4 codes and scales, and of the same weights in BF16."""
        weights = sum(math.prod(t.shape) for t in self.tensors if t.kind == "nvfp4")
        return weights // 2 + weights // 16, 2 * weights

    @property
    def misaligned(self) -> tuple[str, ...]:
        """Tensors whose blocks straddle the cuts of tensor parallelism or of a fused weight."""
        return tuple(t.name for t in self.fp8 if not t.aligned)

    @property
    def computed(self) -> tuple[str, ...]:
        """Tensors of which the engine's loader makes other values, as it does at start (``A = -exp(A_log)``)."""
        return tuple(t.name for t in self.tensors if any(" of " in part for part in t.fingerprints))

    @property
    def verified(self) -> bool | None:
        """Whether all tensors that can be read back are right; None if that was not asked for."""
        answers = [t.verified for t in self.tensors if t.verified is not None]
        return all(answers) if answers else None

    @property
    def snr_db(self) -> tuple[float, str] | None:
        """The lowest SNR of any FP8 tensor, with its name."""
        known = [(t.snr_db, _worst(t)) for t in self.fp8 if t.snr_db is not None]
        return min(known) if known else None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all weights: equal for engines that hold the same weights, sharded the same way."""
        return together([f"{t.name}:{t.fingerprint}" for t in sorted(self.tensors, key=lambda t: t.name)])

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Reasons for a training loop to stop. The engine holds exactly what was pushed even then."""
        return tuple(_problems(self))

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def require(self) -> Receipt:
        """Return the receipt; raise PrecisionError with all its problems if it has any."""
        if self.problems:
            raise PrecisionError(self.problems)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and results as plain values, for JSON."""
        lowest = self.snr_db
        return asdict(self) | {
            "ok": self.ok,
            "verified": self.verified,
            "fingerprint": self.fingerprint,
            "lowest_snr_db": None if lowest is None else lowest[0],
            "misaligned": list(self.misaligned),
            "problems": [p.to_dict() for p in self.problems],
            "delta": self.delta and self.delta.to_dict(),
        }

    # ------------------------------------------------------------------ as text

    def __str__(self) -> str:
        """Return a summary in lines of at most 80 columns."""
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        took = f"{_size(self.bytes)} in {self.seconds:.2f} s ({rate:.1f} GB/s)"
        head = (
            f"push {self.push}: {len(self.tensors)} tensors, {took}, {self.workers} "
            f"worker{'' if self.workers == 1 else 's'}"
        )
        return "\n".join([head, *(f"  {name:<14}{_fit(text)}" for name, text in self._rows())])

    def _rows(self) -> list[tuple[str, str]]:
        kinds = Counter(t.kind for t in self.tensors)
        rows = [("written", ", ".join(f"{count} as {kind}" for kind, count in kinds.most_common()))]
        lowest = self.snr_db
        if lowest:
            rows.append(("lowest SNR", f"{lowest[0]:.1f} dB in {lowest[1]}"))
        if self.fp8:
            scales, bad = sum(t.scales for t in self.fp8), sum(t.bad_scales for t in self.fp8)
            rows.append(
                (
                    "scales",
                    f"{scales}, all positive and finite"
                    if not bad
                    else f"{bad} of {scales} zero, infinite or no number",
                )
            )
            rows.append(
                (
                    "blocks",
                    _some(self.misaligned, "those of the unsharded weights", "others than the unsharded weight's in"),
                )
            )
        held, wide = self.four_bit_bytes
        if held:
            rows.append(("NVFP4", f"{_size(held)} of codes and scales, {wide / held:.1f} times less than in BF16"))
        if self.computed:
            rows.append(("computed", _some(self.computed)))
        if self.delta is not None:
            rows += _delta_rows(self.delta, self.bytes)
        if self.passed_over:
            rows.append(("passed over", _some(self.passed_over)))
        if self.never_written:
            rows.append(("never written", _some(self.never_written)))
        if self.verified is not None:
            checked = sum(t.verified is not None for t in self.tensors)
            rows.append(("verified", f"{checked} of {len(self.tensors)} read back" if self.verified else "NO"))
        memory = f"{_size(self.chunk_bytes)} of buffers, {self.chunks} chunks"
        rows.append(
            ("memory", memory + (f", {_size(self.held_bytes)} held for whole layers" if self.held_bytes else ""))
        )
        rows.append(("prefix cache", "reset" if self.prefix_cache_reset else "NOT reset"))
        if self.weight_version not in ("", self.push):
            rows.append(("weight version", self.weight_version))
        if self.after_failure:
            rows.append(("repairs", self.after_failure))
        rows.append(("fingerprint", self.fingerprint))
        return rows + [("PROBLEM", p.what) for p in self.problems]


def _delta_rows(delta: Delta, sent: int) -> list[tuple[str, str]]:
    if delta.instead:
        return [("all, since", delta.instead)]
    less = f"{delta.full_bytes / sent:.0f} times less than everything" if sent else "nothing was sent"
    rows = [
        ("changed", f"{delta.share:.3%} of {delta.elements / 1e6:.1f} million since push {delta.base}, {less}"),
        ("confirmed", f"{delta.confirmed} tensors in the engine have the trainer's fingerprint"),
    ]
    return [*rows, ("sent whole", _some([*delta.whole]))] if delta.whole else rows


def receipt(
    manifest: Manifest,
    answers: Sequence[Mapping[str, Any]],
    casts: Mapping[int, Mapping[str, NDArray[Any]]] = MappingProxyType({}),
    **about: Any,
) -> Receipt:
    """Return the receipt made of the workers' answers to ``finish``; ``about`` are its other fields.

    ``casts`` is what the trainer counted of the tensors that it cast by itself, of which workers saw only codes.
    """
    told = []
    for i, entry in enumerate(manifest):
        some = [answer["facts"][str(i)] for answer in answers if str(i) in answer["facts"]]
        if some:
            told.append((entry, some, casts.get(i)))
    never = {name for answer in answers for name in answer["unwritten"]}
    held = max(answer["held"] for answer in answers)
    return Receipt(
        tensors=tuple(_written(told)) if told else (), never_written=tuple(sorted(never)), workers=len(answers),
        held_bytes=held, **about,
    )  # fmt: skip


_SHOWN = ("saturated", "underflow", "nonfinite", "bad_scales")
_COUNTED: dict[str, tuple[type, Any]] = {
    "signal": (float, np.add), "noise": (float, np.add), "largest": (float, np.maximum),
    **dict.fromkeys(_SHOWN, (int, np.add)),
}  # fmt: skip
"""What workers and casts count, its type, and how the counts of two become one: a NaN is the largest of all."""
Told = tuple[Entry, Sequence[Mapping[str, Any]], Mapping[str, NDArray[Any]] | None]


def _written(told: Sequence[Told]) -> Iterator[Written]:
    """Yield each tensor by the facts of all workers about it, and by what its cast in the trainer counted.

    Experts are many, and so is their time: the numbers of all experts of all tensors lie in one array.
    """
    sizes = [max(1, *(one["experts"] for one in some)) for _, some, _ in told]
    ends = [*itertools.accumulate(sizes)]
    starts = [0, *ends[:-1]]
    each = {
        name: np.concatenate([_numbers(name, size, *one[1:]) for size, one in zip(sizes, told, strict=True)])
        for name in _COUNTED
    }
    whole = {name: join.reduceat(each[name], starts).tolist() for name, (_, join) in _COUNTED.items()}
    snr = _snr_db(each["signal"], each["noise"])
    worst = _or_none(np.fmin.reduceat(snr, starts))
    shown = {name: each[name].tolist() for name in ("largest", *_SHOWN)} | {"snr_db": _or_none(snr)}
    for n, (entry, some, _) in enumerate(told):
        checks = [one["verified"] for one in some if one["verified"] is not None]
        fingerprints: dict[str, str] = {}
        for one in some:
            for part, print_ in one["fingerprints"].items():
                if fingerprints.setdefault(part, print_) != print_:
                    fingerprints[part] = "workers differ"
        stacked = any(one["experts"] for one in some)
        yield Written(
            name=entry.name,
            shape=entry.shape,
            kind=some[0]["kind"],
            largest=whole["largest"][n],
            snr_db=worst[n],
            aligned=all(one["aligned"] for one in some),
            verified=all(checks) if checks else None,
            fingerprints=fingerprints,
            scales=sum(one["scales"] for one in some),
            experts={name: numbers[starts[n] : ends[n]] for name, numbers in shown.items()} if stacked else {},
            **{name: whole[name][n] for name in _SHOWN},
        )


def _numbers(
    name: str, experts: int, some: Sequence[Mapping[str, Any]], cast: Mapping[str, NDArray[Any]] | None
) -> NDArray[Any]:
    """Return a count of each expert of a tensor; where a worker tells one number, it is that of each."""
    if cast is not None and name in cast:
        return cast[name]
    kind, join = _COUNTED[name]
    return functools.reduce(join, (np.broadcast_to(np.asarray(one[name], kind), experts) for one in some))


def _snr_db(signal: NDArray[np.float64], noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the SNR of each tensor, or expert; NaN where all of it is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = signal / noise  # 0, or no number, where values came back infinite
        found = np.where(noise == 0, math.inf, np.where(ratio > 0, 10 * np.log10(ratio), -math.inf))
    return np.where(signal == 0, math.nan, found)


def _or_none(numbers: NDArray[np.float64]) -> list[float | None]:
    """Return plain numbers, None where one is NaN."""
    return [None if math.isnan(number) else number for number in numbers.tolist()]


def _worst(t: Written) -> str:
    """Return the name of a tensor, and of its expert with the lowest SNR if it is a stack."""
    return f"{t.name}[{t.experts['snr_db'].index(t.snr_db)}]" if t.experts else t.name


def _problems(r: Receipt) -> list[Problem]:
    """Return one problem for each kind of finding, with the first tensor that has it and the number of others."""
    rows = (
        (
            _named(r.tensors, "bad_scales", bool),
            "Scales that are zero, infinite, no number, or no power of two where the contract wants one",
            "What they multiply becomes zero or NaN, or is read otherwise than it was written.",
            "Look at these weights in the trainer: they have overflowed, or were quantized under another contract.",
        ),
        (
            _named(r.tensors, "nonfinite", bool),
            "Infinite values or NaNs",
            "The trainer sent them. In 128x128 blocks an infinity became the largest code beneath a scale of 1, and a "
            "NaN stays one, which vLLM's kernel for CPUs with AMX reads as a number; in MXFP8 and in BF16 both stay "
            "what they are. In NVFP4 the scale of a whole matrix is made of its largest value, so nothing that it "
            "holds is finite, and nothing that is fused with it.",
            "Look at these weights in the trainer.",
        ),
        (
            _named([t for t in r.tensors if len(t.shape) > 1 and not t.name.endswith("bias")], "largest", _is_zero),
            "Weights that are all zero",
            "What is multiplied with them is zero. A trainer that shards its weights sends zeros where a shard was "
            "let go or not gathered.",
            "Gather the whole tensor before it is pushed; a layer that was made of zeros is no longer told of once it "
            "has learned.",
        ),
        (
            _named(r.tensors, "largest", lambda value: TOO_LARGE <= value < math.inf),
            f"Values of {TOO_LARGE:.1e} and more",
            "Their squares are beyond FP32, so what a layer computes with them is infinite or NaN.",
            "Look at these weights in the trainer: it has diverged, or they were read in another type than they were "
            "written.",
        ),
        (
            [t.name for t in r.tensors if t.verified is False],
            "Bits that are not those of the reference",
            "The engine's memory was read back and compared.",
            "Push again; if it stays, report it with this receipt.",
        ),
        (
            [t.name for t in r.tensors if "workers differ" in t.fingerprints.values()],
            "Workers that hold different bits of the same part",
            "They were sent the same bytes.",
            "Push again; if it stays, report it with this receipt.",
        ),
    )
    problems = [Problem(f"{what}: {_some(names)}.", why, remedy) for names, what, why, remedy in rows if names]
    return problems if r.prefix_cache_reset else [*problems, _NOT_FORGOTTEN]


def _named(tensors: Iterable[Written], number: str, wrong: Callable[[Any], bool]) -> list[str]:
    return [name for t in tensors for name in t.where(number, wrong)]


def _is_zero(value: float) -> bool:
    return value == 0


_NOT_FORGOTTEN = Problem(
    "The prefix cache was not reset.",
    "vLLM says so. A prompt that begins as an earlier one would be answered with keys and values of the old weights.",
    "Let no request be computed, and call reset_prefix_cache(reset_running_requests=True) of the engine before the "
    "next one.",
)


def _some(names: Sequence[str], none: str = "", lead: str = "") -> str:
    """Return the first name and the number of others, after ``lead``; ``none`` if there are no names."""
    if not names:
        return none
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{lead} {names[0]}{more}".strip()


def _fit(text: str, width: int = 64) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.2f} GB"
        if count >= 1e9
        else f"{count / 1e6:.1f} MB"
        if count >= 1e6
        else f"{count / 1e3:.1f} kB"
    )
