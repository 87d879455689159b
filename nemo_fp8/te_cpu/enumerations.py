"""The enumerations of TE's extension, as a table: TE's Python asserts their members and stores their values in
checkpoints."""

from __future__ import annotations

import enum

import torch

_QKV_LAYOUTS = """SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD
    TH3D THD_T2HD
THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD
Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD
BHSD_BHSD_BHSD QKV_Layout_NOT_SET"""

# Members with their values; where a row is a string, its names count from 0.
_TABLE: dict[str, str | dict[str, int]] = {
    "DType": {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": " ".join(f"GEMM{i}_{t}" for i in (1, 2, 3) for t in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": " ".join(f"GRAD_{t}{i}" for i in (1, 2, 3) for t in ("OUTPUT", "INPUT")),
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
                      "NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
                       "NVTE_BHSD "
    "NVTE_QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": " ".join(f"NVTE_{layout}" for layout in _QKV_LAYOUTS.split()),
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D "
    "NVTE_NVFP4_1D_SCALING",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
                       "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS "
    "ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
}  # fmt: skip


def _members(row: str | dict[str, int]) -> dict[str, int]:
    return row if isinstance(row, dict) else {name: value for value, name in enumerate(row.split())}


ENUMERATIONS: dict[str, type[enum.IntEnum]] = {name: enum.IntEnum(name, _members(row)) for name, row in _TABLE.items()}  # type: ignore[misc]
"""Every enumeration by its name."""

_TORCH_DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


def torch_dtype(dtype: int | torch.dtype) -> torch.dtype:
    """Return torch's dtype for one of TE's; torch's own are returned as they are."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH_DTYPES[int(dtype)]
