"""For every theme: property tests have no deadline, since a busy machine is no counterexample; what takes longest
begins first."""

import importlib
import os
import runpy
import signal
import sys

import pytest
from hypothesis import settings

# NEMO_FP8_TESTS_AS=avx2: tests, and every process that they start, see a processor with AVX2 and nothing newer. So they
# do where oneDNN is kept to that: vLLM asks the processor, and would multiply by AMX through oneDNN.
_AS = os.environ.get("NEMO_FP8_TESTS_AS") or (
    "avx2" if os.environ.get("ONEDNN_MAX_CPU_ISA", "").startswith("AVX2") else ""
)
if _AS:
    importlib.import_module(f"support.as_{_AS}.sitecustomize")

# For this process, which was there before, and for those that tests start.
_HERE = os.path.dirname(__file__)
runpy.run_path(os.path.join(_HERE, "sitecustomize.py"))
_PATH = [_HERE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATH))

settings.register_profile("nemo_fp8", deadline=None)
settings.load_profile("nemo_fp8")

# A shell that starts `make test` in the background, or nohup, lets it ignore these, and what a test starts inherits
# that over exec.
for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)


@pytest.fixture(autouse=True)
def nothing_stays_quantized():
    """TransformerEngine holds what runs in FP8 in a global. A test that leaves it on fails here, and not the next one
    in its process."""
    yield
    module = sys.modules.get("transformer_engine.pytorch.quantization")
    manager = getattr(module, "FP8GlobalStateManager", None)  # None while a test takes TransformerEngine away
    if manager is not None:
        left = manager.is_fp8_enabled() or manager.with_fp8_parameters()
        if left:
            manager.reset()
        assert not left, "the test leaves TransformerEngine in FP8"


# Folders and files that take a minute and more. A worker that begins one of them at the end lets the others wait.
LONGEST_FIRST = (
    "experiments", "recipes", "report", "train", "cli", "test_suite_tool.py", "test_wheel.py", "test_kernels.py",
    "test_kernels_arm.py", "test_peers.py", "test_weight_transfer.py", "test_executor.py", "test_delta_engine.py",
    "test_refit.py", "test_export.py", "test_serve.py", "test_readme.py", "test_examples.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    def place(item):
        names = {item.path.parent.name, item.path.name}
        return next((i for i, longest in enumerate(LONGEST_FIRST) if longest in names), len(LONGEST_FIRST))

    items.sort(key=place)
