"""Hugging Face folders: reading, writing, published names, quantized weights."""
