"""The hook where no .pth file is read: `nemo-fp8 run` puts this folder first on PYTHONPATH, and Python imports this
file as it starts.

It hides no other ``sitecustomize``: the next one of the path runs after it, as it would have without it. A Python of
another environment, which lacks our package, says so and runs as it is.
"""

import importlib.machinery
import importlib.util
import os
import sys

try:
    import nemo_fp8_hook
except ModuleNotFoundError:
    sys.stderr.write(f"nemo-fp8 run: {sys.executable} has no nemo_fp8, and TransformerEngine is left as it is there.\n")
else:
    nemo_fp8_hook.register()
_folders = [os.path.abspath(folder) for folder in sys.path]
_after = _folders[_folders.index(os.path.dirname(os.path.abspath(__file__))) + 1 :]  # before it, one may call this one
_next = importlib.machinery.PathFinder.find_spec(__name__, _after)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
