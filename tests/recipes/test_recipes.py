"""Recipes: the big ones are NeMo's with our plugin, in a dry run; tiny_llama runs through nemo-run and torchrun and
learns."""

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support import TESTS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BIG = ("llama3_8b", "llama3_70b", "qwen3_8b", "mixtral_8x7b")
pytestmark = pytest.mark.train


def _env(home):
    """Torchrun on the path, one thread a rank, and nemo-run's records out of the way."""
    path = f"{BIN}:{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "NEMORUN_HOME": str(home),
    }


def _python(script, *arguments, home, timeout=400):
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env=_env(home) | {"COLUMNS": "160"},
        cwd=home,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def recipes():
    import nemo_fp8.recipes

    return nemo_fp8.recipes


@pytest.mark.parametrize("name", BIG)
def test_a_big_recipe_is_nemos_with_our_plugin(name, recipes, tmp_path):
    import importlib

    from nemo_fp8 import MixedPrecision, preset

    theirs = importlib.import_module(f"nemo.collections.llm.recipes.{name}").pretrain_recipe(name=name)
    ours = getattr(recipes, name)(precision="bf16_with_fp8_current_scaling_mixed", num_nodes=theirs.trainer.num_nodes)
    assert ours.trainer.plugins.__fn_or_cls__ is MixedPrecision
    assert ours.trainer.plugins.fp8_recipe == "tensorwise"
    theirs.trainer.plugins = ours.trainer.plugins
    assert ours == theirs, "everything but the precision is NeMo's"
    # a contract, a Config and a file say the same as the name
    contract = preset("bf16_with_fp8_current_scaling_mixed")
    (tmp_path / "contract.yaml").write_text("format: hybrid\nscaling: tensorwise\nfp8_param: true\n")
    with (tmp_path / "contract.yaml").open("a") as file:
        file.write(f"first_layers: {contract.first_layers}\nlast_layers: {contract.last_layers}\n")
    for precision in (contract, ours.trainer.plugins, str(tmp_path / "contract.yaml")):
        assert getattr(recipes, name)(precision=precision).trainer.plugins == ours.trainer.plugins


def test_performance_settings_arrive_in_our_plugin(recipes):
    recipe = recipes.llama3_8b(precision="bf16_with_fp8_mixed", performance_mode=True)
    assert recipe.trainer.plugins.grad_reduce_in_fp32 is False
    assert recipe.trainer.plugins.fp8_recipe == "delayed"


def test_what_nemo_has_no_performance_settings_for_is_refused(recipes):
    from nemo_fp8 import PrecisionError

    with pytest.raises(PrecisionError, match="performance_mode=True for qwen3_8b"):
        recipes.qwen3_8b(performance_mode=True)


def _dryrun(jobs, folder, capsys):
    """What nemo-run says it would do, as one word: it breaks lines where the terminal ends."""
    import nemo_run as run

    with run.Experiment("dry", base_dir=str(folder)) as experiment:
        for name, (recipe, executor) in jobs.items():
            experiment.add(recipe, executor=executor, name=name)
        experiment.dryrun()
    return "".join(capsys.readouterr().out.split())


def test_dry_runs_on_this_machine(recipes, tmp_path, monkeypatch, capsys):
    """Every recipe becomes a job: its configs are complete, and survive being written down."""
    import nemo_run as run

    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    local = run.LocalExecutor(launcher="torchrun", ntasks_per_node=2)
    shown = _dryrun({name: (getattr(recipes, name)(), local) for name in recipes.RECIPES}, tmp_path, capsys)
    for name in recipes.RECIPES:
        assert f"{name}_fn_or_script" in shown
    assert shown.count("--nproc-per-node") == len(recipes.RECIPES)


