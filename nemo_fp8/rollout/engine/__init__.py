"""What runs inside vLLM's processes. The only place in this package that may import vLLM at its top."""
