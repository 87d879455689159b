"""Every Triton program that a launch can ask for, compiled for three GPUs with Triton's own ptxas: no GPU is needed.

What is held: no register in memory, 128-bit loads and stores where the launch found everything aligned, the hardware's
FP8 conversion; that the list is complete, by launching; and that each check has been seen to say no. Triton decides
when it is imported whether it interprets, so this file needs a process in which it does not.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_fp8.te_cpu import has_gpu

if importlib.util.find_spec("transformer_engine") and not has_gpu():
    pytest.skip(
        "TransformerEngine is here: the rollout environment runs these, in a process of their own",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="no triton here: it comes with the rollout environment")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("triton interprets in this process, and compiles in another", allow_module_level=True)


from benchmarks import compile_kernels
from benchmarks.compile_kernels import TARGETS, compile_launch, problems
from nemo_fp8.numerics import kernels
from nemo_fp8.numerics.formats import FORMATS
from nemo_fp8.numerics.kernels import cuda, cuda_fp4, triton_kernels

SOURCES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every program, by its name and target: those of the record that are of today's sources, of which a part is
    compiled again; and all others compiled, which takes ten minutes of a core if there are none in the record."""
    known = compile_kernels.recorded()
    with compile_kernels.processes(str(tmp_path_factory.mktemp("triton"))) as pool:
        started = compile_kernels.start(pool, lambda *which: which not in known or _again(*which))
        compiled = {which: future.result() for which, future in started.items()}
    again = {which: made for which, made in compiled.items() if which in known}
    as_recorded = {which: replace(known[which], executed={}, f2fp=0) for which in again}
    assert again == as_recorded, "the record is of another compiler: benchmarks/compile_kernels.py --write"
    return known | compiled


AGAIN = (
    "bfloat16 to e4m3, 128x128",
    "bfloat16 to e4m3, 1x128, statistics",
    "bfloat16 to e2m1, 1x16",
    "e2m1 to bfloat16",
)


def _again(name, target):
    return target == TARGETS[0] and name in AGAIN


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3000)  # five minutes on two cores that are free, if all of them are compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_program_compiles_without_spilling(made, source, target):
    found = [m for (name, capability), m in made.items() if capability == target and re.search(rf"\b{source}\b", name)]
    # Aligned or not: amax; formats x tiles x statistics; formats x ways to decode; NVFP4's tiles x rules, and its ways.
    assert len(found) == 2 * (1 + 2 * 6 * 2 + 2 * 2 + 2 * 2 + 2)
    assert [f"{m.name} for sm_{target}: {problem}" for m in found for problem in problems(m)] == []
    assert {m.capability for m in found} == {target}
    assert sum(m.wide for m in found) == len(found) // 2


def test_a_record_of_other_kernels_is_no_record(monkeypatch, tmp_path):
    page = tmp_path / "triton.md"
    monkeypatch.setattr(compile_kernels, "PAGE", page)
    page.with_suffix(".json").write_text(compile_kernels.record([]))
    assert compile_kernels.recorded() == {}
    made = compile_kernels.Compiled("", 90, 1, 1, 1, 1, 0, {}, {}, 0, False, False, 16, 8)
    page.with_suffix(".json").write_text(compile_kernels.record([made, replace(made, name="4", module="triton_fp4")]))
    assert set(compile_kernels.recorded()) == {("", 90), ("4", 90)}
    for module in ("triton_kernels", "triton_fp4", "triton_turn"):
        source = Path(triton_kernels.__file__).with_name(f"{module}.py").read_text()
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "cuda.py"))
    assert set(compile_kernels.recorded()) == {("", 90), ("4", 90)}
    with (tmp_path / "triton_fp4.py").open("a") as file:
        file.write("# another\n")
    assert set(compile_kernels.recorded()) == {("", 90)}
    (tmp_path / "triton_fp4.py").write_text(Path(triton_kernels.__file__).with_name("triton_fp4.py").read_text())
    with (tmp_path / "triton_kernels.py").open("a") as file:
        file.write("# another\n")
    assert compile_kernels.recorded() == {}  # NVFP4's take some from there


