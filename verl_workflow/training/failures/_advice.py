"""What helps against each class of failure, in sentences, where nothing more particular is known."""

from __future__ import annotations

from verl_workflow.spec._failure_class import FailureClass as Kind

# Those that may pass when nothing is changed but the time. The others need somebody, or a change.
RETRYABLE = frozenset(
    {
        Kind.CAPACITY,
        Kind.CHECKPOINT,
        Kind.INFRASTRUCTURE,
        Kind.MEMORY_HOST,
        Kind.STALL,
        Kind.TRACKER,
        Kind.UNKNOWN,
    }
)

ADVICE: dict[Kind, str] = {
    Kind.CONFIGURATION: "Correct the stage (`verl-workflow validate` names what it can), then start a new run.",
    Kind.DATA: "Correct the data, then start a new run.",
    Kind.REWARD: "Let the reward return a finite number for whatever a model may reply, then start a new run.",
    Kind.CAPACITY: "Give the cluster more CPUs or GPUs, wait until others are done, or ask for fewer; then resume.",
    Kind.MEMORY_GPU: "Lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (or "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu with use_dynamic_bsz), the stage's max_response_length, or "
    "actor_rollout_ref.rollout.gpu_memory_utilization, in a new run; with `retry.changes` the stage does it by itself.",
    Kind.MEMORY_HOST: "Give the node more memory, take other work off it, or lower data.train_batch_size and "
    "data.dataloader_num_workers; then resume.",
    Kind.MEMORY_SAVE: "Memory ran out while a checkpoint was gathered: give the node more memory, save less "
    "(actor_rollout_ref.actor.checkpoint.save_contents without hf_model), or lower "
    "actor_rollout_ref.rollout.gpu_memory_utilization; then resume.",
    Kind.DISK: "Free some space, keep fewer checkpoints, or give the run other storage; then resume.",
    Kind.INFRASTRUCTURE: "A process, node or connection was lost; the next attempt resumes from the newest whole "
    "checkpoint.",
    Kind.STALL: "Look at the stacks for what it waits for, then resume.",
    Kind.NUMERIC: "Lower the learning rate or the clip range, and start a new run.",
    Kind.CHECKPOINT: "The checkpoint is set aside; the next attempt resumes from the one before.",
    Kind.TRACKER: "Let verl log to console and file alone, and name trackers under the stage's `trackers`.",
    Kind.CANCELLED: "It was stopped on purpose: resume the run to go on, or start a new one if the run itself was "
    "cancelled; finished stages are re-used.",
    Kind.UNKNOWN: "Read the log; resume when the cause is gone.",
}
