"""Graphs that torch.compile has left on disk are taken only by processes of the instruction set that they were generated for."""

import json
import os
import subprocess
import sys

import pytest
import torch

from nemo_fp8.train.compiled import compiled_for_this_cpu, instruction_set
from nemo_fp8.train.megatron_cpu import megatron_on_cpu

COMPILES = """
import json
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from nemo_fp8.train.compiled import compiled_for_this_cpu

def swiglu(x):
    left, right = x.chunk(2, -1)
    return torch.nn.functional.silu(left) * right

x = torch.arange(-600.0, 600.0).reshape(6, 200) / 100
with compiled_for_this_cpu(), torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
    off = (torch.compile(swiglu)(x) - swiglu(x)).abs().max()
    torch._dynamo.reset()
    torch.compile(swiglu)(x)
found = counters["inductor"]
print(json.dumps({"off": float(off), "hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}))
"""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def compile_in_a_process(folder, **environment):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)} | environment
    done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="two instruction sets on one machine: AVX2 and AVX-512")
def test_processes_of_two_instruction_sets_share_a_cache_folder(tmp_path):
    """Each generates its own graph, which computes the right thing, and finds it again."""
    for environment in (AVX2, {}):
        run = compile_in_a_process(tmp_path, **environment)
        assert run["off"] < 1e-5
        assert (run["misses"], run["hits"]) == (1, 1), environment


@pytest.mark.parametrize("theirs", ["", "a tag of the user's"])
def test_the_tag_is_there_for_as_long_as_megatron_is_on_the_cpu(theirs):
    with torch.compiler.config.patch(cache_key_tag=theirs):
        with megatron_on_cpu():
            assert torch.compiler.config.cache_key_tag == f"{theirs} {instruction_set()}".strip()
        assert torch.compiler.config.cache_key_tag == theirs


def test_processors_with_and_without_amx_differ(monkeypatch):
    tags = set()
    for has in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_f": True, "amx_bf16": has, "num_sockets": 1})
        with compiled_for_this_cpu():
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 2