def test_the_machine_code_converts_in_hardware_too(cache):
    """PTX is what was asked for, SASS what the GPU runs: two values to an F2FP."""
    launches = dict(cuda.variants())
    for name in ("bfloat16 to e5m2, a given scale", "e4m3 to float16, tiles of rows"):
        for target in TARGETS:
            made = compile_launch(name, launches[name], target, sass=True)
            assert 2 * made.f2fp >= made.values
            assert made.executed["issue"] > made.values


@pytest.mark.parametrize("tile", ["1x128", "1x32", "128x128"])
def test_nothing_is_counted_in_16_bits(cache, tile):
    """Where LLVM narrows the least code to 16 bits, the ptxas of CUDA 12.8, which Triton 3.6 has, dies of it."""
    launch = dict(cuda.variants())[f"bfloat16 to e4m3, {tile}, statistics"]
    triton.runtime.driver.set_active(compile_kernels.Named(90))
    constants = launch.constants | {"HARDWARE": True}
    kernel, *_ = cuda._kernel(launch.module, launch.kernel)
    made = kernel.warmup(*launch.arguments, grid=(launch.programs,), num_warps=launch.warps, **constants)
    assert re.findall(r"\b(?:min|max)\.[us]16\b", made.asm["ptx"]) == []


def test_what_is_turned_moves_16_bytes_at_once(cache):
    launches = {name: launch for name, launch in cuda.variants() if "turned" in name}
    assert list(launches) == [f"{size} bytes turned{how}" for size in (1, 2) for how in ("", ", unaligned")]
    for name, launch in launches.items():
        made = compile_launch(name, launch, 90)
        assert problems(made) == []
        assert made.wide == ("unaligned" not in name)


# ---------------------------------------------------------------------- the list


def _program(launch: cuda.Launch) -> tuple[object, ...]:
    """What Triton tells programs apart by, as Triton itself finds it from the arguments."""
    triton.runtime.driver.set_active(compile_kernels.Named(90))
    kernel, *_ = cuda._kernel(launch.module, launch.kernel)
    *_, binder = kernel.create_binder()
    bound = binder(*launch.arguments, **launch.constants, num_warps=launch.warps)
    return (launch.kernel, str(bound[1]), launch.warps)


@pytest.fixture
def launched(monkeypatch):
    """Programs that calls ask for, in place of starting them."""
    asked = {}
    monkeypatch.setattr(cuda, "_start", lambda launch: asked.setdefault(_program(launch), launch))
    return asked


def test_the_list_holds_every_program_that_calls_launch(launched):
    """Tensors of many shapes, alignments and layouts, under every rule: Triton is asked for nothing that is not in the
    list."""
    listed = {_program(launch) for _, launch in cuda.variants()}
    assert len(listed) == len(list(cuda.variants()))
    rules = itertools.cycle(cuda.RULES)
    big = torch.empty(1 << 12, dtype=torch.float32)
    for dtype, element, statistics in itertools.product(SOURCES.values(), ("e4m3", "e5m2"), (False, True)):
        empty = functools.partial(torch.empty, dtype=dtype)
        odd = big.view(dtype)[1:].as_strided((4, 16), (16, 1))  # begins between two multiples of 16 bytes
        slices = (empty(128, 256)[1:, 16:], empty(128, 256)[:, 1:129], empty(64, 32).t(), odd)
        for x in (empty(16, 16), empty(1, 1), empty(3, 5, 257), empty(160), *slices):
            for tile in (*cuda.TILES, None) if x.dim() > 1 else (None,):
                convention, kind = next(rules) if tile else ("te", "fp32")
                found = cuda.quantize(x, tile, element, kind, convention, statistics, None, None)
                assert found is not None
                cuda.decode(found[0], found[1], tile, dtype, None)
                if tile is not None:
                    scales = torch.empty(found[1].shape[::-1], dtype=found[1].dtype).t()
                    cuda.quantize(x, tile, element, kind, convention, statistics, None, (found[0], scales))
            turned = x.new_empty(x.shape[::-1])
            if x.dim() == 2 and cuda.turn(x, turned):
                assert cuda.turn(found[0], turned.to(found[0].dtype))
    assert launched.keys() - listed == set()
    assert listed - launched.keys() == set()  # and nothing is listed that no call launches


