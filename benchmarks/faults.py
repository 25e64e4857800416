"""Faults of one line, for `planted_faults.py`: sums, fractions, masks, offsets, keys, and state that is lost."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A line to change. `old` occurs once in the file at `path`."""

    name: str
    path: str
    old: str
    new: str


FAULTS = [
    Fault(
        "ramp: the fraction of a micro-batch stays that of the first step",
        "dtgpt/train/trainer.py",
        "self.optimizer.weigh_micro_batches(micro_batch_weight(micro_batches, self.settings.plan))",
        "pass",
    ),
    Fault(
        "ramp: samples are counted as if each step had the whole batch",
        "dtgpt/config/schedule.py",
        "return seen + (step - first) * size if step >= first",
        "return seen + (step - first) * self.whole if step >= first",
    ),
    Fault(
        "resume: learning rates are those of the former batch sizes",
        "dtgpt/train/trainer.py",
        "self.optimizer.follow(self.schedule.rates(self.steps, sizes))",
        "pass",
    ),
    Fault(
        "resume: fp16's hysteresis begins again",
        "dtgpt/optim/fp16/loss_scale.py",
        'for name in ("scale", *COUNTS):',
        'for name in ("scale", "growth_tracker", "skipped"):',
    ),
    Fault(
        "resume: gradients are scaled by the first loss scale",
        "dtgpt/optim/update.py",
        "restore_states(self.states, state)\n        self.weigh_micro_batches(self.micro_batch_weight)",
        "restore_states(self.states, state)",
    ),
    Fault(
        "resume: the number of updates begins at 0",
        "dtgpt/optim/update.py",
        'self.rule.updates.fill_(state["updates"])',
        "pass",
    ),
    Fault(
        "resume: fp8 forgets its history",
        "dtgpt/optim/fp8/scales.py",
        "if lines:",
        "lines = []\n        if lines:",
    ),
    Fault(
        "resume: the second moment is read over the first",
        "dtgpt/checkpoint/load.py",
        'yield source, tensor',
        'yield source, next(iter(optimizer.state(shard.index).values()))',
    ),
    Fault(
        "resume: 16-bit weights stay as they were",
        "dtgpt/checkpoint/load.py",
        "    shards.publish()",
        "    pass",
    ),
    Fault(
        "save: rows that replicas share are shifted by one",
        "dtgpt/parallel/shards.py",
        "return (first, *self.region[1:]), slice(rows.start, rows.stop)",
        "return (first, *self.region[1:]), slice(rows.start - (rows.start > 0), rows.stop - (rows.start > 0))",
    ),
    Fault(
        "save: the next step does not wait for the copies",
        "dtgpt/checkpoint/background/saver.py",
        "            self._copied.wait()",
        "            pass",
    ),
    Fault(
        "sums: the second of two 16-bit passes overwrites the first",
        "dtgpt/parallel/gradients.py",
        "if self.wire.dtype != torch.float32 and passes > 1:",
        "if self.wire.dtype != torch.float32 and passes > 2:",
    ),
    Fault(
        "sums: ZeRO adds gradients in 16 bits",
        "dtgpt/parallel/build.py",
        "reduce_dtype=torch.float32",
        "reduce_dtype=dtype",
    ),
    Fault(
        "sums: of 16-bit gradients one replica's count",
        "dtgpt/parallel/narrow_sums/sums.py",
        "self.pieces.view(self.group.size(), -1).sum(0, dtype=torch.float32)",
        "self.pieces.view(self.group.size(), -1)[0]",
    ),
    Fault(
        "sums: the two gradients of a tied table are not added on one rank",
        "dtgpt/parallel/shards.py",
        "            first += second\n",
        "",
    ),
    Fault(
        "sums: norms under sequence parallelism keep their part of the gradient",
        "dtgpt/parallel/shards.py",
        "if self.mesh.tp_group is not None and self._partial:",
        "if self.mesh.tp_group is not None and len(self._partial) > 99:",
    ),
    Fault(
        "sums: the norm counts what tp ranks repeat",
        "dtgpt/parallel/shards.py",
        "torch.tensor([1 / self.all[i].replicas for i in self._counted], device=mesh.device)",
        "torch.tensor([1.0 for i in self._counted], device=mesh.device)",
    ),
    Fault(
        "sums: the reported norm counts each tp rank",
        "dtgpt/optim/update.py",
        "self.scaler.scale * self.micro_batch_weight)\n        return norm",
        "self.scaler.scale * self.micro_batch_weight)\n        return norm * self.shards.mesh.plan.tp**0.5",
    ),
    Fault(
        "fp16: the norm is clipped before the loss scale comes off",
        "dtgpt/optim/update.py",
        "clip_factor(norm, self.clip) * inverse",
        "clip_factor(norm / inverse, self.clip) * inverse",
    ),
    Fault(
        "fp16: each rank decides for itself whether to skip",
        "dtgpt/optim/fp16/loss_scale.py",
        "self._excess = (counts[len(squares) :] > 0) | ~norm.isfinite()",
        "self._excess = excess | ~norm.isfinite()",
    ),
    Fault(
        "fractions: stages are counted as replicas of the loss weights",
        "dtgpt/train/objective.py",
        "mesh.sum(batch.loss_weights.count_nonzero())[0] / (plan.tp * plan.pp)",
        "mesh.sum(batch.loss_weights.count_nonzero())[0] / plan.tp",
    ),
    Fault(
        "fractions: a repeated batch counts in the validation loss",
        "dtgpt/train/objective.py",
        "if loss is not None and turn < len(batches):",
        "if loss is not None:",
    ),
    Fault(
        "offsets: replicas take samples that overlap",
        "dtgpt/train/objective.py",
        "samples.start + place.dp * count + torch",
        "samples.start + place.dp + torch",
    ),
    Fault(
        "masks: a tp rank draws dropout from one element too late",
        "dtgpt/parallel/tensor.py",
        "first = self.sizes[self.dim] // device_mesh.size() * device_mesh.get_local_rank()",
        "first = (self.sizes[self.dim] // device_mesh.size() + 1) * device_mesh.get_local_rank()",
    ),
    Fault(
        "masks: a document ends one token early",
        "dtgpt/models/batch.py",
        "stops = torch.where(ends, torch.arange(1, length + 1, device=ends.device), length)",
        "stops = torch.where(ends, torch.arange(length, device=ends.device), length)",
    ),
    Fault(
        "keys: each step draws the masks of the first",
        "dtgpt/train/objective.py",
        "return windows, sample_ids, fold(self.dropout_key, step)",
        "return windows, sample_ids, fold(self.dropout_key, 0)",
    ),
    Fault(
        "rates: the warmup begins a step late",
        "dtgpt/config/schedule.py",
        "return self.lr * min(after / self.warmup, 1.0)",
        "return self.lr * min(before / self.warmup, 1.0)",
    ),
    Fault(
        "rates: a schedule of samples counts steps",
        "dtgpt/config/schedule.py",
        "done = map(sizes.before, range(steps + 1)) if self.counts_samples else range(steps + 1)",
        "done = range(steps + 1)",
    ),
    Fault(
        "rates: the recorded one is that of the first step",
        "dtgpt/train/observer.py",
        '"lr": trainer.optimizer.lr.item(),',
        '"lr": trainer.optimizer.schedule[0].item(),',
    ),
    Fault(
        "AdamW: biases and norms decay",
        "dtgpt/config/sections.py",
        "decay=shard.dimensions > 1)",
        "decay=True)",
    ),
    Fault(
        "comm: a rank keeps its addend of a sum",
        "dtgpt/parallel/collectives.py",
        "dist.all_reduce(whole, group=self.group)",
        "pass",
    ),
    Fault(
        "comm: gathered parts are in the reverse order",
        "dtgpt/parallel/collectives.py",
        "return torch.cat(parts.chunk(self.group.size()), dim)",
        "return torch.cat(parts.chunk(self.group.size())[::-1], dim)",
    ),
    Fault(
        "liveness: a process that is silent is never lost",
        "dtgpt/liveness/peers.py",
        "elif self.gone or self._silent >= self._lost_after:",
        "elif self.gone:",
    ),
    Fault(
        "liveness: who was suspended accuses others of its own silence",
        "dtgpt/liveness/peers.py",
        "seconds = min(now - self._last, self._most)",
        "seconds = now - self._last",
    ),
    Fault(
        "optimizer: gradients are not clipped",
        "dtgpt/optim/update.py",
        "return (limit / (norm + 1e-6)).clamp(max=1.0)",
        "return torch.ones_like(norm)",
    ),
    Fault(
        "optimizer: the second moment decays like the first",
        "dtgpt/ops/optim/adamw.py",
        "exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1])",
        "exp_avg_sq = betas[0] * exp_avg_sq + (1 - betas[0])",
    ),
    Fault(
        "sampling: min_p is compared with the sum of all",
        "dtgpt/ops/sampling/sample.py",
        "distance = scaled - scaled.amax(dim=1, keepdim=True)",
        "distance = scaled - scaled.logsumexp(dim=1, keepdim=True)",
    ),
    Fault(
        "sampling: top_p leaves out the token that crosses it",
        "dtgpt/ops/sampling/sample.py",
        "return (before <= top_p[:, None])",
        "return (before + probabilities <= top_p[:, None])",
    ),
    Fault(
        "sampling: the presence penalty counts",
        "dtgpt/inference/rules/edits.py",
        "(counts > 0) * presence",
        "counts * presence",
    ),
    Fault(
        "start: of alternatives the last that fits is chosen",
        "dtgpt/planning/alternatives.py",
        "next(name for name, count in fits.items() if count == most)",
        "[name for name, count in fits.items() if count == most][-1]",
    ),
    Fault(
        "start: a run that was found is not resumed",
        "dtgpt/train/start.py",
        "return ResumePoint(run=run, checkpoint=checkpoint)",
        "return ResumePoint()",
    ),
    Fault(
        "cp: the mean over the loss weights is that of a rank",
        "dtgpt/train/objective.py",
        "mesh.sum(batch.loss_weights.count_nonzero())[0] / (plan.tp * plan.pp)",
        "batch.loss_weights.count_nonzero().double() * plan.data_ranks",
    ),
    Fault(
        "cp: documents are not kept apart",
        "dtgpt/parallel/context_parallel/batches.py",
        "        by_token=own(batch.by_token),",
        "        by_token=own(batch.by_token),\n        document_bounds=None,",
    ),
    Fault(
        "cp: a rank whose tokens are all masked divides by its own weights",
        "dtgpt/train/objective.py",
        "self.parts.mesh.plan.data_ranks / counted.clamp(min=1)",
        "1 / batch.loss_weights.sum()",
    ),
    Fault(
        "cp: bounds of documents are divided by cp",
        "dtgpt/parallel/context_parallel/exchange.py",
        "bounds[:, :end].clamp(max=end)",
        "bounds[:, :end] // self.ranks",
    ),
    Fault(
        "fp8: an activation that no fused kernel knows is replaced by SwiGLU",
        "dtgpt/ops/fp8/products.py",
        "        name = fused_name(activation, first.bias is not None)",
        '        name = fused_name(activation, first.bias is not None) or "swiglu"',
    ),
    Fault(
        "tp: the mean square of all heads is that of a rank's own",
        "dtgpt/parallel/more_styles/styles.py",
        "        bind(module, sum_of_heads=partial(sum_addends, mesh=device_mesh))",
        "        bind(module, sum_of_heads=partial(torch.mul, device_mesh.size()))",
    ),
    Fault(
        "muon: a packed matrix is scaled by the size of the whole weight",
        "dtgpt/optim/muon/muon.py",
        "factor = self.config.factor(sum(map(len, rows)), shape[-1])",
        "factor = self.config.factor(*shape)",
    ),
    Fault(
        "muon: q, k and v are orthogonalised as one matrix",
        "dtgpt/optim/muon/muon.py",
        "pieces = shards.config.pieces(known[shard.name], config.per_head)",
        "pieces = [(range(known[shard.name].shape[0]),)]",
    ),
    Fault(
        "cp: ranks that share heads draw the masks of other ones",
        "dtgpt/parallel/context_parallel/slices.py",
        "before[0] + place.cp % ranks * heads",
        "before[0] + place.cp * heads",
    ),
    Fault(
        "sums: a tied table of more than two stages keeps its own gradient",
        "dtgpt/parallel/shards.py",
        "        if self.mesh.tied_group is not None:\n            for i",
        "        if self.mesh.tied_group is not None and self.mesh.plan.pp == 2:\n            for i",
    ),
    Fault(
        "lora: alpha / rank is left out",
        "dtgpt/posttrain/lora/adapters.py",
        "low = F.linear(x, a) * self.scale",
        "low = F.linear(x, a)",
    ),
    Fault(
        "lora: keys and values take the A of queries",
        "dtgpt/posttrain/lora/adapters.py",
        "found[part.start : part.stop : part.step] = index",
        "found[part.start : part.stop : part.step] = 0",
    ),
    Fault(
        "grpo: an advantage is relative to all answers of the step",
        "dtgpt/posttrain/grpo/answers.py",
        "0.0, groups - groups.mean(1, keepdim=True))",
        "0.0, groups - groups.mean())",
    ),
    Fault(
        "grpo: the first token of an answer does not count",
        "dtgpt/posttrain/grpo/answers.py",
        "weights[row, first - 1 : len(ids) - 1] = factor",
        "weights[row, first : len(ids) - 1] = factor",
    ),
    Fault(
        "dpo: the smoothed part has the sign of the other",
        "dtgpt/posttrain/dpo/loss.py",
        "return losses, beta * (smooth * torch.sigmoid(z)",
        "return losses, beta * (-smooth * torch.sigmoid(z)",
    ),
    Fault(
        "dpo: ipo's slope is that of sums over tokens",
        "dtgpt/posttrain/dpo/loss.py",
        "            factors = factors / counts\n",
        "            pass\n",
    ),
    Fault(
        "chats: positions go on from one chat to the next",
        "dtgpt/posttrain/chats/packed.py",
        "        positions=reset_positions(ends),\n        document_bounds",
        "        document_bounds",
    ),
    Fault(
        "chats: the last chat sees the one before it",
        "dtgpt/posttrain/chats/packed.py",
        "        document_bounds=document_bounds(ends),\n        loss_weights",
        "        loss_weights",
    ),
    Fault(
        "gpt_neo: scores are divided by the root of the size of a head",
        "dtgpt/models/families/gpt_neo.py",
        "AttentionCore(window=window, scale=1.0)",
        "AttentionCore(window=window)",
    ),
    Fault(
        "gemma3: scores are divided by the root of the size of a head",
        "dtgpt/models/families/gemma3.py",
        "scale=config.attention_scalar**-0.5",
        "scale=config.head_dim**-0.5",
    ),
    Fault(
        "rotary: blocks with a window take the positions of the others",
        "dtgpt/models/families/gemma3.py",
        "Rotation(theta=self.rope_local_theta) if self.is_local(index) else self.rotation",
        "self.rotation",
    ),
    Fault(
        "experts: of equal scores any index comes first",
        "dtgpt/ops/experts/routing.py",
        "scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]",
        "scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count] * -1 + scores.shape[-1] - 1",
    ),
    Fault(
        "experts: a router multiplies in 16 bits",
        "dtgpt/ops/experts/routing.py",
        "return linear(x.to(wide), weight.to(wide), None)",
        "return linear(x, weight.to(x.dtype), None).to(wide)",
    ),
    Fault(
        "experts: the weights of a token add up to 1 where they should not",
        "dtgpt/ops/experts/routing.py",
        "F.softmax(logits, -1).gather(-1, experts)",
        "F.softmax(own, -1)",
    ),
    Fault(
        "experts: the gradient of a router is lost while the loss is right",
        "dtgpt/ops/experts/rows.py",
        "return dy, torch.stack(list(products), 1).to(weights.dtype)",
        "return dy, 0 * torch.stack(list(products), 1).to(weights.dtype)",
    ),
    Fault(
        "experts: weights that are corrected for the choice are corrected, too",
        "dtgpt/models/moe/mixture.py",
        "return Choice(experts, weigh(logits, experts, self.rule))",
        "bent = logits if correction is None else logits + correction\n"
        "        return Choice(experts, weigh(bent, experts, self.rule))",
    ),
    Fault(
        "experts: a token adds its rows in the order of experts",
        "dtgpt/ops/experts/rows.py",
        "return weighted_rows(y, weights, order.places)",
        "places, own = order.places.sort(-1)\n        return weighted_rows(y, weights.gather(-1, own), places)",
    ),
    Fault(
        "experts: gradients of rows are added in the order of experts",
        "dtgpt/ops/experts/rows.py",
        "return _sum_rows(grad.contiguous(), places), None",
        "return _sum_rows(grad.contiguous(), places.sort(-1).values), None",
    ),
    Fault(
        "experts: an expert has the first row of the next one",
        "dtgpt/ops/experts/rows.py",
        "torch.searchsorted(by_expert, known, right=True, out_int32=True)",
        "torch.searchsorted(by_expert, known, right=True, out_int32=True).add(1).clamp(max=len(flat))",
    ),
    Fault(
        "experts: a correction is rounded with the weights",
        "dtgpt/models/moe/mixture.py",
        "made if (made := fn(x)).dtype == x.dtype else x.to(made.device)",
        "fn(x)",
    ),
    Fault(
        "experts: the bias of an expert's output is not weighted",
        "dtgpt/models/moe/mixture.py",
        "return summed(made, choice.weights.flatten(0, -2), order).view_as(x)",
        "bias = 0 if self.down.bias is None else (self.down.bias.to(x.dtype)[choice.experts]"
        " * (1 - choice.weights[..., None])).sum(-2)\n"
        "        return summed(made, choice.weights.flatten(0, -2), order).view_as(x) + bias",
    ),
    Fault(
        "experts: FLOPs count all of them",
        "dtgpt/models/moe/config.py",
        "return whole // self.num_experts * self.experts_per_token if role in STACKS else whole",
        "return whole",
    ),
    Fault(
        "experts: a part of a stack is read from its first expert on",
        "dtgpt/interop/hf/experts.py",
        "for n in experts or range(1)",
        "for n in range(max(1, len(experts)))",
    ),
    Fault(
        "balance: tokens of padding are counted",
        "dtgpt/optim/balance/losses.py",
        "return sums.gather(1, end) > sums.gather(1, first)",
        "return sums.gather(1, end) >= sums.gather(1, first)",
    ),
    Fault(
        "balance: evaluation is counted",
        "dtgpt/optim/balance/state.py",
        "return _Watched.apply(logits, experts, shared.counted, self) if trains else logits",
        "if not trains:\n            self.take(logits, experts, shared.counted)\n"
        "        return _Watched.apply(logits, experts, shared.counted, self)",
    ),
    Fault(
        "balance: a pass that runs again in backward is counted again",
        "dtgpt/optim/balance/state.py",
        "ctx.save_for_backward(logits, experts)\n",
        "ctx.save_for_backward(logits, experts)\n"
        "        if torch._C._current_graph_task_id() != -1:\n            balance.take(logits, experts, counted)\n",
    ),
    Fault(
        "balance: the auxiliary loss is not attached",
        "dtgpt/optim/balance/state.py",
        "return grad if more is None else grad + more, None, None, None",
        "return grad, None, None, None",
    ),
    Fault(
        "balance: the loss of a sequence is divided by the number of micro-batches once more",
        "dtgpt/optim/balance/state.py",
        "self.last.copy_(self.mesh.all_reduce(self.totals))",
        "self.last.copy_(self.mesh.all_reduce(self.totals))\n"
        "        self.last[:, 2 * self.experts] /= self.mesh.plan.dp + 1",
    ),
    Fault(
        "balance: gradients are divided by the size of a micro-batch",
        "dtgpt/optim/balance/state.py",
        "part = (shared.share / (samples * logits.shape[1])).to(logits.dtype)",
        "part = (shared.share / (samples * samples * logits.shape[1])).to(logits.dtype)",
    ),
    Fault(
        "balance: gradients lack the weight of a micro-batch",
        "dtgpt/optim/balance/state.py",
        "scale = 1.0 if shared.scale is None else shared.scale.to(logits.dtype)",
        "scale = 1.0",
    ),
    Fault(
        "balance: the loss compares the loads of each rank",
        "dtgpt/optim/balance/state.py",
        "self.mesh.all_reduce(self.ahead)",
        "pass",
    ),
    Fault(
        "balance: corrections move by the loads of each rank",
        "dtgpt/optim/balance/state.py",
        "self.last.copy_(self.mesh.all_reduce(self.totals))",
        "self.last.copy_(self.totals)",
    ),
    Fault(
        "balance: loads of a step are added to those of the next",
        "dtgpt/optim/balance/state.py",
        "self.totals.zero_()",
        "pass",
    ),
    Fault(
        "balance: corrections move away from even loads",
        "dtgpt/optim/balance/state.py",
        "below = loads.sum(1, keepdim=True) - self.experts * loads",
        "below = self.experts * loads - loads.sum(1, keepdim=True)",
    ),
    Fault(
        "balance: corrections of a checkpoint are not read",
        "dtgpt/optim/balance/state.py",
        '"""Read the corrections again."""\n        self._knows = False',
        '"""Read the corrections again."""\n        self._knows = True',
    ),
    Fault(
        "balance: a sigmoid router may lower all scores",
        "dtgpt/optim/balance/losses.py",
        "return own / own.sum(-1, keepdim=True)",
        "return own",
    ),
]  # fmt: skip
