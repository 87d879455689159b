"""Plan an export before a byte of a weight is read: every file, every tensor in it, and the place of its bytes.

Names and shapes decide everything: which weights are quantized (``models/selection.py``), the names of their scales
(the layout), and the length of each file. So a plan can be shown, checked against the disk, and compared with what an
earlier, killed export left.

A safetensors file is the length of its header, the header (JSON: name -> dtype, shape, span), and the bytes. Spans have
no gaps, so tensors of wide elements come first: then each one starts at a multiple of its element's size, which readers
that map files need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError
from nemo_fp8.export.codings import CODES, Coding
from nemo_fp8.export.layouts import Layout, coding_of, layout_of
from nemo_fp8.export.source import Source, require_quantizable
from nemo_fp8.models.units import Selection, module_of, select, sharing_a_scale
from nemo_fp8.render.modelopt import require_read
from nemo_fp8.storage.safetensors import DTYPES, INDEX, Described

# To be raised when the same source and contract are written differently.
VERSION = 1


@dataclass(frozen=True)
class Output:
    """One tensor of an output file: a copy of a source tensor, or its codes, or another part of it."""

    name: str
    about: Described
    source: str
    part: str = CODES


@dataclass(frozen=True)
class Shard:
    """One output file."""

    file: str
    outputs: tuple[Output, ...]
    metadata: dict[str, str]

    @cached_property
    def header(self) -> bytes:
        """The file up to the first byte of a tensor."""
        spans: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for output in self._in_order():
            spans[output.name] = {
                "dtype": output.about.dtype,
                "shape": [*output.about.shape],
                "data_offsets": [at, at + output.about.bytes],
            }
            at += output.about.bytes
        text = json.dumps(spans, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def starts(self) -> dict[str, int]:
        """The offset of each tensor in the file."""
        at, found = len(self.header), {}
        for output in self._in_order():
            found[output.name] = at
            at += output.about.bytes
        return found

    @cached_property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(output.about.bytes for output in self.outputs)

    def _in_order(self) -> list[Output]:
        return sorted(
            self.outputs, key=lambda o: (-DTYPES[o.about.dtype].itemsize if o.about.dtype in DTYPES else -1, o.name)
        )


@dataclass(frozen=True)
class Plan:
    """Every decision of an export, made before a byte is written."""

    source: Source
    precision: Precision
    layout: Layout
    forms: Mapping[str, Precision]
    """The contract of each quantized weight, without rules: the one that the contract's rules for modules give it."""
    codings: Mapping[str, Coding]
    """How each quantized weight is stored."""
    selection: Selection
    shards: tuple[Shard, ...]
    config: dict[str, Any] | None
    """The config.json to write; None if the source has none."""
    quantization: dict[str, Any] | None
    """Its ``quantization_config``."""
    identity: dict[str, Any]
    """The values in which an unfinished export must equal this one, to be resumed."""

    @classmethod
    def of(cls, source: Source, precision: Precision, layout: str | None = None) -> Plan:
        """Plan the export of a source; ``layout`` None is the usual one for the contract.

        Raises PrecisionError if the layout is unknown, the contract or the source cannot be written in it, or nothing
        would be quantized although the contract's rollout is.
        """
        _require_writable(precision)
        model = _text_model(source.config)
        shapes = {name: about.shape for name, about in source.tensors.items()}
        selection = select(shapes, precision, layers=_size(model, "num_hidden_layers"), kv_rows=_kv_rows(model))
        require_quantizable(source, sorted(selection.quantized))
        if precision.rolls_out_quantized and not selection.quantized:
            raise PrecisionError(
                f"Nothing of {source.name} would be quantized.",
                _why_nothing(selection),
                "Check first_layers, last_layers and keep; --precision bf16_mixed writes a checkpoint that is not "
                "quantized.",
            )
        forms = {name: own for unit in selection.units for own in [unit.contract(precision)] for name in unit.tensors}
        how = layout_of(layout, {*forms.values()})
        codings = {p: coding_of(p, how) for p in {*forms.values()}}
        stacks = [name for name in selection.quantized if len(shapes[name]) == 3]
        if stacks and not how.stacks:
            raise PrecisionError(
                f"{sorted(stacks)[0]} is a stack of experts, in the {how.name} layout.",
                "That layout has a name for the scale of a module, and a stack is none.",
                "Write the deepseek layout, or the experts apart.",
            )
        if how.name == "modelopt":
            require_read(forms)
        named = {module_of(name): own for name, own in forms.items()}
        quantization = how.config(named, selection.not_converted) if named else None
        identity = {
            "version": VERSION,
            "source": source.identity(),
            "precision": {k: v for k, v in precision.to_dict().items() if k != "name"},
            "layout": how.name,
        }
        metadata = {"format": "pt", "nemo_fp8_export": _digest(identity)}
        of = {name: codings[own] for name, own in forms.items()}
        shards = tuple(
            Shard(file, tuple(o for name in names for o in _outputs(source, name, how, of.get(name))), metadata)
            for file, names in source.shards.items()
        )
        _require_distinct(shards)
        config = source.config
        if config is not None and quantization is not None:
            config = {**config, "quantization_config": quantization}
        return cls(source, precision, how, forms, of, selection, shards, config, quantization, identity)

    @property
    def fingerprint(self) -> str:
        """A hash of the identity, which is in the header of every file."""
        return _digest(self.identity)

    @cached_property
    def sharing(self) -> dict[str, tuple[str, ...]]:
        """The weights that share a scale with each quantized weight, itself among them."""
        return {name: names for names in sharing_a_scale(sorted(self.selection.quantized)) for name in names}

    @property
    def beside(self) -> dict[str, Any]:
        """Further files that say how the weights are quantized, by name."""
        return {} if self.quantization is None else self.layout.beside(self.quantization)

    @property
    def texts(self) -> dict[str, Any]:
        """What the files of JSON say, by name; config.json is the last one."""
        files = {INDEX: self.index, **self.beside, "config.json": self.config}
        return {name: value for name, value in files.items() if value is not None}

    @property
    def bytes_in(self) -> int:
        """The bytes of all tensors of the source."""
        return sum(about.bytes for about in self.source.tensors.values())

    @property
    def bytes_out(self) -> int:
        """The bytes of all weight files of the export."""
        return sum(shard.size for shard in self.shards)

    @property
    def index(self) -> dict[str, Any] | None:
        """The model.safetensors.index.json; None if there is only one file."""
        if len(self.shards) == 1 and self.shards[0].file == "model.safetensors":
            return None
        outputs = [(output, shard.file) for shard in self.shards for output in shard.outputs]
        total = sum(output.about.bytes for output, _ in outputs)
        return {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted((output.name, file) for output, file in outputs)),
        }


