"""The rollout ``hf`` as verl sees it: the replica that starts a server, and the trainer's end of the wire to it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.verl_plugin._options import WHERE, Options
from verl_workflow.verl_plugin._server import HFServer


class HFReplica(RolloutReplica):
    """Starts one `HFServer` beside its trainer's worker: on the same node and, with CUDA, the same GPU."""

    def rollout_worker_use_gpu(self) -> bool:
        return bool(get_platform().device_name != "cpu")

    async def launch_servers(self) -> None:
        """Start the server and wait until it has its model.

        Raises:
            UserError: `override_invalid`, the replica is spread over several devices or the platform is neither.
        """
        _check(self.world_size)
        platform = get_platform()
        node, accelerator = await self.workers[0].__ray_call__.remote(_whereabouts)
        device, variables = "cpu", {}
        if platform.device_name == "cuda":
            device = "cuda:0"
            # The server reserves no GPU, as the worker has it; so Ray must leave the variable alone, and we set it.
            variables = dict.fromkeys(platform.ray_noset_envvars(), "1") | platform.rollout_env_vars()
            if accelerator is not None:
                variables[platform.visible_devices_envvar()] = str(accelerator)
        server = (
            ray.remote(HFServer)
            .options(
                name=self._server_name(),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                runtime_env={"env_vars": variables} if variables else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
                device=device,
                share=self.gpus_per_node,
            )
        )
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = server
        # Nothing listens there: verl's load balancer only needs a key.
        self._server_address = self._server_name()

    def _server_name(self) -> str:
        role = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        return f"hf_server_{role}{self.replica_rank}{self.name_suffix}"


class ServerAdapter(BaseRollout):
    """Lives in the trainer's worker and hands its weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        # verl asks which rank of a replica speaks for it; a replica is one rank here.
        self.is_leader_rank = True
        self._options = Options.of(self.config)
        self._handle: Any = None

    @property
    def _server(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(f"hf_server_{self.replica_rank}")
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all weights, in parts of about ``checkpoint_engine.update_weights_bucket_megabytes``.

        Raises:
            UserError: `override_invalid`, the trainer sends something else than whole weights.
            VerlWorkflowError: `model_invalid`, they are not the server's model; `training_failed`, the server could
                not open them.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise UserError(
                ErrorCode.OVERRIDE_INVALID,
                "the rollout hf takes whole weights only",
                where="actor_rollout_ref",
                value=wire_format if peft_config is None else "LoRA adapter",
                remedy="Use checkpoint_engine.backend=naive, and model.lora.merge=True with LoRA",
            )
        size = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async for part, last in _parts(ensure_async_iterator(weights), size):
            if self._options.weights == "ipc" and all(tensor.is_cuda for _, tensor in part):
                await self._send_ipc(part, last)
            else:
                # A view of a larger tensor would be pickled with all of it.
                state = {name: tensor.to("cpu", copy=True) for name, tensor in part}
                await self._server.load_weights.remote(state, last)
        if global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)

    async def _send_ipc(self, part: Sequence[tuple[str, torch.Tensor]], last: bool) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        held = [(name, tensor.contiguous()) for name, tensor in part]
        torch.cuda.synchronize()
        handles = [(name, reduce_tensor(tensor)) for name, tensor in held]
        try:
            await self._server.load_weights_ipc.remote(handles, last)
        except RuntimeError as error:
            raise VerlWorkflowError(
                ErrorCode.TRAINING_FAILED,
                "the rollout server could not take weights by CUDA IPC",
                where=WHERE,
                remedy="Send them through host memory: +" + WHERE + ".weights=host",
            ) from error


async def _parts(
    weights: AsyncIterator[tuple[str, torch.Tensor]], size: int
) -> AsyncIterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
    """The weights in parts of at least `size` bytes, and whether each is the last."""
    part: list[tuple[str, torch.Tensor]] = []
    held = 0
    async for name, tensor in weights:
        if held >= size:
            yield part, False
            part, held = [], 0
        part.append((name, tensor.detach()))
        held += tensor.nbytes
    yield part, True


def _whereabouts(worker: Any) -> tuple[str, str | None]:
    """Runs in the trainer's worker: its node and the accelerator that Ray gave it."""
    from verl.utils.device import get_resource_name

    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids().get(get_resource_name()) or []
    return context.get_node_id(), ids[0] if ids else None


def _check(world_size: int) -> None:
    if world_size != 1:
        raise UserError(
            ErrorCode.OVERRIDE_INVALID,
            "the rollout hf holds a whole model on one device",
            where="actor_rollout_ref.rollout.tensor_model_parallel_size",
            value=world_size,
            remedy="Set tensor_model_parallel_size, data_parallel_size and pipeline_model_parallel_size to 1",
        )
    name = get_platform().device_name
    if name not in ("cpu", "cuda"):
        raise UserError(
            ErrorCode.OVERRIDE_INVALID,
            "the rollout hf runs on the CPU and on CUDA only",
            where="actor_rollout_ref.rollout.name",
            value=name,
            remedy="Choose rollout.name=vllm or sglang",
        )
