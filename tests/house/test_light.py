"""``import nemo_fp8`` is light, and what needs no torch loads none."""

import subprocess
import sys

import pytest


def _run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_takes_under_a_tenth_of_a_second():
    code = "import time; t = time.perf_counter(); import nemo_fp8; print(time.perf_counter() - t)"
    assert min(float(_run(code)) for _ in range(5)) < 0.1


@pytest.mark.parametrize(
    "code",
    [
        "import nemo_fp8",
        "import nemo_fp8; nemo_fp8.preset('bf16_mixed').explain(); nemo_fp8.Precision",
        "import nemo_fp8.cli",
    ],
)
def test_the_light_core_loads_no_torch_and_no_nemo(code):
    heavy = "{'torch', 'nemo', 'nemo_run', 'megatron', 'lightning', 'numpy'} & set(sys.modules)"
    assert _run(f"import sys; {code}; print({heavy} or '')") == ""


def test_every_public_name_is_found_when_used():
    import nemo_fp8

    for name in nemo_fp8.__dir__():
        assert getattr(nemo_fp8, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'bf17_mixed'"):
        nemo_fp8.bf17_mixed  # noqa: B018
