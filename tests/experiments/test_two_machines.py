"""Ray on two machines: the ranks on one, the engine on the other, which is given its weights over Ray. Two nodes of
Ray's on this one."""

import pytest
import ray
from experiments.test_run import small
from ray.cluster_utils import Cluster
from support import actors

from nemo_fp8.errors import PrecisionError
from nemo_fp8.experiments.rl.driver import _resources, ray_session, run_grpo


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"ranks": 2}, "include_dashboard": False}
    )
    made.add_node(num_cpus=1, resources={"engines": 1})
    yield made
    made.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_an_engine_on_another_machine(cluster, tmp_path, tensor_parallel):
    """Two ranks: data-parallel, and tensor-parallel."""
    s = small(
        tmp_path,
        ranks=2,
        tensor_parallel=tensor_parallel,
        steps=2,
        rank_resources={"ranks": 1},
        engine_resources={"engines": 1},
    )
    with ray_session(3, cluster.address):
        assert len(ray.nodes()) == 2
        rows = run_grpo(s, engine=actors.TellsHowItIsFilled)
    assert set((tmp_path / "run" / actors.FILLED).read_text().splitlines()) == {"over Ray"}
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        assert not row["gate"]["fired"]
        assert row["push"][0]["fp8"] == 4 * 7
        assert 1 < row["mismatch"]["token_mult_prob_error"] < 1.05


@pytest.mark.parametrize(
    ("gpus", "engines", "share"), [(0, 1, None), (1, 1, 1 / 2), (2, 2, 1 / 2), (2, 1, 1), (8, 1, 1)]
)
def test_gpus_are_dealt_out(monkeypatch, tmp_path, gpus, engines, share):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)} if gpus else {})
    expected = {"resources": {}} | ({} if share is None else {"num_gpus": share})
    assert _resources(small(tmp_path, engines=engines)) == (expected, expected)


def test_what_is_asked_for_is_told_to_ray_in_its_words(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0, "rollout": 1.0})
    s = small(
        tmp_path,
        ranks=2,
        tensor_parallel=2,
        rank_resources={"GPU": 0.25, "CPU": 1},
        engine_resources={"GPU": 0.5, "rollout": 1},
    )
    assert _resources(s) == (
        {"num_gpus": 0.25, "num_cpus": 1, "resources": {}},
        {"num_gpus": 0.5, "resources": {"rollout": 1}},
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"rank_resources": {"GPU": 0.75}},
            r"needs 1\.83333 of 'GPU', and Ray has 1\.",
        ),  # with what is dealt to the engine
        ({"engine_resources": {"rolout": 1}}, r"needs 1 of 'rolout', and Ray has 0\."),
    ],
)
def test_what_no_machine_has_is_said_before_anything_waits(monkeypatch, tmp_path, asked, words):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0, "GPU": 1.0, "rollout": 1.0})
    with pytest.raises(PrecisionError, match=words):
        _resources(small(tmp_path, ranks=2, tensor_parallel=2, **asked))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "localhost:port"])
def test_a_cluster_that_is_not_there_is_said_at_once(address):
    with pytest.raises(PrecisionError, match="no Ray cluster at"), ray_session(2, address):
        pass
