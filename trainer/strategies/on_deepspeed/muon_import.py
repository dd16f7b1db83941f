"""DeepSpeed imports its own Muon for every optimizer, and compiles it where it is defined. No run of the trainer uses it."""

from deepspeed.runtime import compiler


def import_muon() -> None:
    """Import DeepSpeed's Muon without torch's compiler, whose import takes a second of every start."""
    kept, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (not at the top: it looks the compiler up)
    finally:
        compiler.compile = kept
