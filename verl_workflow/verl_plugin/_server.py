"""The rollout server: an actor that holds a copy of the model and answers verl's calls."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from verl_workflow.decoding import Decoded, DecodeRequest, StopReason, decode
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.verl_plugin._batching import Batcher
from verl_workflow.verl_plugin._options import Options
from verl_workflow.verl_plugin._threads import use_cores
from verl_workflow.verl_plugin._weights import WeightLoader

_log = logging.getLogger(__name__)

IpcHandle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""How torch lets another process open a CUDA tensor: a function and its arguments."""

DEVICE_ARGUMENT = 6
"""Where among those arguments the device's index stands."""


class HFServer:
    """One model in one process, on one device; overlapping calls of `generate` are decoded as one batch.

    Args:
        config: verl's rollout section.
        model_config: verl's model section.
        replica_rank: number of this server among its kind; part of the seed.
        device: `cpu` or `cuda:0`.
        share: how many servers use this machine's cores.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int, device: str = "cpu", share: int = 1) -> None:
        self.config: Any = omega_conf_to_dataclass(config, dataclass_type=RolloutConfig)
        self.model_config: Any = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.device = torch.device(device)
        self.global_steps: int | None = None
        self._options = Options.of(self.config)
        self._seed = int(self.config.seed) + replica_rank
        # How often each prompt has been answered with these weights.
        self._asked: Counter[bytes] = Counter()
        self._share = share

    async def launch_server(self) -> None:
        """Build the model and take requests."""
        self.model = _build_model(self.config, self.model_config).to(self.device).eval()
        if self.device.type == "cpu":
            use_cores(self.model.num_parameters(), self._share)
        self._weights = WeightLoader(self.model)
        self._eos_ids, self._pad_id = _special_ids(self.model_config)
        self._batcher = Batcher(self._decode, most=self.config.max_num_seqs, window_s=self._options.batch_window_s)

    # Generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Continue one prompt.

        Raises:
            UserError: `override_invalid`, something was asked for that this rollout cannot do.
        """
        if image_data or video_data or audio_data:
            raise _unsupported("images, video or audio in a prompt", None)
        request = self._request(list(prompt_ids), sampling_params)
        out = await self._batcher.generate(request)
        return TokenOutput(
            token_ids=out.ids,
            log_probs=out.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if out.stop_reason is StopReason.ABORTED else "completed",
            extra_fields={"global_steps": self.global_steps},
        )

    def _request(self, prompt_ids: list[int], params: Mapping[str, Any]) -> DecodeRequest:
        config = self.config
        penalty = params.get("repetition_penalty")
        if penalty is not None and penalty != 1:
            raise _unsupported("a repetition_penalty other than 1", penalty)
        limit = params.get("max_tokens", params.get("max_new_tokens"))
        if limit is None:
            room = config.prompt_length + config.response_length - len(prompt_ids)
            limit = min(config.response_length, room)
        return DecodeRequest(
            prompt_ids=prompt_ids,
            max_tokens=max(1, int(limit)),
            temperature=float(params.get("temperature", config.temperature)),
            top_p=float(params.get("top_p", config.top_p)),
            top_k=int(params.get("top_k", config.top_k)),
            ignore_eos=bool(params.get("ignore_eos", config.ignore_eos)),
            seed=self._seed_of(prompt_ids),
        )

    def _seed_of(self, prompt_ids: Sequence[int]) -> int:
        """Of the randomness of one answer: the n-th one to a prompt with the weights of a step has always the same.

        So an answer does not depend on what it happens to be decoded with, which is a matter of timing.
        """
        prompt = hashlib.sha256(repr(prompt_ids).encode()).digest()
        number = self._asked[prompt]
        self._asked[prompt] += 1
        named = f"{self._seed} {self.global_steps} {number} ".encode() + prompt
        return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1

    def _decode(self, requests: Sequence[DecodeRequest], should_abort: Callable[[], bool]) -> list[Decoded]:
        start = time.monotonic()
        out = decode(
            self.model,
            requests,
            eos_ids=self._eos_ids,
            pad_id=self._pad_id,
            should_abort=should_abort,
        )
        tokens = sum(len(one.ids) for one in out)
        _log.info("decoded %d rows, %d tokens in %.2f s", len(out), tokens, time.monotonic() - start)
        return out

    # Weights. verl lets no request in meanwhile: it puts the server to sleep first, or aborts.

    async def load_weights(self, state: Mapping[str, torch.Tensor], last: bool) -> None:
        """Take a part of the weights from host memory; `last` checks that nothing is missing."""
        await self._batcher.drain()
        self._weights.load(state.items())
        if last:
            self._weights.finish()

    async def load_weights_ipc(self, handles: Sequence[tuple[str, IpcHandle]], last: bool) -> None:
        """The same from tensors that the trainer holds on this GPU, which must stay alive until this returns."""
        await self._batcher.drain()
        self._weights.load(self._opened(handles))
        torch.cuda.synchronize(self.device)
        torch.cuda.ipc_collect()
        if last:
            self._weights.finish()

    def _opened(self, handles: Sequence[tuple[str, IpcHandle]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (rebuild, arguments) in handles:
            # The trainer's number of the device is not ours: each process numbers those that it sees.
            here = list(arguments)
            here[DEVICE_ARGUMENT] = self.device.index or 0
            yield name, rebuild(*here)

    async def set_global_steps(self, global_steps: int) -> None:
        """Note the version of the weights. Randomness starts anew from it, also in a resumed run."""
        self.global_steps = global_steps
        self._asked.clear()

    # Life cycle. The model stays where it is, and there is no cache between batches: only torch's blocks are freed.

    async def sleep(self) -> None:
        await self._batcher.drain()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        pass

    async def release_kv_cache(self) -> None:
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    async def wait_for_requests_to_drain(self) -> None:
        await self._batcher.drain()

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> dict[str, Any]:
        """End what is in flight with what it has, and hold (or reject) new requests until `resume_generation`."""
        count = await self._batcher.abort(reject=reject_request)
        return {"aborted_count": count, "request_ids": []}

    async def resume_generation(self) -> None:
        self._batcher.resume()

    async def start_profile(self, **_: Any) -> None:
        pass

    async def stop_profile(self) -> None:
        pass


def _build_model(config: Any, model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = PrecisionType.to_dtype(config.dtype)
    if config.load_format == "dummy":  # verl sends the weights before the first request
        return AutoModelForCausalLM.from_config(
            model_config.hf_config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
        )
    return AutoModelForCausalLM.from_pretrained(
        model_config.local_path,
        config=model_config.hf_config,
        dtype=dtype,
        trust_remote_code=model_config.trust_remote_code,
    )


def _special_ids(model_config: Any) -> tuple[frozenset[int], int]:
    """The ids that end a sequence, by tokenizer and generation config, and one to pad with."""
    tokenizer, generation = model_config.tokenizer, model_config.generation_config
    ends = {tokenizer.eos_token_id}
    named = getattr(generation, "eos_token_id", None)
    ends |= set(named) if isinstance(named, (list, tuple)) else {named}
    pad = tokenizer.pad_token_id
    return frozenset(int(end) for end in ends if end is not None), 0 if pad is None else int(pad)


def _unsupported(what: str, value: Any) -> UserError:
    return UserError(
        ErrorCode.OVERRIDE_INVALID,
        f"the rollout hf cannot do {what}",
        where="actor_rollout_ref.rollout",
        value=value,
        remedy="Leave it out, or choose rollout.name=vllm or sglang",
    )
