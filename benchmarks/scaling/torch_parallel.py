"""GPT-2 in plain torch on several GPUs: DistributedDataParallel, FSDP2, and tensor with sequence parallelism."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train_step.torch_gpt2 import ATTENTION, GPT2


def ddp(model):
    return DistributedDataParallel(torch.compile(model, dynamic=False), gradient_as_bucket_view=True)


def fsdp(model, mesh, dtype):
    """Each block is compiled by itself, as in torchtitan."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.transformer["h"]:
        block.compile(dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Block(nn.Module):
    """A block with separate matrices for queries, keys and values, which torch's plans can divide by heads."""

    def __init__(self, config):
        super().__init__()
        c, self.heads = config.n_embd, config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.attn = Attention(c, config.n_head)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU("tanh"), nn.Linear(4 * c, c))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.head_size = c // heads
        self.q, self.k, self.v, self.c_proj = (nn.Linear(c, c) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (-1, self.head_size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class TensorParallelGPT2(nn.Module):
    """torchtitan's plan for Llama, applied to GPT-2: columns, rows, sequence parallel norms, parallel loss."""

    def __init__(self, config, mesh):
        super().__init__()
        self.rank, self.size, self.mesh = mesh.get_local_rank(), mesh.size(), mesh
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Parameter(0.02 * torch.randn(config.block_size, config.n_embd))
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    def parallelize(self):
        norm, rows = SequenceParallel(), RowwiseParallel(output_layouts=Shard(1))
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        columns = ColwiseParallel()
        block_plan = {
            "ln_1": norm, "ln_2": norm, "attn": whole, "attn.q": columns, "attn.k": columns, "attn.v": columns,
            "attn.c_proj": rows, "mlp": whole, "mlp.0": columns, "mlp.2": rows,
        }  # fmt: skip
        for block in self.h:
            parallelize_module(block, self.mesh, block_plan)
            block.compile(dynamic=False)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        wte = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(self, self.mesh, {"wte": wte, "ln_f": norm, "lm_head": head})
        self.lm_head.weight = self.wte.weight
        self.wpe = nn.Parameter(distribute_tensor(self.wpe.detach(), self.mesh, [Replicate()]))
        return self

    def forward(self, tokens, targets):
        part = tokens.shape[1] // self.size
        wpe = self.wpe.to_local(grad_placements=[Partial()])
        x = self.wte(tokens) + wpe[self.rank * part : (self.rank + 1) * part]
        with sdpa_kernel(ATTENTION, set_priority=True):
            for block in self.h:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tensor_parallel_step(model):
    """Return a function of tokens and targets that computes the loss and the gradients."""

    def step(tokens, targets):
        with loss_parallel():
            loss = model(tokens, targets)
            loss.backward()
        return loss

    return step


__all__ = ["GPT2", "TensorParallelGPT2", "ddp", "fsdp", "tensor_parallel_step"]
