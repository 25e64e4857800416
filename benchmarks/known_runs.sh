#!/usr/bin/env bash
# Train the models of docs/known_runs.md by recipes that are translated from the tutorials' commands, on one GPU.
#
#     benchmarks/known_runs.sh sources.jsonl vocab.json merges.txt    # a text, and GPT-2's vocabulary
#
# Writes the data, the recipes and the folder runs/ where it is started. WITH="--device cpu --precision fp32 ..." adds
# options to each run.
set -euo pipefail
text=$1 vocabulary=(--data.vocab_file "$2" --data.merge_file "$3")
dtgpt prepare "$text" --output-prefix known --append-eod --vocab-file "$2" --merge-file "$3"

megatron=(torchrun pretrain_gpt.py --data-path known_text_document --vocab-file "$2" --merge-file "$3"
    --split 949,50,1 --fp16 --weight-decay 1e-2)
dtgpt translate --output known_345m.py -- "${megatron[@]}" --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 \
    --global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel --lr 0.00015 --train-iters 500000 \
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-fraction .01
dtgpt translate --output known_124m.py -- "${megatron[@]}" --num-layers 12 --hidden-size 768 \
    --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 16 \
    --global-batch-size 16 --lr 1e-4 --train-iters 260 --init-method-std 0.006
dtgpt translate --output known_d12.py -- ./train_gpt2cu -i known_text_document -j known_text_document -e d12 \
    -b 56 -t 1024 -d 458752 -l 0.002 -u 700 -c 0.1 -q 0.0 -x 18865

quiet=(--log.interval 1 --log.eval_interval 0 --log.sample_interval 0 --checkpoint.interval 0)
python known_345m.py --plan single --steps 200 "${quiet[@]}" ${WITH:-}
python known_124m.py --steps 260 "${quiet[@]}" ${WITH:-}
python known_d12.py --steps 22 "${vocabulary[@]}" "${quiet[@]}" ${WITH:-}
