"""On the path of tests that run Ray on a CPU: vLLM's CPU platform gets a name for its device in Ray, in every
process."""

import importlib.abc
import sys


class _BeforeRay(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("vllm.v1.executor.ray_utils", "vllm.v1.executor.ray_executor_v2", "vllm.v1.executor.ray_executor"):
            from vllm.platforms import current_platform

            type(current_platform).ray_device_key = "GPU"


sys.meta_path.insert(0, _BeforeRay())
