"""A driver that kills parts of its own run: ``python run_and_kill.py SETTINGS KILLS``, KILLS being {step: what},
"driver" among them."""

import json
import os
import signal
import sys

from nemo_fp8.experiments.rl.driver import ray_session, run_grpo
from nemo_fp8.experiments.rl.settings import GrpoSettings
from support import actors


def main(settings, kills):
    def on_step(row):
        what = kills.pop(str(row["step"]), None)
        if what == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        if what:
            assert actors.kill(f"ray::{what}") > 0

    with ray_session(4):
        run_grpo(GrpoSettings.from_dict(settings), on_step=on_step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
