"""Ray on two machines: the ranks on one, the engine on the other, which is given its weights over Ray. Two nodes of Ray's on this one."""

import pytest
import ray
from ray.cluster_utils import Cluster
from rl import actors
from rl.test_run import small

from nemo_fp8.errors import PrecisionError
from nemo_fp8.rl.driver import _require_resources, _resources, ray_session, run_grpo


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"ranks": 2}, "include_dashboard": False})
    made.add_node(num_cpus=1, resources={"engines": 1})
    yield made
    made.shutdown()


@pytest.mark.long
def test_an_engine_on_another_machine(cluster, tmp_path):
    s = small(tmp_path, ranks=2, tensor_parallel=2, steps=2, rank_resources={"ranks": 1}, engine_resources={"engines": 1})
    with ray_session(3, cluster.address):
        assert len(ray.nodes()) == 2
        rows = run_grpo(s, engine=actors.TellsHowItIsFilled)
    assert set((tmp_path / "run" / actors.FILLED).read_text().splitlines()) == {"over Ray"}
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        assert not row["gate"]["fired"]
        assert row["push"][0]["fp8"] == 4 * 7
        assert 1 < row["mismatch"]["token_mult_prob_error"] < 1.05


@pytest.mark.parametrize(("gpus", "count", "share"), [(0, 2, 0), (1, 2, 1 / 2), (2, 3, 1 / 2), (2, 2, 1), (8, 2, 1)])
def test_gpus_are_dealt_out(monkeypatch, gpus, count, share):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)} if gpus else {})
    assert _resources(None, count) == {"num_gpus": share, "resources": {}}
    assert _resources({"GPU": 0.25, "rollout": 1}, count) == {"num_gpus": 0.25, "resources": {"rollout": 1}}


def test_what_no_machine_has_is_said_before_anything_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0, "GPU": 1.0, "rollout": 1.0})
    fits = {"rank_resources": {"GPU": 0.25}, "engine_resources": {"GPU": 0.5, "rollout": 1}}
    _require_resources(small(tmp_path, ranks=2, tensor_parallel=2, **fits))
    with pytest.raises(PrecisionError, match=r"needs 1\.5 of 'GPU', and Ray has 1") as refused:
        _require_resources(small(tmp_path, ranks=2, tensor_parallel=2, rank_resources={"GPU": 0.75}, engine_resources={"rolout": 1}))
    assert "needs 1 of 'rolout', and Ray has 0" in str(refused.value)
