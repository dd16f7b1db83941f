"""Who generates: the hf engine, vLLM (`on_vllm/`), servers of vLLM and SGLang, and weight sync."""
