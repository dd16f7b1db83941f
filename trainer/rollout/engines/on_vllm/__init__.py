"""What belongs to vLLM only: the engine in process, its servers and their workers, weights and images in its form."""
