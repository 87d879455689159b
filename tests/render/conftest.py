"""Outside libraries that are not importable here: TransformerEngine and Megatron-Bridge lie in ``.te``, beside the
repository.

``make setup`` puts them there. A test that needs one fails when it is missing: a rendering that is not compared with
the real thing is not tested.
"""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason to fail: examples have no deadline.
settings.register_profile("render", deadline=None)
settings.load_profile("render")

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".te"
REMEDY = f"pip install --no-deps --target {WHEELS} transformer-engine==2.20.2 megatron-bridge==0.3.1"


@pytest.fixture(scope="session")
def te_folder():
    if not (WHEELS / "transformer_engine").is_dir():
        pytest.fail(f"TransformerEngine is not in {WHEELS}. Remedy: {REMEDY}")
    return WHEELS


@pytest.fixture(scope="session")
def te_module(te_folder):
    from nemo_fp8.render.te_loader import load_recipe_module

    return load_recipe_module(te_folder)


@pytest.fixture(scope="session")
def bridge_module():
    """Megatron-Bridge's own file, with empty classes for the two model types that it only names in annotations."""
    path = WHEELS / "megatron" / "bridge" / "training" / "mixed_precision.py"
    if not path.is_file():
        pytest.fail(f"Megatron-Bridge is not in {WHEELS}. Remedy: {REMEDY}")
    models = types.ModuleType("megatron.bridge.models")
    vars(models).update(
        GPTModelProvider=type("GPTModelProvider", (), {}), T5ModelProvider=type("T5ModelProvider", (), {})
    )
    stand_ins = {"megatron.bridge": types.ModuleType("megatron.bridge"), "megatron.bridge.models": models}
    assert not stand_ins.keys() & sys.modules.keys()
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("_megatron_bridge_mixed_precision", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module
