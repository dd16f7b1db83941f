"""What can the trainer do with this model? Shrink its architecture, run it in every layout, and print what works.

  python -m trainer.cli.check Qwen/Qwen3-8B                    a hub name: only its config and tokenizer are downloaded
  python -m trainer.cli.check runs/my-model --only ring2 lora  a folder, and only these runs

The folder needs a config.json. The tokenizer and the weights are checked if they are there. Each run trains a tiny
random model with the same kinds of layers, in fp32, on CPU. It is compared with the plain single-process loop: losses,
gradients of the first step, final weights.
Exit code: 0 if nothing is wrong or crashes, 1 if something does, 2 if there is no such model or it cannot be shrunk.
"""

from trainer.flags.names.word_parser import ReadingParser


def build_parser() -> ReadingParser:
    parser = ReadingParser("check", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder or hub name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the first column (default: all)")
    parser.add_argument("--keep", metavar="DIR", help="keep the tiny model, the logs and the runs here")
    parser.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="time limit of a run")
    return parser
