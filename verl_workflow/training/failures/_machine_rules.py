"""What shows that a machine of the training, or its storage, is at fault."""

from __future__ import annotations

import re

from verl_workflow.spec._failure_class import FailureClass as Kind
from verl_workflow.training.failures._rule import rule

_SHARED_MEMORY = (
    "The container's shared memory (/dev/shm) is full: give it more (--shm-size=16g, or an emptyDir with medium: "
    "Memory at /dev/shm), or lower data.dataloader_num_workers; then resume."
)

SHARED_MEMORY_FULL = (
    rule(
        Kind.MEMORY_HOST,
        r"/dev/shm.*(No space left|Errno 28|full)|unable to (open|allocate|write to) (a )?shared memory|"
        r"insufficient shared memory|Bus error|SIGBUS",
        _SHARED_MEMORY,
    ),
)

DISK_FULL = (
    rule(
        Kind.DISK,
        r"Disk quota exceeded|Errno 122\]",
        "The quota of the folder's owner is spent: free some of it or have it raised, or give the run other storage; "
        "then resume.",
    ),
    rule(
        Kind.DISK,
        r"OutOfDiskError|file system monitor.*over capacity|Failed to spill",
        "The disk that Ray spills objects to is full: free space below Ray's temporary folder (/tmp/ray), or start Ray "
        "with another (--temp-dir, --object-spilling-directory); then resume.",
    ),
    rule(Kind.DISK, r"No space left on device|Errno 28\]|\bENOSPC\b|not enough disk space"),
)

ENVIRONMENT = (
    rule(
        Kind.CONFIGURATION,
        r"Too many open files|Errno 24\]|\bEMFILE\b",
        "Raise the node's limit of open files before Ray is started there (ulimit -n 65536), then resume.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"can't start new thread|pthread_create failed|Resource temporarily unavailable.*(fork|thread)|"
        r"(fork|thread).*Resource temporarily unavailable",
        "Raise the limit of processes and threads on the node or in its container (ulimit -u, the pod's pids limit), "
        "then resume.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|Found no NVIDIA driver",
        "The node's NVIDIA driver does not fit the CUDA of the installed torch: update the driver (nvidia-smi shows "
        "it), or install a torch that was built for an older CUDA.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"No CUDA GPUs are available|no CUDA-capable device is detected",
        "The process saw no GPU: look at nvidia-smi on the node, at CUDA_VISIBLE_DEVICES, and whether Ray was told of "
        "GPUs that are not there (ray status).",
    ),
    rule(
        Kind.CONFIGURATION,
        r"no kernel image is available|CUDA error: invalid device function|out of resource: shared memory",
        "The installed CUDA kernels were not built for this GPU: install torch, vLLM and flash-attn for its "
        "architecture, or take other GPUs.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"undefined symbol|GLIBC(XX)?_[\d.]+' not found|cannot open shared object file|"
        r"(Import|Runtime)Error:.*flash_attn.*(torch|CUDA|version)",
        "A compiled package does not fit the others: install flash-attn, vLLM and torch as built for each other.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"No module named '?flash_attn|FlashAttention2 has been toggled on, but it cannot be used|"
        r"flash_attn seems to be not installed",
        "Install flash-attn, or let the model do without: set "
        "+actor_rollout_ref.model.override_config.attn_implementation to sdpa, and "
        "actor_rollout_ref.model.use_remove_padding to false.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"is not a value head model",
        # verl builds every critic with flash_attention_2, and takes the ImportError for a model without a value head.
        "Install flash-attn where the critic trains, for verl builds it with that; or take `algorithm: grpo`.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"GatedRepoError|Cannot access gated repo|Access to model .* is restricted",
        "The model is gated: accept its licence, download it with an account that may, and name the local folder.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"RepositoryNotFoundError|OfflineModeIsEnabled|LocalEntryNotFoundError|HFValidationError|"
        r"(couldn't|can't|cannot) connect to '?https://huggingface\.co|"
        r"is not a local folder and is not a valid model identifier",
        "Trainings load from local folders alone: name a folder that all nodes see, or a stage's output.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"does not recognize this architecture|Unrecognized (model|configuration class)|"
        r"Model architectures \[[^\]]*\] (are not supported|failed to be inspected)",
        "The installed transformers or rollout engine does not know this model: update them, or take another model.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"PermissionError: \[Errno 13\]",
        "The user that Ray runs as may not read or write there: give it the right, then resume.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"Version mismatch: The cluster was started with|RuntimeEnvSetupError|Failed to merge the Job's runtime env",
        "Driver and cluster do not agree: the same Python and Ray on all nodes, and no variable in the job's "
        "environment that verl sets itself.",
    ),
    rule(
        Kind.CONFIGURATION,
        r"index out of range in self|Assertion `(srcIndex|ind|idx|index|t|cur_target)\b[^`]*` failed",
        "A token id lies beyond the model's vocabulary: use the tokenizer that belongs to the model.",
    ),
)

