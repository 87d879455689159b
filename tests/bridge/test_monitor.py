"""The monitor as a callback of Bridge's: the rows that NeMo's users get, in TensorBoard."""

import math

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def test_every_operand_of_every_linear_is_measured_in_the_steps_that_are_watched(alone):
    run = alone["watched"]
    assert "refused" not in run, run["refused"]
    assert {row["step"] for row in run["rows"]} == {2}
    assert {(row["layer"], row["operand"]) for row in run["rows"]} == {
        (f"decoder.layers.{i}.{name}", operand)
        for i in range(4)
        for name in LINEARS
        for operand in ("input", "weight", "grad")
    }
    assert all(25 < row["snr_db"] < 40 and math.isfinite(row["amax"]) for row in run["rows"])
    assert run["skipped"] == 0


def test_measuring_changes_no_number(alone):
    assert alone["watched"]["losses"] == alone["blockwise"]["losses"][:2]


def test_rows_go_to_tensorboard(alone, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert alone["watched"]["losses"]
    events = EventAccumulator(str(folder / "board")).Reload()
    (point,) = events.Scalars("fp8/decoder.layers.0.mlp.linear_fc1/weight/snr_db")
    layer, operand = "decoder.layers.0.mlp.linear_fc1", "weight"
    (row,) = (r for r in alone["watched"]["rows"] if (r["layer"], r["operand"]) == (layer, operand))
    assert point.step == 2
    assert abs(point.value - row["snr_db"]) < 1e-4
