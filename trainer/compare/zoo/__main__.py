"""`python -m trainer.compare.zoo`: run the zoo."""

import sys

from trainer.compare.zoo.zoo import main

sys.exit(main())
