"""What a run is: a method, and the parts that grow around it."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

from trainer.comma_separated import names_in
from trainer.datasets.files.image_files import has_images
from trainer.distributed.collectives import rank_0_first
from trainer.flags.rule import knowledge
from trainer.flags.rules import COMMANDS
from trainer.models.model_loading import resolve_adapted_model
from trainer.runs import outputs
from trainer.runs.flag_checks import saved_models
from trainer.runs.run_models import load_model
from trainer.runs.run_setup import Setup
from trainer.training.checkpointing import Checkpoints, Progress
from trainer.training.loop import LoopHooks, LossFunction


@dataclass(frozen=True)
class Method:
    """What a command brings to a run: its data, its model and its loss."""

    command: str
    eval_metrics: tuple[str, ...]  # those that may choose the best checkpoint
    load_data: Callable  # (args, tokenizer, names, split, flag, part) to (samples, ledger)
    render: Callable  # (sample, tokenizer) to a text, with loss tokens in [[ ]]
    auto_class: type  # of transformers
    make_loss: Callable[["Run"], LossFunction]  # once the model is loaded
    model_folder: Callable[["Run"], str] = lambda run: run.setup.folder
    # (function from samples to rows, whether packed) to the function from samples to a micro-batch
    collate: Callable = lambda collate_rows, is_packed: collate_rows
    loader_options: dict = dataclasses.field(default_factory=dict)
    facts: dict = dataclasses.field(default_factory=dict)  # for the table of rules
    has_frozen_copy: bool = False  # the run also holds a frozen model of the same size
    frozen_models: Callable[["Run"], dict] = (
        lambda run: {}
    )  # besides the base of an adapter; see `run_record.frozen_models`
    marks_tokens: bool = False  # its `collate` says which tokens are no padding
    features: tuple = ()  # in addition to the list in feature_list.py; see `feature.Feature`
    after_training: Callable[["Run"], None] = lambda run: None  # before the model is saved


@dataclass
class Run:
    """A run as it grows. Features change it at fixed places; see `feature.Feature`."""

    method: Method
    args: Any  # the groups of flags of the command
    setup: Optional[Setup] = None
    load_data: Optional[Callable] = None  # (names, split, flag, part) to (samples, ledger)
    collate_rows: Optional[Callable] = None  # samples to the tensors of a micro-batch
    auto_class: Optional[type] = None
    build_loader: Optional[Callable] = None  # (samples, shuffle=...) to the training loader
    samples: Any = None
    eval_samples: Any = None
    ledger: Any = None  # of the training data
    loader: Any = None
    eval_loader: Any = None
    output_dir: Optional[str] = None
    model: Any = None
    teachers: list = dataclasses.field(default_factory=list)  # of train_kd: prepared models
    teacher_folders: list[str] = dataclasses.field(default_factory=list)
    loss_fn: Optional[LossFunction] = None
    folder_checks: list[Callable] = dataclasses.field(default_factory=list)  # (folder, flag), before a model is loaded
    model_changes: list[Callable] = dataclasses.field(default_factory=list)  # of every model that is loaded
    hooks: LoopHooks = LoopHooks()  # what else the loop calls
    checkpoints: Optional[Checkpoints] = None
    progress: Optional[Progress] = None
    total_steps: int = 0

    @property
    def flags(self) -> SimpleNamespace:
        """All flags of all commands. Those that this command lacks have their defaults."""
        return knowledge(self.args, COMMANDS.values())

    def saved_models(self, output_dir: str) -> list[str]:
        """The folders of the trained models; the second one is the average of --ema_beta."""
        return saved_models(self.flags, output_dir)

    @property
    def merged_adapter(self) -> Optional[str]:
        """The adapter whose update is in the weights of the trained model from the start on."""
        return self.args.lora.lora_adapter if self.args.lora.merge_adapter else None

    @functools.cached_property
    def references(self) -> list[tuple[str, Optional[str]]]:
        """The folder of each reference model, and the adapter whose update is added to it. All ranks ask first together.

        --ref_model names one, or --teacher of RL one or several. Without either it begins as the policy does.
        """
        name, teacher = self.flags.ref_model, self.flags.teacher
        if not name:
            return [(self.setup.folder, self.args.lora.lora_adapter)]
        if not teacher:
            return [rank_0_first(lambda: resolve_adapted_model(name, "--ref_model"))]
        return [rank_0_first(functools.partial(resolve_adapted_model, model, "--teacher")) for model in names_in(name)]

    @property
    def has_images(self) -> bool:
        """Whether rows have images."""
        return has_images(self.samples) or has_images(self.eval_samples)

    def load(self, folder: str, flag: str = "--pretrain", trained: bool = True, adapter: Optional[str] = None):
        """A model of this run, of `folder`, which `flag` named. The update of `adapter` is added to its weights."""
        for check in self.folder_checks:
            check(folder, flag)
        model = load_model(self.args.model, self.setup, folder, self.auto_class, flag, trained, adapter)
        for change in self.model_changes:
            change(model)
        return model

    def open(self) -> str:
        """The run folder, which the first call makes."""
        if self.output_dir is None:
            output, resumes = self.args.output, self.args.checkpoint.load_checkpoint is not None
            command, saved = self.method.command, self.saved_models
            self.output_dir = outputs.open_run(output, self.setup.strategy, command, resumes, saved)
        return self.output_dir
