"""vLLM's engines, servers and workers, and tiny models for them."""
