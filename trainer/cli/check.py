"""`check`: what can the trainer do with a model? The work is in `trainer/compare/check_model.py`, on the floor above.

python -m trainer.cli.check MODEL
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("trainer.compare.check_model", run_name="__main__")
