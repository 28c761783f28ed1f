"""verl's FSDP engines for the device ``cpu``, with what they assume of an accelerator put right."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.verl_plugin._threads import use_cores


class _OnCPU:
    """What both engines share."""

    engine_config: Any
    module: Any

    def initialize(self) -> None:
        _check(self.engine_config)
        super().initialize()  # type: ignore[misc]
        use_cores(sum(parameter.numel() for parameter in self.module.parameters()))

    def _build_fsdp_module(self, module: Any) -> Any:
        # A forward-only (reference) engine would be offloaded to pinned host memory, and pinning needs an accelerator.
        # On the CPU it is in host memory already: it is built like any other.
        config = self.engine_config
        forward_only = config.forward_only
        object.__setattr__(config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            object.__setattr__(config, "forward_only", forward_only)


class CPUEngineWithLMHead(_OnCPU, FSDPEngineWithLMHead):
    """The actor and the reference model."""


class CPUEngineWithValueHead(_OnCPU, FSDPEngineWithValueHead):
    """The critic."""

    def _build_module(self) -> Any:
        # verl's loader of value heads fixes attn_implementation to flash_attention_2, whatever the configuration says,
        # so the model is loaded here; the rest is as in FSDPEngine._build_module.
        from transformers import AutoModelForTokenClassification
        from verl.models.transformers.monkey_patch import apply_monkey_patch
        from verl.utils.torch_dtypes import PrecisionType

        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or torch.float32)
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        config.hidden_dropout = "0"
        config.summary_dropout_prob = 0.0
        module = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path,
            dtype=dtype,
            config=config,
            attn_implementation=self.model_config.override_config.get("attn_implementation", "sdpa"),
            trust_remote_code=self.model_config.trust_remote_code,
        )
        apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
            use_fused_kernels=False,
            fused_kernels_backend=None,
        )
        module.to(dtype)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


def register() -> None:
    """Make the engines known to verl. FSDP1 is taken over as well, to be refused with a reason."""
    for model_type, engine in (
        ("language_model", CPUEngineWithLMHead),
        ("value_model", CPUEngineWithValueHead),
    ):
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)


def _check(config: Any) -> None:
    if config.strategy != "fsdp2":
        raise UserError(
            ErrorCode.OVERRIDE_INVALID,
            "on the CPU verl can train with FSDP2 only",
            where="strategy",
            value=config.strategy,
            remedy="Set strategy and fsdp_config.strategy (critic: fsdp.strategy) to fsdp2 for each role",
        )
    if config.offload_policy:
        raise UserError(
            ErrorCode.OVERRIDE_INVALID,
            "there is nothing to offload from on the CPU",
            where="fsdp_config.offload_policy",
            value=config.offload_policy,
            remedy="Set it to False",
        )
