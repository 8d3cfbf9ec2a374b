#!/usr/bin/env bash
# Measures on a machine with one or two H200s, and prints the tables:
#
#   benchmarks/run_h200.sh one [COMMIT] [RESULTS]    one GPU, under 4 minutes: the products of five models, then the
#                                                    path of two virtual ranks
#   benchmarks/run_h200.sh two [COMMIT] [RESULTS]    two GPUs, under 6 minutes: the path of five models beside baseline
#                                                    and floor, with the table of its stages
#   benchmarks/run_h200.sh ops [COMMIT] [RESULTS]    one GPU, under 3 minutes: the ops that move and mix rows
#   benchmarks/run_h200.sh bars [COMMIT] [RESULTS]   one GPU, under 3 minutes: RMSNorm fused with the sum, and weight
#                                                    gradients added in place, of five models beside their parts
#   benchmarks/run_h200.sh memory [COMMIT] [RESULTS] two GPUs, under 3 minutes: scratch that lies on the host in part
#   benchmarks/run_h200.sh formats [COMMIT] [RESULTS] two GPUs, under 6 minutes: MXFP8 and NVFP4 beside BF16
#   benchmarks/run_h200.sh decode [COMMIT] [RESULTS] one GPU, under 4 minutes: the same of few tokens, all experts on it
#   benchmarks/run_h200.sh large [COMMIT] [RESULTS]  one GPU, under 7 minutes: the same of many tokens, training too
#   benchmarks/run_h200.sh tune [COMMIT] [RESULTS]   one GPU, under 5 minutes: are the tiles of BF16 products the best
#
# Call it again to go on: rows that are there with the same COMMIT are not measured again. Every command has a limit of
# its own; one that fails or runs past it leaves the others alone.
mode=${1:?one, two, ops, bars, memory, formats, decode, large or tune}
declare -A seconds=([one]=230 [two]=350 [ops]=170 [bars]=170 [memory]=170 [formats]=350 [decode]=230 [large]=400 [tune]=290)
budget=${seconds[$mode]:?one, two, ops, bars, memory, formats, decode, large or tune}
source "$(dirname "$0")/_budget.sh"

common=("${rows[@]}" --routings uniform --tokens 8192)

case $mode in
one)
  run 130 python3 -m benchmarks.bench_op --shapes "${models[@]}" "${common[@]}"
  run 90 python3 -m benchmarks.bench_path --virtual 2 --shapes qwen3-30b "${common[@]}" \
    --methods ours graph baseline floor stages
  ;;
two)
  for model in "${models[@]}"; do
    run 90 "${torchrun[@]}" 2 -m benchmarks.bench_path --shapes "$model" "${common[@]}" \
      --methods ours graph baseline floor stages
  done
  ;;
ops)
  run 150 python3 -m benchmarks.bench_op --shapes qwen3-30b deepseek-v3 "${common[@]}" \
    --ops publish route dispatch swiglu swiglu_backward combine reduce
  ;;
bars)
  run 165 python3 -m benchmarks.bench_op --shapes "${models[@]}" "${common[@]}" \
    --ops wgrad_w13_accumulate wgrad_w2_accumulate rmsnorm_reduce
  ;;
memory)
  run 40 python3 -m benchmarks.host_access
  for model in qwen3-30b deepseek-v3; do
    run 90 "${torchrun[@]}" 2 -m benchmarks.bench_memory --shapes "$model" "${common[@]}" --rounds 5
  done
  ;;
formats)
  for model in "${models[@]}"; do
    run 75 "${torchrun[@]}" 2 -m benchmarks.bench_formats --shapes "$model" "${rows[@]}" --routings uniform \
      --tokens 16 128 8192 --rounds 8
    run 60 "${torchrun[@]}" 2 -m benchmarks.bench_formats --shapes "$model" "${rows[@]}" --routings uniform \
      --tokens 8192 --rounds 8 --directions forward+backward
  done
  ;;
decode)
  run 220 python3 -m benchmarks.bench_formats --shapes "${models[@]}" "${rows[@]}" --routings uniform \
    --tokens 16 64 128 --rounds 20
  ;;
large)
  large=(python3 -m benchmarks.bench_formats "${rows[@]}" --routings uniform --tokens 8192 --rounds 8
    --directions inference forward+backward)
  run 140 "${large[@]}" --shapes deepseek-v3 --apart
  for model in qwen3-30b qwen3-235b mixtral-8x7b gpt-oss-120b; do
    run 70 "${large[@]}" --shapes "$model"
  done
  ;;
tune)
  tune=(python3 -m benchmarks.tune --shapes "${models[@]}" "${rows[@]}" --rounds 10)
  run 100 "${tune[@]}" --tokens 128 8192 --products w13 w2
  run 60 "${tune[@]}" --tokens 128 --products w13_swiglu
  run 120 "${tune[@]}" --tokens 8192 --products dgrad_w2 dgrad_w13 w13_swiglu
  ;;
esac
python3 -m benchmarks.report --results "$results" --commit "$commit"
exit $failed
