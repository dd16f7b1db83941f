"""Who generates: the hf engine, vLLM in process, vLLM servers, and weight sync."""
