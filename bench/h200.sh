#!/usr/bin/env bash
# Speed on one GPU in under eight minutes: ViT-B/L/H at 224 and 336 px, bf16, attention varlen and xformers, blocks compiled
# or not, token fractions 1.0 to 0.5, each row between two runs of timm's dense model with SDPA. Weights are random.
#
#   bench/h200.sh [OUT]       everything to OUT (runs/h200): one folder with bench.json and a table per row of the plan
#   DRY=1 bench/h200.sh       the same plan with tiny models on the CPU, to test the script
#
# Images are the embedded digits, which need no download; DATA="data=photographs" takes others.
set -u
cd "$(dirname "$0")/.."
out=${1:-runs/h200}
limit=${LIMIT:-480}
python=${PYTHON:-python}
data=${DATA:-data=digits}
if [ -n "${DRY:-}" ]; then
    models="vit_tiny_patch16_224" sizes="64" attentions="sdpa masked" compiles="false" batch=4
    common="device=cpu threads=1 bench.repeats=2 bench.warmup=1"
else
    models="vit_base_patch16_224 vit_large_patch14_clip_224 vit_huge_patch14_clip_224"
    sizes="224 336" attentions="varlen xformers" compiles="false true" batch=128
    common="device=cuda precision=bf16 bench.repeats=10 bench.warmup=3"
fi
failed=0
for compile in $compiles; do # the plan's dearest half last: a run cut short still has every model and size
    for attention in $attentions; do
        for model in $models; do
            for size in $sizes; do
                name=$model-$size-$attention-compile_$compile
                left=$((limit - SECONDS))
                if [ "$left" -lt 20 ]; then
                    echo "$name: left out, the time is up"
                    continue
                fi
                # shellcheck disable=SC2086
                timeout "$left" $python launch/run.py do=bench task=cls $data data.size="$size" model=timm \
                    model.architecture="$model" model.weights=none model.img_size="$size" policy=entropy \
                    attention="$attention" compile_blocks="$compile" "bench.batch_sizes=[$batch]" \
                    "bench.budgets=[0.5,0.7,0.85,1.0]" "bench.methods=[dense]" $common run_dir="$out/$name" ||
                    { echo "$name: failed" && failed=1; }
            done
        done
    done
done
exit $failed
