"""Faults of one line that `dtgpt compare` must locate: `planted_faults.py --gate` plants them.

A fault that changes what one process computes, too, is compared with the code before it (`--commits`).
"""

from typing import NamedTuple

from faults import Fault


class LocatedFault(NamedTuple):
    """A fault, the words after `dtgpt compare recipes/gpt2_tiny.py`, and the module that is to be named."""

    fault: Fault
    words: str
    module: str


DROPOUT = "--model.dropout 0.1"
CODE = "--commits HEAD"

LOCATED = [
    LocatedFault(
        Fault(
            "sum over tp ranks: each keeps its addend",
            "dtgpt/parallel/collectives.py",
            "dist.all_reduce(whole, group=self.group)",
            "pass",
        ),
        "--plans tp2",
        "blocks.0.attn.proj",
    ),
    LocatedFault(
        Fault(
            "sequence parallelism: gathered parts in the reverse order",
            "dtgpt/parallel/collectives.py",
            "return torch.cat(parts.chunk(self.group.size()), dim)",
            "return torch.cat(parts.chunk(self.group.size())[::-1], dim)",
        ),
        "--plans tp2_sp",
        "blocks.0.attn.qkv",
    ),
    LocatedFault(
        Fault(
            "sequence parallelism: gradients of norms are not summed",
            "dtgpt/parallel/shards.py",
            "if self.mesh.tp_group is not None and self._partial:",
            "if self.mesh.tp_group is not None and len(self._partial) > 99:",
        ),
        "--plans tp2_sp",
        "head.ln_f",
    ),
    LocatedFault(
        Fault(
            "tied table: the copies on two stages are not summed",
            "dtgpt/parallel/shards.py",
            "dist.all_reduce(self.gradients[i], group=self.mesh.tied_group)",
            "pass",
        ),
        "--plans pp2",
        "embedding.wte",
    ),
    LocatedFault(
        Fault(
            "dropout under sequence parallelism: masks from one element too late",
            "dtgpt/parallel/tensor.py",
            "first = self.sizes[self.dim] // device_mesh.size() * device_mesh.get_local_rank()",
            "first = (self.sizes[self.dim] // device_mesh.size() + 1) * device_mesh.get_local_rank()",
        ),
        f"--plans tp2_sp {DROPOUT}",
        "embedding.drop",
    ),
    LocatedFault(
        Fault(
            "dropout under tp: all ranks draw the masks of the first heads",
            "dtgpt/parallel/tensor.py",
            "first if dim == self.dim else 0 for dim in range(len(self.sizes))",
            "0 for dim in range(len(self.sizes))",
        ),
        f"--plans tp2 {DROPOUT}",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "replicas take samples that overlap",
            "dtgpt/train/objective.py",
            "samples.start + place.dp * count + torch",
            "samples.start + place.dp + torch",
        ),
        "--plans dp2",
        "embedding",
    ),
    LocatedFault(
        Fault(
            "the norm counts what tp ranks repeat",
            "dtgpt/parallel/shards.py",
            "torch.tensor([1 / self.all[i].replicas for i in self._counted], device=mesh.device)",
            "torch.tensor([1.0 for i in self._counted], device=mesh.device)",
        ),
        "--plans tp2",
        "(all)",
    ),
    LocatedFault(
        Fault(
            "the norm omits the parts of other ranks",
            "dtgpt/parallel/shards.py",
            "return self.sums.root(self.mesh.all_reduce(self.squares()))",
            "return self.sums.root(self.squares())",
        ),
        "--plans zero3",
        "(all)",
    ),
    LocatedFault(
        Fault(
            "positions under sequence parallelism begin at 0 on every rank",
            "dtgpt/parallel/tensor.py",
            "inputs[0].chunk(ranks, dim=1)[rank], *inputs[1:]",
            "inputs[0].chunk(ranks, dim=1)[0], *inputs[1:]",
        ),
        "--plans tp2_sp",
        "embedding.wpe",
    ),
    LocatedFault(
        Fault(
            "loss over a cut vocabulary: the offset is one row short",
            "dtgpt/ops/loss/head.py",
            "return size * mesh.get_local_rank(), mesh.get_group()",
            "return (size - 1) * mesh.get_local_rank(), mesh.get_group()",
        ),
        "--plans tp2",
        "head.lm_head",
    ),
    LocatedFault(
        Fault(
            "ZeRO: weights are drawn for the part of another rank",
            "dtgpt/parallel/shards.py",
            "fill_weight(shard.local, shard.name, shard.region, config, key)",
            "fill_weight(shard.local, shard.name, shard.region if self.mesh.rank == 0 else "
            "tuple(range(len(r)) for r in shard.region), config, key)",
        ),
        "--plans zero3",
        "embedding.wte",
    ),
    LocatedFault(
        Fault(
            "a stage divides its gradients by the micro-batches again",
            "dtgpt/parallel/pipeline.py",
            "scale_grads=False",
            "scale_grads=True",
        ),
        "--plans pp2",
        "head.ln_f",
    ),
    LocatedFault(
        Fault(
            "backward of a matrix cut by columns: addends are not summed",
            "dtgpt/parallel/tensor.py",
            "return layout.sum(grad.to_local()), None",
            "return grad.to_local(), None",
        ),
        "--plans tp2",
        "head.lm_head",
    ),
    LocatedFault(
        Fault(
            "replicas: a micro-batch overwrites the sum of those before it",
            "dtgpt/parallel/gradients.py",
            "            elif self.done:\n",
            "            elif self.done > 9:\n",
        ),
        "--plans dp2",
        "head.ln_f",
    ),
    LocatedFault(
        Fault(
            "LayerNorm: another epsilon",
            "dtgpt/models/layers.py",
            "return norm_and_pass(x, self.weight, self.bias, self.eps)",
            "return norm_and_pass(x, self.weight, self.bias, self.eps * 10)",
        ),
        CODE,
        "blocks.0.ln_1",
    ),
    LocatedFault(
        Fault(
            "the bias of QKV is dropped",
            "dtgpt/models/gpt2.py",
            'rearrange(self.qkv(x), "b t',
            'rearrange(self.qkv(x) - self.qkv.bias.to(x.dtype), "b t',
        ),
        CODE,
        "blocks.1.attn.qkv",
    ),
    LocatedFault(
        Fault(
            "dropout: two sites of a block share a key",
            "dtgpt/models/gpt2.py",
            "self.drop_2 = Dropout(config.dropout, index=2)",
            "self.drop_2 = Dropout(config.dropout, index=1)",
        ),
        f"{CODE} {DROPOUT}",
        "blocks.0",
    ),
    LocatedFault(
        Fault(
            "weight decay of biases and norms",
            "dtgpt/config/sections.py",
            "decay=shard.dimensions > 1)",
            "decay=True)",
        ),
        CODE,
        "blocks.0.ln_1",
    ),
    LocatedFault(
        Fault(
            "the second moment decays like the first",
            "dtgpt/ops/optim/adamw.py",
            "exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1])",
            "exp_avg_sq = betas[0] * exp_avg_sq + (1 - betas[0])",
        ),
        CODE,
        "blocks.0.attn.proj",
    ),
    LocatedFault(
        Fault(
            "the scale of scores lacks the root",
            "dtgpt/ops/attention/core.py",
            "return 1 / math.sqrt(head_dim) if",
            "return 1 / head_dim if",
        ),
        f"{CODE} {DROPOUT}",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "causal mask: a query sees the next token",
            "dtgpt/ops/attention/core.py",
            "hidden = column > position\n",
            "hidden = column > position + 1\n",
        ),
        f"{CODE} {DROPOUT}",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "16-bit weights stay as they were before the update",
            "dtgpt/ops/optim/adamw.py",
            "slot.low_precision.copy_(rounded if skip is None else torch.where(skip, slot.low_precision, rounded))",
            "pass",
        ),
        "--plans dp2 --precision bf16",
        "blocks.0.attn.proj",
    ),
    LocatedFault(
        Fault(
            "cp: gradients of attention do not go back to their ranks",
            "dtgpt/parallel/context_parallel/exchange.py",
            "return exchange(grad, received, sent, group), None, None, None",
            "return grad, None, None, None",
        ),
        "--plans cp2",
        "blocks.1.attn.core",
    ),
    LocatedFault(
        Fault(
            "cp: the loss is scaled by cp",
            "dtgpt/parallel/build.py",
            "return 1 / (micro_batches * plan.data_ranks)",
            "return 1 / (micro_batches * plan.dp)",
        ),
        "--plans cp2",
        "head.lm_head",
    ),
    LocatedFault(
        Fault(
            "cp: positions begin at 0 in each slice",
            "dtgpt/parallel/context_parallel/batches.py",
            "positions=own(positions),",
            "positions=own(batch.positions),",
        ),
        "--plans cp2",
        "embedding.wpe",
    ),
    LocatedFault(
        Fault(
            "cp: each slice draws the masks of the first tokens",
            "dtgpt/parallel/context_parallel/slices.py",
            "start=(before[0] + place.cp * settings.local_length, 0)",
            "start=(before[0], 0)",
        ),
        f"--plans cp2 {DROPOUT}",
        "embedding.drop",
    ),
    LocatedFault(
        Fault(
            "cp: all ranks draw the masks of the first heads",
            "dtgpt/parallel/context_parallel/slices.py",
            "start=(before[0] + place.cp % ranks * heads, 0, 0)",
            "start=(before[0], 0, 0)",
        ),
        f"--plans cp2 {DROPOUT}",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "cp: values of the first slice are used again",
            "dtgpt/parallel/context_parallel/exchange.py",
            "joined = exchange(sent, self.once, self.once, self.group).flatten(0, 1).transpose(0, 1)",
            "got = exchange(sent, self.once, self.once, self.group).clone()\n        got[1:] = got[:1]\n"
            "        joined = got.flatten(0, 1).transpose(0, 1)",
        ),
        "--plans cp2",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "cp with tp: ranks draw the masks of the first tp rank's heads",
            "dtgpt/parallel/context_parallel/slices.py",
            "start=(before[0] + place.cp % ranks * heads, 0, 0)",
            "start=(place.cp % ranks * heads, 0, 0)",
        ),
        f"--plans cp2_tp2 {DROPOUT}",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "cp beyond heads: gradients of keys are those of the first ranks",
            "dtgpt/parallel/context_parallel/exchange.py",
            "sent = by_heads.expand(self.parts, *by_heads.shape).flatten(0, 1)",
            "sent = torch.cat([by_heads, *[by_heads.detach()] * (self.parts - 1)])",
        ),
        "--plans cp2 --model.num_heads 1",
        "blocks.1.attn.core",
    ),
    LocatedFault(
        Fault(
            "cp beyond heads: keys of the first slice are used again",
            "dtgpt/parallel/context_parallel/exchange.py",
            "return slices.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind()",
            "return slices[:1].expand_as(slices).permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind()",
        ),
        "--plans cp2 --model.num_heads 1",
        "blocks.0.attn.core",
    ),
    LocatedFault(
        Fault(
            "replicas halve the second moment from step 3 on",
            "dtgpt/ops/optim/adamw.py",
            "        self._update(gradients, self._numbers(lr, scale), skip)\n",
            "        halved = torch.distributed.is_initialized() and self.updates >= 2\n"
            "        torch._foreach_mul_(self.exp_avg_sq, 0.5 if halved else 1.0)\n"
            "        self._update(gradients, self._numbers(lr, scale), skip)\n",
        ),
        "--plans dp2 --steps 5",
        "embedding.wpe",
    ),
    LocatedFault(
        Fault(
            "Muon: one rank forgets a momentum",
            "dtgpt/optim/muon/muon.py",
            "            directions[index] = direction.to(self.dtype)\n",
            "            directions[index] = direction.to(self.dtype)\n"
            '            if self.shards[index].name == "blocks.1.mlp.fc.weight":\n'
            "                momentum.mul_(1 - self.matrices._here)\n",
        ),
        "--plans dp2 --optimizer.kind muon --steps 3",
        "blocks.1.mlp.fc",
    ),
    LocatedFault(
        Fault(
            "NorMuon: replicas forget the mean square of rows",
            "dtgpt/optim/muon/normuon.py",
            "            old.copy_(new if skip is None else torch.where(skip, old, new))\n",
            "            old.copy_(means if torch.distributed.is_initialized() else new)\n",
        ),
        "--plans dp2 --optimizer.kind normuon --steps 3",
        "blocks.1.attn.proj",
    ),
    LocatedFault(
        Fault(
            "the head draws a dropout mask of its own",
            "dtgpt/models/gpt2.py",
            "return self.lm_head(self.ln_f(x), targets, loss_weights)",
            "return self.lm_head(self.ln_f(torch.nn.functional.dropout(x, 0.1)), targets, loss_weights)",
        ),
        "--plans dp2",
        "head",
    ),
    LocatedFault(
        Fault(
            "a repeated batch counts in the validation loss",
            "dtgpt/train/objective.py",
            "if loss is not None and counts_here:",
            "if loss is not None:",
        ),
        "--plans dp2",
        "",
    ),
]
