"""Who generates: the hf engine, vLLM (`on_vllm/`), and weight sync."""
