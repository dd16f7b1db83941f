"""`check MODEL`: what can the trainer do with a model?

Exit code: 0 if all that it tried passes or is refused, 1 if something is wrong, 2 for a user error.
"""

import sys

from trainer.compare.zoo.check_model import main

if __name__ == "__main__":
    sys.exit(main())
