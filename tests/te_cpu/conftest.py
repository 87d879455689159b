"""TransformerEngine's real Python over our extension.

The CPU stands in for CUDA in the whole process, so these tests have one of their own, with ``.te_cpu`` on its path, where TE's pure-Python
wheel lies: PYTHONPATH=.te_cpu .venv/bin/python -m pytest tests/te_cpu
"""

import pytest
from te_cases import ARCH, HERE, VERSIONS

if HERE:
    from nemo_fp8 import te_cpu

    te_cpu.install(ARCH, versions=VERSIONS or te_cpu.FITS)


def pytest_collection_modifyitems(items):
    mark = pytest.mark.skip(reason="needs a process of its own with TransformerEngine on its path: PYTHONPATH=.te_cpu pytest tests/te_cpu")
    for item in items:
        if not HERE and item.path.parent.name == "te_cpu":
            item.add_marker(mark)


@pytest.fixture
def arch():
    """The architecture that this process stands for."""
    return ARCH
