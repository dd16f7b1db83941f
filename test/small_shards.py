"""train_sft whose Hugging Face folders have files of at most 64 KiB, so that several ranks write those of a tiny model."""

from trainer.cli import train_sft
from trainer.model_folders import model_writer

SHARD_BYTES = 64 << 10

if __name__ == "__main__":
    assert model_writer.save_pretrained.__defaults__ == (2 << 30,)  # max_shard_bytes
    model_writer.save_pretrained.__defaults__ = (SHARD_BYTES,)
    train_sft.main()
