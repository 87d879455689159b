"""A KV connector that keeps keys and values in files, as vLLM's example does, and can be emptied, as that cannot."""

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Emptied(ExampleConnector):
    def reset_cache(self):
        for folder in Path(self._storage_path).iterdir():
            shutil.rmtree(folder)
        return True
