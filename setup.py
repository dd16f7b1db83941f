"""Packaging. The tested versions are in constraints.txt; the ranges here are what the code needs."""

from setuptools import find_packages, setup

COMMANDS = [
    "train_sft",
    "train_rm",
    "train_dpo",
    "train_ppo",
    "train_kd",
    "serve_engine",
    "serve_rm",
    "serve_train",
    "make_demo",
    "export",
    "doctor",
    "report",
    "watch",
]

DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10"]

setup(
    name="trainer",
    version="0.1.0",
    description="SFT and RLHF training of Hugging Face causal LMs: one loss curve, whatever the layout",
    python_requires=">=3.11",
    packages=find_packages(include=["trainer", "trainer.*"]),
    package_data={
        "trainer.datasets.conversations": ["chat_templates/*.jinja"],
        "trainer.planning": ["cards/*.json"],
    },
    install_requires=[
        "torch>=2.13",
        "transformers>=5.16,<6",
        "deepspeed>=0.19",
        "datasets>=5",
        "safetensors",
        "jsonargparse>=4.40",
        "pyyaml",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "flash": ["flash-attn>=2.8"],
        "ring": ["flash-attn>=2.8", "ring-flash-attn>=0.1.8"],
        "vllm": ["vllm>=0.32,<0.33"],
        "lora": ["peft>=0.19"],
        "qlora": ["peft>=0.19", "bitsandbytes>=0.48"],
        "gguf": ["gguf>=0.10", "accelerate>=1"],
        "fp8": ["torchao>=0.18"],
        "math": ["math-verify>=0.9"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "trackio": ["trackio"],
        "mlflow": ["mlflow"],
        "swanlab": ["swanlab"],
        "watch": ["rich>=13"],
        "serve": ["uvicorn>=0.54,<0.55", "starlette>=1,<2", "protobuf>=6"],
        "mcp": ["mcp>=2.3,<3"],
        "sign": ["cryptography>=45"],
        "docs": DOCS,
        "dev": [
            *DOCS,
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "wandb",
            "tensorboard",
            "peft",
            "trl>=1.16,<2",
            "math-verify",
            "gguf>=0.10",
            "rich>=13",
            "uvicorn>=0.54,<0.55",
            "starlette>=1,<2",
            "protobuf>=6",
            "mcp>=2.3,<3",
            "cryptography>=45",
            "ring-flash-attn",
        ],
    },
    entry_points={
        "console_scripts": ["trainer=trainer.cli.__main__:main", *(f"{n}=trainer.cli.{n}:main" for n in COMMANDS)]
    },
)
