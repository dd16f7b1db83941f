"""The weights of a folder whose tensors have other names than the model's, and the way back when a model is saved.

transformers renames tensors of a folder, and makes one tensor of several (experts), while it loads. Here its rules say
which tensors of the folder make each tensor of the model. Every tensor is then read, and written back, one at a time.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Optional

import torch
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import Concatenate, MergeModulelist

from trainer.errors import UserError
from trainer.limits import read_model_config


@dataclass
class Origin:
    """The tensors of a folder that make one tensor of the model, or several if the rule splits."""

    converter: object  # a WeightConverter of transformers; None if only the name differs
    targets: list[str]
    sources: dict[str, list[str]] = field(default_factory=dict)  # by pattern of the converter, in natural order


class PublishedWeights:
    """The weights of a folder under the model's own names, with the methods of a SafetensorsFolder.

    `unread` are the names in the folder that are not part of the model.
    """

    def __init__(self, skeleton, tensors: dict[str, torch.Tensor], files, folder: str, flag: str):
        """`skeleton` is the model on the meta device, `tensors` are its tensors, `files` the safetensors of `folder`."""
        self.skeleton, self.tensors, self.files, self.folder, self.flag = skeleton, tensors, files, folder, flag
        self.origins: dict[str, Origin] = {}
        self.aliases: dict[str, list[str]] = {}  # tensor of the model -> further names of the folder for it
        self.unread: list[str] = []
        self._match()

    def _match(self) -> None:
        """Find the origin of each tensor by name, in the order and with the rules of transformers' own loader."""
        rules = conversion_mapping.get_model_conversion_mapping(self.skeleton)
        renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known, tied = dict.fromkeys(self.skeleton.state_dict(), True), self.skeleton.all_tied_weights_keys
        tied_sources: dict[str, list[str]] = {}
        rename, prefix = core_model_loading.rename_source_key, self.skeleton.base_model_prefix
        for source in sorted(self.files.names(), key=core_model_loading.dot_natural_key):
            target, pattern = rename(source, renamings, converters, prefix, known)
            if target not in known and source in known:
                target, pattern = rename(source, [], [], prefix, known)
            converter = by_pattern.get(pattern)
            targets = [target]
            if converter:
                targets = [target.replace(converter.target_patterns[0], other) for other in converter.target_patterns]
            if not any(name in known for name in targets):
                self.unread.append(source)
            elif target in tied:
                tied_sources.setdefault(tied[target], []).append(source)
            else:
                origin = self.origins.setdefault(target, Origin(converter, targets))
                self.origins |= dict.fromkeys(targets, origin)
                origin.sources.setdefault(pattern or "", []).append(source)
        for target, sources in tied_sources.items():
            if target not in self.origins:
                self.origins[target] = Origin(None, [target], {"": [sources.pop(0)]})
            self.aliases[target] = sources

    def __contains__(self, name: str) -> bool:
        return name in self.origins

    def dtype(self, name: str) -> str:
        found = {self.files.dtype(source) for sources in self.origins[name].sources.values() for source in sources}
        return found.pop() if len(found) == 1 else "mixed"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor that `read` returns. Raises UserError if its parts do not fit together."""
        origin = self.origins[name]
        if origin.converter is None:
            return self.files.shape(next(iter(origin.sources.values()))[0])
        try:
            made = self._made(name, lambda source: torch.empty(self.files.shape(source), device="meta"))
        except (RuntimeError, ValueError, KeyError) as error:
            first = next(iter(origin.sources.values()))[0]
            found = f"{self.folder}: {first} and others do not make {name} ({str(error).splitlines()[0]})"
            raise UserError(self.flag, found, "a complete model") from None
        return tuple(made.shape)

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` (one slice per dimension) selects."""
        origin = self.origins[name]
        if origin.converter is None:
            return self.files.read(next(iter(origin.sources.values()))[0], region)
        if _stacks_experts(origin.converter):
            return self._read_stacked(origin, region or tuple(slice(0, size) for size in self.shape(name)))
        made = self._made(name, self.files.read)
        return made if region is None else made[region]

    def _made(self, name: str, read) -> torch.Tensor:
        origin = self.origins[name]
        converter = copy.deepcopy(origin.converter)
        for pattern, sources in origin.sources.items():
            for source in sources:
                converter.add_tensor(name, source, pattern, read(source))
        made = converter.convert(origin.targets[0], model=self.skeleton, config=self.skeleton.config)[name]
        return made[0] if isinstance(made, list) else made

    def _read_stacked(self, origin: Origin, region: tuple[slice, ...]) -> torch.Tensor:
        """A part of stacked experts: (experts, rows, columns), with the rows of several sources one after the other.

        Only the tensors of the experts in `region` are read.
        """
        experts, rows, *columns = region
        patterns = [origin.sources[pattern] for pattern in origin.converter.source_patterns]
        result = None
        for place, number in enumerate(range(experts.start, experts.stop)):
            first = 0  # row of the stack where the next source begins
            for sources in patterns:
                size = self.files.shape(sources[number])[0]
                low, high = max(rows.start, first), min(rows.stop, first + size)
                if low < high:
                    part = self.files.read(sources[number], (slice(low - first, high - first), *columns))
                    if result is None:
                        result = torch.empty([at.stop - at.start for at in region], dtype=part.dtype)
                    result[place, low - rows.start : high - rows.start] = part
                first += size
        return torch.empty([at.stop - at.start for at in region]) if result is None else result

    # --- saving

    def as_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert (name, CPU tensor) pairs of the model to the names and forms of the folder, one at a time.

        A tensor that the folder lacks, such as a new reward head, keeps its name.
        """
        held: dict[str, torch.Tensor] = {}  # tensors of a rule that makes one tensor of the folder of several
        for name, tensor in tensors:
            origin = self.origins.get(name)
            if origin is None or origin.converter is None:
                yield name if origin is None else next(iter(origin.sources.values()))[0], tensor
                for alias in self.aliases.get(name, []):
                    yield alias, tensor.clone()
                continue
            held[name] = tensor
            del tensor
            if all(target in held for target in origin.targets):
                yield from self._reverted(origin, [held.pop(target) for target in origin.targets])

    def _reverted(self, origin: Origin, tensors: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        reverse = origin.converter.reverse_transform()
        made = {pattern: [tensor] for pattern, tensor in zip(reverse.source_patterns, tensors)}
        for operation in reverse.operations:
            made = operation.convert(
                made,
                source_patterns=reverse.source_patterns,
                target_patterns=reverse.target_patterns,
                full_layer_name=origin.targets[0],
                model=self.skeleton,
                config=self.skeleton.config,
            )
        for pattern, published in zip(origin.converter.source_patterns, reverse.target_patterns):
            for number, source in enumerate(origin.sources.get(pattern, [])):
                found = made.pop(published.replace("*", str(number)))
                found = found[0] if isinstance(found, list) else found
                yield source, found.reshape(self.files.shape(source))

    def untouched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the folder that are not part of the model, such as a vision tower, one at a time."""
        return ((name, self.files.read(name)) for name in self.unread)

    def config(self) -> dict:
        """The config.json of the folder, without its quantization."""
        config = read_model_config(self.folder)
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)
        return config