def test_dry_run_on_slurm(recipes, tmp_path, monkeypatch, capsys):
    """The batch script asks for what the recipe needs."""
    import nemo_run as run

    monkeypatch.setattr("sys.stdin", io.StringIO())  # the tunnel's commands get it, and pytest's cannot be read

    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    slurm = run.SlurmExecutor(
        account="llm",
        partition="h100",
        nodes=4,
        ntasks_per_node=8,
        gpus_per_node=8,
        time="04:00:00",
        container_image="nemo.sqsh",
        tunnel=run.LocalTunnel(job_dir=str(tmp_path)),
        packager=run.Packager(),
    )
    recipe = recipes.llama3_70b("bf16_with_fp8_current_scaling_mixed")
    assert (recipe.trainer.num_nodes, recipe.trainer.devices) == (slurm.nodes, slurm.ntasks_per_node)
    shown = _dryrun({"llama3_70b": (recipe, slurm)}, tmp_path, capsys)
    for words in (
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--container-imagenemo.sqsh",
        "llama3_70b_fn_or_script",
    ):
        assert words in shown, words


@pytest.mark.slow
def test_the_scripts_run_on_nemo_runs_command_line(tmp_path):
    arguments = (
        "--factory",
        "fp8_llama3_8b(precision=bf16_with_fp8_mixed,num_nodes=2)",
        "trainer.plugins.fp8_margin=2",
        "--dryrun",
        "--yes",
    )
    shown = _python(ROOT / "recipes/llama3_8b.py", *arguments, home=tmp_path)
    for words in ("LlamaModel(config=Llama3Config8B())", "num_nodes=2", "fp8_recipe='delayed'", "fp8_margin=2"):
        assert words in shown


def test_every_recipe_has_a_script_of_its_name(recipes):
    for name in recipes.RECIPES:
        assert (ROOT / f"recipes/{name}.py").resolve() == ROOT / "recipes/pretrain.py"


@pytest.mark.parametrize(("script", "model"), [("mixtral_8x7b", "MixtralConfig8x7B"), ("pretrain", "Llama3Config8B")])
def test_a_script_without_a_factory_starts_the_recipe_of_its_name(script, model, tmp_path, monkeypatch, capsys):
    """In this process, which has imported NeMo; the test above starts one in a Python of its own."""
    path = str(ROOT / f"recipes/{script}.py")
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [path, "trainer.max_steps=7", "--dryrun", "--yes"])
    runpy.run_path(path, run_name="__main__")
    shown = "".join(capsys.readouterr().out.split())  # as in _dryrun
    assert f"(config={model}())" in shown
    assert "max_steps=7" in shown


@pytest.mark.slow
def test_tiny_llama_learns_under_torchrun(tmp_path, monkeypatch, capfd):
    """Launched from this process, which has imported NeMo; the ranks are torchrun's."""
    import nemo_run as run

    from nemo_fp8.experiments import tiny_llama
    from nemo_fp8.experiments.lines import Lines
    from nemo_fp8.experiments.recorder import Recorder

    for name, value in _env(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recipe = tiny_llama("bf16_with_fp8_blockwise_mixed", dir=str(tmp_path), steps=16)
    recipe.trainer.callbacks.append(run.Config(Recorder, lines=run.Config(Lines, out=str(tmp_path / "steps"))))
    recipe.log.ckpt = None
    recipe.trainer.enable_checkpointing = False
    executor = run.LocalExecutor(launcher="torchrun", ntasks_per_node=2)
    run.run(recipe, executor=executor, name="tiny", detach=False, tail_logs=True)
    log = capfd.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 16
    assert losses[0] > 5, "a byte has 256 values"
    assert losses[-1] < 0.6 * losses[0]
    assert "SUCCEEDED" in log or rows[-1]["memory"] > 0


@pytest.mark.slow
def test_nemos_llama3_8b_shrunken_trains_on_the_cpu(monkeypatch):
    """NeMo's own pretrain_recipe, made small, with one line of ours: the plugin. Its accelerator is the CPU, its data
    ours."""
    from nemo_fp8 import preset
    from nemo_fp8.experiments.trial import Trial, run_trial

    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    outcome = run_trial(Trial("support.shrunken.llama3_8b", preset("bf16_with_fp8_mixed"), steps=12, every=6))
    assert len(outcome.losses) == 12
    assert outcome.losses[-1] < outcome.losses[0] - 1
    assert {row["layer"].split(".")[2] for row in outcome.statistics} == {"0", "1", "2"}