MEMORY = (
    rule(
        Kind.MEMORY_GPU,
        r"No available memory for the cache blocks|"
        r"(KV cache|model's max seq(uence)? len).*(larger than|exceeds).*(KV cache|available)",
        "The rollout engine has too little GPU memory for its cache: raise "
        "actor_rollout_ref.rollout.gpu_memory_utilization if the GPU is otherwise free, or lower "
        "max_response_length or actor_rollout_ref.rollout.max_model_len, or raise "
        "actor_rollout_ref.rollout.tensor_model_parallel_size.",
    ),
    rule(
        Kind.MEMORY_GPU,
        r"less than desired GPU memory utilization|Error in memory profiling",
        "Something else holds memory on that GPU: see nvidia-smi on the node for a process of another run and end it, "
        "or lower actor_rollout_ref.rollout.gpu_memory_utilization.",
    ),
    rule(
        Kind.MEMORY_GPU,
        r"[Cc]apture (CUDA|cuda) graph failed.*(memory|OOM)|out of memory occurred when warming up|"
        r"(mem-fraction-static|max-running-requests|max_num_seqs).*(increase|smaller|lower|reduc)|"
        r"(increase|smaller|[Ll]ower\w*|[Rr]educ\w*).*(mem-fraction-static|max-running-requests|`max_num_seqs`)|"
        r"alloc_\w+ runs? out of memory|torch_memory_saver.*out of memory|CUresult error: 2\b",
        "The rollout engine ran out of GPU memory: lower actor_rollout_ref.rollout.max_num_seqs or "
        "actor_rollout_ref.rollout.gpu_memory_utilization, or set actor_rollout_ref.rollout.enforce_eager to true.",
    ),
    rule(
        Kind.MEMORY_GPU,
        r"(CUDA|HIP) out of memory|(CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|"
        r"cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
        r"Cuda failure.*out of memory|torch\.(cuda\.)?OutOfMemoryError",
    ),
    rule(
        Kind.MEMORY_HOST,
        r"ray\.exceptions\.OutOfMemoryError|node running low on memory|exceeds the memory usage threshold|"
        r"[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure|memory monitor killed",
        "Ray killed a worker because its node had hardly any memory left: give the node more, take other work off it, "
        "lower data.train_batch_size, or keep weights on the GPU "
        "(actor_rollout_ref.actor.fsdp_config.param_offload and optimizer_offload off); then resume.",
    ),
    rule(
        Kind.MEMORY_HOST,
        r"ObjectStoreFullError|object store is full",
        "Ray's object store is full: start Ray with more (--object-store-memory), or lower data.train_batch_size; "
        "then resume.",
    ),
    rule(
        Kind.MEMORY_HOST,
        r"Out of memory: Killed process|oom-kill:|invoked oom-killer|oom_reaper|OOMKilled|oom_kill event|"
        r"OOM Killed|killed (due to|by)[^.]{0,40}\b(out of memory|OOM|oom)\b|DataLoader worker .* signal: Killed",
        "The kernel or the container ended a process for want of memory: raise the container's limit or give the node "
        "more, or lower data.dataloader_num_workers and data.train_batch_size; then resume.",
    ),
    rule(
        Kind.MEMORY_HOST,
        r"DefaultCPUAllocator|Cannot allocate memory|Errno 12\]|std::bad_alloc|^(builtins\.)?MemoryError\b|"
        r"Unable to allocate [\d.]+ [GM]iB for an array",
        flags=re.MULTILINE,
    ),
)

FILES = (
    rule(
        Kind.DISK,
        r"Read-only file system|Errno 30\]",
        "The storage cannot be written: mount it writable on each node (a disk with errors is mounted read-only by "
        "the kernel: dmesg); then resume.",
    ),
    rule(
        Kind.DISK,
        r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+",
        "A checkpoint could not be written to its end, as on a full disk or a spent quota: look at both (df, quota), "
        "then resume.",
        weak=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"Stale file handle|Errno 116\]|Input/output error|Errno 5\]|Transport endpoint is not connected|Errno 107\]",
        "The shared file system failed: look at its mount on that node (dmesg). The next attempt resumes from the "
        "newest whole checkpoint.",
    ),
    rule(
        Kind.CHECKPOINT,
        r"PytorchStreamReader|hasRecord\(\"version\"\)|Error\(s\) in loading state_dict|"
        r"invalid header or archive is corrupted|"
        r"unexpected EOF, expected \d+ more bytes|MetadataIncompleteBuffer|HeaderTooLarge|"
        r"loaded state dict contains a parameter group|latest_checkpointed_iteration\.txt\"|"
        r"Resume .*checkpoint.*(does not exist|not found)|"
        r"(FileNotFoundError|EOFError|UnpicklingError|BadZipFile|RuntimeError)[^\n]*"
        r"(global_step_\d+|_world_size_\d+_rank_\d+\.pt)",
    ),
)

