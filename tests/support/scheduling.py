"""Which files of tests one worker of pytest-xdist has all of.

It is told by name, since pytest-xdist 3.8 passes over its own ``xdist_group`` with pytest 9.2.
"""

from pathlib import Path


def one_worker_for(files, config, log):
    """A scheduler like ``--dist loadfile``, by which these files are one."""
    from xdist.scheduler import LoadFileScheduling

    class OneWorkerForTheseFiles(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "together" if Path(file).name in files else file

    return OneWorkerForTheseFiles(config, log)