def _require_writable(precision: Precision) -> None:
    """Raise PrecisionError for a rollout that no layout of checkpoints can express."""
    if not precision.rolls_out_quantized:
        return
    if any(p.rollout_block == "tensor" for p in precision.variants()):
        raise PrecisionError(
            "rollout_block='tensor' as a checkpoint.",
            "Engines that fuse Q, K and V, or gate and up, take whole blocks from a checkpoint as they are; one scale "
            "for a tensor would have to be shared between files.",
            "Add --set rollout_block=128x128.",
        )
    if precision.activation_scheme == "static":
        raise PrecisionError(
            "activation_scheme='static' as a checkpoint.",
            "Static scales of activations are calibrated, and a checkpoint's weights say nothing of them.",
            "Add --set activation_scheme=dynamic.",
        )


def _outputs(source: Source, name: str, layout: Layout, coding: Coding | None) -> tuple[Output, ...]:
    about = source.tensors[name]
    if coding is None:
        return (Output(name, about, name),)
    return tuple(
        Output(layout.name_of(name, part), made, name, part) for part, made in coding.parts(about.shape).items()
    )


def _require_distinct(shards: Sequence[Shard]) -> None:
    seen: set[str] = set()
    for output in (output for shard in shards for output in shard.outputs):
        if output.name in seen:
            raise PrecisionError(
                f"There would be two tensors of the name {output.name}.",
                "The source holds one of the name that a scale has in the export.",
                "Give the BF16 checkpoint without scales.",
            )
        seen.add(output.name)


def _text_model(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the part of a config that describes the decoder."""
    config = config or {}
    return next((config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config)


def _kv_rows(model: dict[str, Any]) -> int | None:
    heads, hidden = _size(model, "num_attention_heads"), _size(model, "hidden_size")
    if not heads or not hidden:
        return None
    return (_size(model, "num_key_value_heads") or heads) * (_size(model, "head_dim") or hidden // heads)


def _size(model: dict[str, Any], name: str) -> int | None:
    size = model.get(name)
    if isinstance(size, int | None):
        return size
    raise PrecisionError(
        f"{name} in config.json is {size!r}.", "It is one whole number.", "Copy or download the folder again."
    )


def _why_nothing(selection: Selection) -> str:
    rules = {kept.rule: kept.reason for kept in selection.kept.values()}
    return (
        "; ".join(f"{rule}: {reason}" for rule, reason in rules.items() if rule != "always")
        or "It holds no linear of a decoder."
    )


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
