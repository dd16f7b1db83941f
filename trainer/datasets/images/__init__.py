"""Images: processors, samples, batches and the cache of pixels."""
