"""The commands of Megatron-LM's GPT-2 tutorials, as they stand there: each works, or the answer names the command that
does."""

import pytest

TOKENIZER = "--tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
SIZES = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
OF_345M = (
    f"{SIZES} --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --fp16 "
    f"--data-path my-gpt2_text_document {TOKENIZER} --data-impl mmap --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --save checkpoints/gpt2 --load checkpoints/gpt2"
)
DECODING = "--fp16 --micro-batch-size 1 --out-seq-length 1024 --temperature 1.0 --top_p 0.9"


def test_345m_on_one_gpu_and_by_tensor_parallelism(translated):
    recipe, out = translated(f"python pretrain_gpt.py {OF_345M}")
    model, optimizer = recipe.model, recipe.optimizer
    assert (model.num_layers, model.hidden_size, model.num_heads, model.seq_length) == (24, 1024, 16, 1024)
    assert (recipe.plan, recipe.precision, recipe.steps, recipe.global_batch_size) == ("dp", "fp16", 500_000, 8)
    assert (optimizer.lr, optimizer.min_lr, optimizer.decay_steps, optimizer.warmup) == (1.5e-4, 1e-5, 320_000, 0.01)
    assert "cannot be done" not in out and out.splitlines()[-1] == "python my_recipe.py"
    launcher = "python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost"
    parallel = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --DDP-impl torch"
    split, out = translated(f"{launcher} --master_port 6000 pretrain_gpt.py {OF_345M} {parallel}")
    assert split.plan == "tp4_pp2_sp" and split.optimizer == optimizer and split.model == model
    assert out.splitlines()[-1] == "torchrun --nproc-per-node 8 my_recipe.py"


@pytest.mark.parametrize("command, wanted", [
    (f"python tools/preprocess_data.py --input oscar-1GB.jsonl --output-prefix my-gpt2 {TOKENIZER} --append-eod "
     "--dataset-impl mmap --workers 8",
     "dtgpt prepare --input oscar-1GB.jsonl --output-prefix my-gpt2 --tokenizer-type GPT2BPETokenizer --vocab-file "
     "gpt2-vocab.json --merge-file gpt2-merges.txt --append-eod on --workers 8"),
    ("python tools/preprocess_data.py --input codeparrot_data.json --output-prefix codeparrot --vocab vocab.json "
     "--dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file merges.txt --json-keys content --workers 32 "
     "--chunk-size 25 --append-eod",
     "dtgpt prepare --input codeparrot_data.json --output-prefix codeparrot --vocab-file vocab.json --tokenizer-type "
     "GPT2BPETokenizer --merge-file merges.txt --json-keys content --workers 32 --append-eod on"),
    ("python tools/checkpoint/util.py --model-type GPT --load-dir checkpoints/gpt2_tp4 --save-dir checkpoints/gpt2_tp1 "
     "--target-tensor-parallel-size 1 --target-pipeline-parallel-size 1",
     "dtgpt convert checkpoints/gpt2_tp4 checkpoints/gpt2_tp1 --target-tensor-parallel-size 1 "
     "--target-pipeline-parallel-size 1 --to megatron"),
    (f"python tools/run_text_generation_server.py {SIZES} --load checkpoints/gpt2 {DECODING} {TOKENIZER} --seed 42",
     "dtgpt serve checkpoints/gpt2 --precision fp16 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"),
    (f"python tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens --load checkpoints/gpt2 {TOKENIZER} "
     f"{SIZES} --micro-batch-size 8 --log-interval 10 --no-load-optim --no-load-rng",
     "dtgpt eval checkpoints/gpt2 --task wikitext103 --data wiki.test.tokens --vocab-file gpt2-vocab.json --merge-file "
     "gpt2-merges.txt"),
    ("python tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --load checkpoints/gpt2 "
     "--micro-batch-size 8",
     "dtgpt eval checkpoints/gpt2 --task lambada --data lambada_test.jsonl --strict on"),
])  # fmt: skip
def test_tools_become_commands(run, command, wanted):
    code, out = run("--", *command.split())
    assert code == 0 and out.splitlines()[-1] == wanted


@pytest.mark.parametrize("command, told", [
    (f"python tools/merge_mp_partitions.py --model-type GPT {SIZES} --load checkpoints/gpt2",
     "use dtgpt convert TREE TARGET --to megatron"),
    (f"python tools/generate_samples_gpt.py {SIZES} --load c {DECODING} --genfile out.json --num-samples 0",
     "use dtgpt generate MODEL --prompt TEXT"),
    ("tools/text_generation_cli.py localhost:5000", "it runs as it is, with the address of dtgpt serve MODEL"),
    ("python transformers/models/megatron_gpt2/convert_megatron_gpt2_checkpoint.py megatron_lm_345m_v0.0.zip",
     "use dtgpt convert TREE TARGET --to hf"),
    ("python megatron_gpt2/checkpoint_reshaping_and_interoperability.py --load_path a --save_path b",
     "use dtgpt convert MODEL TARGET --to hf, or --to megatron"),
    ("python pretrain_bert.py --num-layers 24", "dtgpt trains decoders of transformer blocks on text alone"),
    ("python tasks/main.py --task RACE --valid-data x --load c", "the tasks are lambada, wikitext103 and hellaswag"),
    ("python tools/checkpoint/util.py --model-type BERT --load-dir a --save-dir b", "BERT and T5 are not available"),
])  # fmt: skip
def test_other_commands_are_answered(run, command, told):
    assert told in " ".join(run("--", *command.split())[1].split())
