"""modded-nanogpt's track 3: its fixed model of 162M parameters, its batches and its Muon, from its shards of FineWeb.

hardware   one GPU of 40 GB or more; on a smaller one, lower --micro_batch_size (the curve stays the same)
command    python recipes/track3.py --data.path 'fineweb_train_*.bin' --data.valid_path 'fineweb_val_*.bin'
compare    python benchmarks/against_track3.py --theirs train_gpt_simple.py --steps 60
expect     records with Muon reach a validation loss of 3.28 after 3,250 steps (docs/optimizers.md); not tried here
measured   580,903 tokens/s on one H200; its own script 493,608 (docs/benchmarks.md)
"""

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig
from dtgpt.models.families.track3 import TRACK3
from dtgpt.optim.muon import MuonConfig


def recipe() -> Recipe:
    return Recipe(
        name="track3",
        model=TRACK3,
        optimizer=MuonConfig(
            lr=0.025,
            embedding_lr=0.7,
            head_lr=0.004,
            vector_lr=0.015,
            schedule="wsd",  # constant, then linear to 0 over the last 70 %
            wsd_decay=0.7,
            warmup=0,
            weight_decay=0.05,
            table_weight_decay=0.001,
            vector_weight_decay=0.001,
            adjust_lr="original",
            newton_schulz="convergent",
            newton_schulz_steps=12,
            beta1=0.8,
            eps=1e-10 / 524_288,  # their loss is a sum over these tokens, dtgpt's is a mean
            clip=0.0,
        ),
        steps=3250,
        micro_batch_size=64,
        global_batch_size=512,  # of 1024 tokens each: 524,288 tokens
        data=DataConfig(tokenizer="gpt2", order="sequential"),
        log=LogConfig(eval_interval=125, eval_samples=10_240, sample_tokens=0),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)