class Recording(compile_kernels.Named):
    """A driver of no GPU, for which Triton compiles, and that writes down what it is asked to launch."""

    def __init__(self, capability, launched):
        super().__init__(capability)

        class Launcher:
            def __init__(self, source, metadata):
                self.name = (metadata.name, metadata.hash)

            def __call__(self, *arguments):
                # The grid; the stream, the function, three of Triton's own and two hooks; the kernel's arguments.
                launched.append((self.name, arguments[:3], arguments[9:]))

        class Utils:
            def load_binary(self, *binary):
                return 1, 1, 64, 0, 1024

            def get_device_properties(self, device):
                return {"max_shared_mem": 1 << 20}

            def unload_module(self, module):
                pass

        self.launcher_cls, self.utils = Launcher, Utils()


def test_a_program_launched_again_gets_what_triton_gave_it(cache, monkeypatch):
    """The second launch goes past Triton's search: the same program, the same arguments in the same order."""
    seen = []
    monkeypatch.setattr(cuda, "_COMPILED", {})
    triton.runtime.driver.set_active(Recording(90, seen))
    launches = {
        name: launch
        for name, launch in [*cuda.variants(), *cuda_fp4.variants()]
        if re.match(
            "bfloat16 to e4m3, 128x128$|e4m3 to bfloat16, tiles of rows$|1 bytes|e2m1 to bfloat16|bfloat16 to e2m1, 1x",
            name,
        )
    }
    assert len({launch.kernel for launch in launches.values()}) == 5
    for launch in launches.values():
        cuda._start(launch)
    found_by_triton = list(seen)
    seen.clear()
    monkeypatch.setattr(triton.JITFunction, "run", None)  # it is not asked again
    for launch in launches.values():
        cuda._start(launch)
    assert len(seen) == len(launches) == len(found_by_triton)
    for (name, grid, arguments), (first, at_first, given) in zip(seen, found_by_triton, strict=True):
        assert (name, grid, len(arguments)) == (first, at_first, len(given))
        assert all(a is b or a == b for a, b in zip(arguments, given, strict=True))


def test_programs_are_told_apart_as_triton_does():
    triton.runtime.driver.set_active(compile_kernels.Named(90))
    launches = [launch for _, launch in [*cuda.variants(), *cuda_fp4.variants()]]
    ours = {(launch.kernel, cuda._told_apart_by(launch)) for launch in launches}
    assert len(ours) == len({_program(launch) for launch in launches}) == len(launches)


def test_sizes_beyond_32_bits_take_the_same_programs(launched):
    """Triton would make one of its own for each 64-bit argument; ours are declared so."""
    listed = {_program(launch) for _, launch in cuda.variants()}
    x = torch.empty(1, 1 << 33, dtype=torch.bfloat16, device="meta")
    launch = cuda.cast(x, cuda.WHOLE, FORMATS["e4m3"], None, amax=torch.empty(1))
    assert _program(launch) in listed
    assert any(isinstance(argument, int) and argument == 1 << 33 for argument in launch.arguments)


def test_tiles_without_a_program_are_left_to_torch_and_said_once(caplog):
    cuda._left_to_torch.cache_clear()
    for _ in range(3):
        assert cuda.quantize(torch.ones(64, 64), (64, 64), "e4m3", "fp32", "te", False, None, None) is None
    assert [record.message for record in caplog.records if "64x64" in record.message] == [caplog.records[0].message]
    assert kernels.quantize(torch.ones(64, 64), (64, 64), "e4m3", "fp32") is not None  # on a CPU there is one


# ---------------------------------------------------------------------- the checks, saying no


def test_a_program_that_spills_is_seen(cache):
    name = "bfloat16 to e4m3, 128x128, statistics"
    launch = dict(cuda.variants())[name]
    assert problems(compile_launch(name, launch, 90)) == []
    found = problems(compile_launch(name, launch, 90, maxnreg=32))
    assert len(found) == 1
    assert "registers are spilled to memory, beside 32" in found[0]


def test_narrow_loads_and_conversions_by_hand_are_seen(cache):
    name = "bfloat16 to e4m3, a given scale"
    launch = dict(cuda.variants())[name]
    by_hand = problems(compile_launch(name, launch, 100, HARDWARE=False))
    assert by_hand == ["the hardware converts 0 of 64 values"]
    narrow = compile_launch(name, launch, 100, ALIGNED=False)
    assert problems(narrow) == []  # nothing was promised
    found = problems(replace(narrow, wide=True))
    assert found == ["0 loads of 128 bits for 64 values of 16", "0 stores of 128 bits for 64 values of 8"]
