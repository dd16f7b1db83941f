"""The two files of --parity_dump: gradients of step 1, and weights after the last step."""

from pathlib import Path

from trainer.errors import UserError

GRADIENTS = "grads_step1.safetensors"
WEIGHTS = "weights_final.safetensors"
# A gradient below this fraction of the norm of all gradients is rounding noise. The terms of its sum are as large as
# those of other gradients, and fp32 rounds each by up to 2**-24 = 6e-8 of its size. 1e-6 is 17 such roundings.
# An example is the bias of keys: it adds the same to all scores of a query, so its gradient is zero in theory.
NOISE = 1e-6


def open_dump(path: str | Path):
    """A context with the tensors of a file, read one by one. Raises UserError if the file is missing or broken."""
    from safetensors import SafetensorError, safe_open  # not needed for the --help of compare_backends.py

    if not Path(path).is_file():
        raise UserError(str(path), "no such file", "a dump written by --parity_dump")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), f"cannot be read as safetensors: {error}") from None