def _stacks_experts(converter) -> bool:
    """Whether a rule only stacks the matrices of experts, (rows, columns) each, and joins the rows of its sources."""
    merge, *rest = converter.operations
    stacks = type(merge) is MergeModulelist and merge.dim == 0 and len(converter.target_patterns) == 1
    return stacks and all(type(join) is Concatenate and join.dim == 1 for join in rest)


def check_fit(weights: PublishedWeights, full_precision: tuple[str, ...]) -> list[str]:
    """The slow part of `model_folder.check_weights`, for folders that are not tensor by tensor the model's."""
    folder, flag = weights.folder, weights.flag
    for name, tensor in weights.tensors.items():
        if name not in weights:
            raise UserError(flag, f"{folder} has no weight {name}", "a complete model")
        if weights.shape(name) != tuple(tensor.shape):
            found = f"{folder}: {name} has shape {weights.shape(name)}, and config.json says {tuple(tensor.shape)}"
            raise UserError(flag, found, "weights and config.json of the same model")
        if tensor.is_floating_point() and weights.dtype(name) not in (*full_precision, "mixed"):
            found = f"{folder}: {name} is {weights.dtype(name)}, and config.json has no quantization_config"
            raise UserError(flag, found, "bf16, fp16 or fp32 weights")
    superfluous = [r"rotary_emb\.inv_freq$", r"\.(attn|attention)\.(masked_)?bias$"]  # buffers of older versions
    if not weights.skeleton.get_output_embeddings():  # a classifier made from a language model
        superfluous.append(r"^lm_head\.")
    return [name for name in weights.unread if not any(re.search(pattern, name) for pattern in superfluous)]
