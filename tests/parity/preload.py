"""What the server of forked ranks imports, so that no rank pays for it."""

import torch.distributed._composable
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint  # noqa: F401

import executor.optimizer
import executor.parallel.pipeline_parallel
import executor.parallelize
import executor.transformer  # noqa: F401
import planner.api  # noqa: F401
