"""A module that moved still imports under its old name, says the new one, and gives the same objects."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

import nemo_fp8
from nemo_fp8.moved import MOVED, OldNames

IN_VLLM = ("nemo_fp8.rollout.engine.", "nemo_fp8.rollout.refit.worker.")


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module(old, new):
    if new.startswith(IN_VLLM):
        pytest.importorskip("vllm", reason="tests/rollout/test_old_names.py runs it")
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as said:  # of the package that it lay in, too
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert any(w.category is DeprecationWarning and f"{old} is {new} now" in str(w.message) for w in said)
    module = importlib.import_module(new)
    names = [name for name in vars(module) if not name.startswith("_")]
    assert names or module.__path__  # a package may hold nothing but modules
    assert all(getattr(found, name) is getattr(module, name) for name in names)


def test_no_old_name_is_a_file_again():
    for old in MOVED:
        spec = importlib.util.find_spec(old)
        assert isinstance(spec.loader, OldNames)


def test_a_module_of_a_package_that_moved():
    with pytest.warns(DeprecationWarning, match=r"nemo_fp8.rollout.mismatch.gate is nemo_fp8.mismatch.gate now"):
        from nemo_fp8.rollout.mismatch.gate import Gate
    from nemo_fp8.mismatch.gate import Gate as New

    assert Gate is New


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "nemo_fp8.preflight.doctor.require": "nemo_fp8.preflight.engine.require",
        "nemo_fp8.preflight.doctor.unread_variables": "nemo_fp8.contract.te_variables.unread_variables",
        "nemo_fp8.models.selection.select": "nemo_fp8.models.units.select",
        "nemo_fp8.models.selection.stored": "nemo_fp8.models.stored.stored",
        "nemo_fp8.models.selection.outside_names": "nemo_fp8.models.spellings.outside_names",
        "nemo_fp8.render.nemo.core_defects": "nemo_fp8.render.nemo_script.core_defects",
        "nemo_fp8.render.nemo.render": "nemo_fp8.render.nemo_script.render",
        "nemo_fp8.preflight.machine.GPUS": "nemo_fp8.preflight.described.GPUS",
        "nemo_fp8.preflight.support.answer": "nemo_fp8.preflight.answers.answer",
        "nemo_fp8.preflight.engine.bridge_findings": "nemo_fp8.preflight.lint.bridge_findings",
        "nemo_fp8.preflight.doctor.bridge_findings": "nemo_fp8.preflight.lint.bridge_findings",
        "nemo_fp8.train.engine.choose_engine": "nemo_fp8.preflight.engine.choose_engine",
        "nemo_fp8.train.engine.hold_cpu": "nemo_fp8.train.megatron_cpu.hold_cpu",
        "nemo_fp8.render.rendering.ROLLOUT_FIELDS": "nemo_fp8.contract.operands.ROLLOUT_FIELDS",
        "nemo_fp8.rollout.refit.door.MODES": "nemo_fp8.rollout.refit.control.RUNNING",
    }.items(),
)
def test_what_left_a_module_is_found_there_still(old, new):
    (module, _, name), (place, _, now) = old.rpartition("."), new.rpartition(".")
    if module in MOVED:
        sys.modules.pop(module, None)  # it warns when it is imported
    with warnings.catch_warnings(record=True) as said:  # of the module and of the name, where both have moved
        warnings.simplefilter("always")
        found = getattr(importlib.import_module(module), name)
    assert any(w.category is DeprecationWarning and str(w.message).startswith(module) for w in said)
    assert found is getattr(importlib.import_module(place), now)


# Names of 0.2.0 that no longer mean anything, and why.
GONE = {
    "export.plan.scale_shape export.run.quantize_weight": "export/codings.py has them for every format",
    "preflight.doctor.FROZEN render.env.scale_from_environment": "te_variables.py: more variables than one",
    "render.nemo_rl_keys.VLLM_CFG_OTHERS render.nemo_rl_keys.VLLM_CFG_READ": "keys of 0.7; render/nemo_rl_keys.py",
    "render.vllm.needs_plugin": "render/vllm_online.py says what stock vLLM cannot do, and not that it cannot",
    "rollout.engine.ops.decode": "weights are decoded where they are multiplied",
    "rollout.refit.push.BUFFER": "buffers are as large as a push needs",
    "rollout.refit.worker.layouts.Count rollout.refit.worker.layouts.Ledger": "what is counted while a cast runs",
    "te_cpu.device.Order": "streams and events are objects of their own",
    "te_cpu.extension.MISSING_OF_SUBMODULES te_cpu.triton_kernels.MISSING": "nothing of these is missing any more",
    "te_cpu.nvfp4.Side te_cpu.nvfp4.product": "products go through te_cpu/gemm.py",
}


def _has(module, name):
    try:
        return hasattr(module, name)
    except ImportError:  # an alias of what another environment has
        return True


def lost_of_the_last_release():
    """Names that 0.2.0 had and that are neither found nor gone for a reason; and the modules that do not import here.

    One that is not there at all, as it would be after a move without an alias, does not count as one of these.
    """
    lost, elsewhere, known = [], [], {f"nemo_fp8.{name}" for names in GONE for name in names.split()}
    for line in (Path(__file__).parent / "data/names_of_0_2_0.txt").read_text().splitlines():
        module, _, names = line.partition(": ")
        try:
            if importlib.util.find_spec(module) is None:
                lost.append(module)
                continue
            found = importlib.import_module(module)
        except ImportError:  # vLLM's in the training environment, NeMo's where vLLM is
            elsewhere.append(module)
            continue
        lost += [f"{module}.{name}" for name in names.split() if not _has(found, name)]
    return sorted({*lost} - known), elsewhere


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_public_name_of_the_last_release_is_found():
    """In the rollout environment tests/rollout/test_old_names.py asks the same of what needs vLLM."""
    lost, elsewhere = lost_of_the_last_release()
    assert lost == []
    assert {".".join(name.split(".")[1:3]) for name in elsewhere} <= {"rollout.engine", "rollout.refit", "bridge"}


@pytest.mark.parametrize("statement", ["from {} import nowhere", "import {}.nowhere", "from {}.nowhere import x"])
@pytest.mark.parametrize("old", ["nemo_fp8.agreement", "nemo_fp8.rl", "nemo_fp8.rollout.mismatch"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_no_module_has_is_no_module_either(old, statement):
    """A misspelt name of a module or package that moved; it was a module of that name, which nothing could call."""
    with pytest.raises(ImportError, match="nowhere"):
        exec(statement.format(old))
    assert f"{old}.nowhere" not in sys.modules


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_look_at_every_loaded_module_imports_none_under_its_new_name():
    """As inspect.getmodule looks, whom torch calls: it ended in the error of a module that needs vLLM."""
    sys.modules.pop("nemo_fp8.rollout.in_vllm.config", None)
    old = importlib.import_module("nemo_fp8.rollout.in_vllm.config")
    assert not hasattr(old, "__file__")


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nemo_fp8.nowhere")
    assert sum(isinstance(finder, OldNames) for finder in sys.meta_path) == 1
    assert nemo_fp8.__name__ == "nemo_fp8"
