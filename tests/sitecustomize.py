"""Every Python process that a test starts looks for cycles of garbage seldom, and so spends a fifth less on NeMo.

An import makes millions of objects that stay. Every few hundred of them Python's collector walks the young ones, now
and then all, and once more as the process ends: 3 of 15 s for NeMo, in each of the hundreds of processes that the suite
starts. References are counted as ever; only garbage that refers to itself waits longer. ``tests/conftest.py`` puts this
folder first on ``PYTHONPATH``, Python imports this file as it starts, and then the next ``sitecustomize`` of the path,
as it would have without it.
"""

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import sys

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.disable)
if __name__ == "sitecustomize":  # conftest runs this file as well, in a process that has started already
    _folders = [os.path.abspath(folder) for folder in sys.path]
    _after = _folders[_folders.index(os.path.dirname(os.path.abspath(__file__))) + 1 :]
    _next = importlib.machinery.PathFinder.find_spec("sitecustomize", _after)
    if _next is not None and _next.loader is not None:
        _next.loader.exec_module(importlib.util.module_from_spec(_next))