TAKEN_AWAY = (
    rule(
        Kind.INFRASTRUCTURE,
        r"\b(node|instance|machine|VM|host)\b[^.]{0,60}\b(was|were|is being|has been|will be) (preempted|drained)|"
        r"DRAIN_NODE_REASON_PREEMPTION|AUTOSCALER_DRAIN_PREEMPTED|due to (node )?preemption|died by preemption|"
        r"preemption notice|spot (instance )?interruption|DUE TO PREEMPTION|expected termination.*(drain|preempt)",
        "A node was taken away; the next attempt resumes from the newest checkpoint as soon as there is room.",
        preempted=True,
        flags=re.IGNORECASE,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"\bHandedOver\b",
        "A node was taken away on notice, after the training had saved; the next attempt resumes from there.",
        preempted=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"\bOvertakenError\b",
        "A later attempt of the stage trains in its place; nothing of it was lost.",
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"CANCELLED AT .* DUE TO TIME LIMIT",
        "The batch system's time limit was reached: resume in a new allocation, or ask for a longer one.",
    ),
    rule(Kind.CANCELLED, r"slurmstepd: error: \*\*\* (JOB|STEP) .* CANCELLED AT (?!.*DUE TO)"),
)

ROOM = (
    rule(
        Kind.CAPACITY,
        r"Total available GPUs .* is less than|ActorUnschedulableError|TaskUnschedulableError|"
        r"PlacementGroupSchedulingError|(placement group|pg).*(infeasible|cannot be (created|placed))|"
        r"Cannot provide a placement group|The actor is not schedulable",
    ),
    rule(
        Kind.CAPACITY,
        r"all CUDA-capable devices are busy or unavailable|CUDA error: CUDA-capable device\(s\) is/are busy",
        "Another process has the GPU to itself: see nvidia-smi on the node, end it or wait for it; then resume.",
    ),
    rule(
        Kind.CAPACITY,
        r"No available node types can fulfill|placement group.*cannot be scheduled|"
        r"resource request cannot be scheduled right now",
        weak=True,
    ),
)

LOST = (
    rule(
        Kind.INFRASTRUCTURE,
        r"[Aa]ddress already in use|EADDRINUSE",
        "Two processes wanted one port of a node. verl takes free ports by itself, and another attempt most often gets "
        "one; if it comes again, a setting names a fixed port, or a process of an earlier run still listens there.",
        weak=True,
    ),
    rule(
        Kind.CONFIGURATION,
        r"device-side assert triggered",
        "The GPU found an index out of bounds, most often a token id beyond the model's vocabulary: use the tokenizer "
        "that belongs to the model. The log names the assertion.",
        weak=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"uncorrectable ECC|GPU has fallen off the bus|\bXid\b|unspecified launch failure|illegal memory access|"
        r"misaligned address|NVLink.*[Ee]rror|CUDA error: (unknown error|hardware|launch failed)|"
        r"cudaErrorECCUncorrectable",
        "The GPU or its driver failed: if it comes again on the same node, take that node out (dmesg, nvidia-smi -q).",
        weak=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"(NCCL|RCCL|Gloo|ProcessGroup\w*).{0,200}(timed? ?out|timeout|watchdog|Connection (closed|reset|refused)|"
        r"remote process exited|unhandled system error|internal error)|ncclRemoteError|ncclSystemError|"
        r"DistNetworkError|DistStoreError|Socket (Timeout|Error)",
        "The processes of the training lost each other: another attempt often passes. If it comes again, look for a "
        "rank that died or hung first, at the network between the nodes (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), and "
        "raise actor_rollout_ref.nccl_timeout (seconds) if a step takes that long.",
        weak=True,
        flags=re.DOTALL,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"have not registered within the timeout|missing too many heartbeats|Failed to register worker|"
        r"health check failed",
        "A node was too busy to answer in time, or lost its network: take other work off it, or look at its disk and "
        "memory; the next attempt resumes.",
        weak=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"Fatal Python error: (Segmentation fault|Aborted)|SIGSEGV received|\*\*\* SIG(SEGV|ABRT)",
        "A process crashed in compiled code: if it comes again at the same place, the installed torch, vLLM and CUDA "
        "packages do not fit each other (the stack below that line names the library).",
        weak=True,
    ),
    rule(
        Kind.INFRASTRUCTURE,
        r"ActorDiedError|ActorUnavailableError|NodeDiedError|WorkerCrashedError|OwnerDiedError|ObjectLostError|"
        r"ObjectReconstructionFailed|LocalRayletDiedError|RayletDied|RaySystemError|RpcError|GetTimeoutError|"
        r"ray\.exceptions\.\w*(Died|Crashed|Lost|Unavailable)\w*|The actor died|[Ww]orker died|"
        r"node.*(died|failed|lost)|"
        r"Failed to connect to (the )?GCS|GCS.*(unavailable|lost|died|not.*respond)|"
        r"(Server|Worker|Engine core).*(died|has died|terminated) unexpectedly|EngineDeadError|"
        r"Engine core initialization failed|Scheduler hit an exception|"
        r"Connection(Reset|Refused|Aborted)?Error|Connection (reset|refused|closed)|Broken ?[Pp]ipe|"
        r"DeadlineExceeded|StatusCode\.UNAVAILABLE|RemoteDisconnected|ServerDisconnectedError|TimeoutError",
        weak=True,
    ),
)
