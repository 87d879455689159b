"""Every fix of a hazard is taken out of the code, one at a time, and the test that guards it fails. See docs/refit.md
for the hazards."""

import importlib
import inspect
import textwrap

import pytest
from rollout import test_reload, test_selection
from rollout.test_refit import WRONG
from support.rollout.in_process import Worker, build
from support.rollout.models import weights_of

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rollout import Refit

WORKER = "nemo_fp8.rollout.refit.worker"
EVERY_BIT = test_reload.test_a_push_leaves_every_bit_as_a_fresh_load_does

# hazard -> the model and the contract under which its test meets it, and the edits that take the fix out: module,
# function, old, new.
IN_A_PUSH = {
    "load_weights on a running engine": (
        ("qwen3_odd", {}),
        [
            (
                f"{WORKER}.session",
                "Session.write_rows",
                "    for route in self.plan.routes.by_entry.get(i, ()):\n",
                "    whole = self.early = [*getattr(self, 'early', ()), tensor.clone()] if row else [tensor.clone()]\n"
                "    if self.rows[i] == self.plan.manifest[i].rows:\n"
                "        self.plan.model.load_weights([(self.plan.manifest[i].name, torch.cat(whole))])\n"
                "    for route in ():\n",
            )
        ],
    ),
    "shards that wait are references": (
        ("qwen3_moe", {"last_layers": 1}),
        [
            (
                f"{WORKER}.staged",
                "Staged.write",
                "    self._copy(route, row, values, inside(self.values[name].data, part_of(route, row, rows)))\n",
                "    place = inside(self.values[name].data, part_of(route, row, rows))\n"
                "    self.later = [*getattr(self, 'later', ()), (place, values.reshape(place.shape))]\n",
            ),
            (
                f"{WORKER}.staged",
                "Staged.complete",
                "        self._process()\n",
                "        [place.copy_(values) for place, values in self.later]\n        self.later = []\n        "
                "self._process()\n",
            ),
        ],
    ),
    "a tied head stays stale": (
        ("llama_tied", {"first_layers": 1}),
        [(f"{WORKER}.plan", "Plan.packed_beside", "    return {\n", "    return {}\n    return {\n")],
    ),
    "experts in BF16 are not packed again": (
        ("qwen3_moe", {"last_layers": 1}),
        [(f"{WORKER}.staged", "Staged._process", "            method.moe_kernel = None\n", "            pass\n")],
    ),
}
BLOCKS = [
    (
        f"{WORKER}.blocks",
        "Blocks._gather",
        "    inside(self.gathered[m], to[-2:]).copy_(values)\n",
        "    self.later = [*getattr(self, 'later', ()), (inside(self.gathered[m], to[-2:]), values)]\n",
    ),
    (
        f"{WORKER}.blocks",
        "Blocks._gather",
        "        whole = self.gathered.pop(m)\n",
        "        [place.copy_(kept) for place, kept in self.later]\n        whole = self.gathered.pop(m)\n",
    ),
]

# The checks of a manifest, each with what is accepted where it does not look.
OF_A_MANIFEST = [
    ((f"{WORKER}.plan", "Plan.missing", "    found = []\n", "    return []\n"), ["missing"]),
    (
        ("nemo_fp8.rollout.refit.push", "_accepted", "    passed_over = {", "    passed_over = unrouted | {"),
        ["ignored by vLLM"],
    ),
    (
        (f"{WORKER}.plan", "Plan._refused", "    for name, why in", "    return\n    for name, why in"),
        ["unknown", "shape", "dtype", "codes without scales", "scale without cache"],
    ),
]


def take_out(monkeypatch, edits):
    """Compile these functions anew with other lines in them, where they stand."""
    sources = {}
    for module, path, old, new in edits:
        source = sources.get((module, path)) or textwrap.dedent(inspect.getsource(function(module, path)))
        assert source.count(old) == 1, f"{path} has changed: say here how its fix is taken out"
        sources[module, path] = source.replace(old, new)
    for (module, path), source in sources.items():
        made = {}
        exec(compile(source, f"<{path} without its fix>", "exec"), vars(importlib.import_module(module)), made)
        owner, _, name = path.rpartition(".")
        monkeypatch.setattr(function(module, owner), name, made[name])


def function(module, path):
    """What lies at a path in a module; the module itself where there is none."""
    found = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("hazard", IN_A_PUSH)
def test_a_push_without_the_fix_is_seen(hazard, checkpoint, model, here, monkeypatch):
    if hazard == "a tied head stays stale" and not here.packs_bf16:
        pytest.skip(
            "vLLM's library for this processor packs no BF16 weight, so that no copy of the head can stay behind"
        )
    (kind, contract), edits = IN_A_PUSH[hazard]
    model(kind, **contract)  # the fresh one, to compare with
    take_out(monkeypatch, edits)
    with pytest.raises(AssertionError):
        EVERY_BIT(checkpoint, model, kind, contract)


def test_blocks_kept_by_reference_are_seen(monkeypatch):
    take_out(monkeypatch, BLOCKS)
    with pytest.raises(AssertionError):
        test_reload.test_blocks_that_lie_in_two_tensors_wait_for_both()


def _refused(checkpoint, wrong):
    """A wrong manifest is refused with its own words, and every bit is where it was."""
    model, (change, words) = build(checkpoint("qwen3", 0)), WRONG[wrong]
    before = test_reload.held(model)
    with pytest.raises(PrecisionError, match=words):
        Refit(Worker(model)).push(change(weights_of(checkpoint("qwen3", 1))))
    assert test_reload.differing(test_reload.held(model), before) == []


@pytest.mark.parametrize(
    ("edit", "wrong"), [pytest.param(edit, w, id=w) for edit, accepted in OF_A_MANIFEST for w in accepted]
)
def test_a_manifest_that_nobody_checks_is_seen(checkpoint, monkeypatch, edit, wrong):
    _refused(checkpoint, wrong)
    take_out(monkeypatch, [edit])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        _refused(checkpoint, wrong)


def test_a_router_in_fp8_is_seen(checkpoint, monkeypatch):
    edit = (
        "nemo_fp8.models.selection",
        "why_kept_by_name",
        "        if p.kept:\n",
        "        if p.kept and 'router' not in p.kept:\n",
    )
    take_out(monkeypatch, [edit])
    monkeypatch.setattr("nemo_fp8.rollout.engine.selection.why_kept_by_name", function(*edit[:2]))
    with pytest.raises(AssertionError):
        test_selection.test_first_and_last_layers_routers_and_names(
            lambda kind, **contract: build(checkpoint(kind), **contract)
        )
